"""Measurements: kept, replaced, listed, refused by name."""

from __future__ import annotations

from controller.api.capacity import CapacityView
from tests.api.served import TINY

PATH = "/models/tiny/capacity"
MEASURED = {
    "profile": "cpu", "engine": "llamacpp", "concurrency": 4, "requests_per_s": 2.5,
    "tokens_per_s": 80, "ttft_ms": {"p50": 40, "p95": 90.5}, "itl_ms": {"p95": 20},
    "slo": {"ttft_ms": 500}, "replica": 7,
}  # fmt: skip


async def test_a_measurement_is_kept_replaced_and_outlives_its_model(api):
    await api.good("POST", "/models", TINY)
    kept = await api.good("PUT", PATH, MEASURED)
    assert MEASURED.items() <= kept.items()
    CapacityView.model_validate(kept)
    again = await api.good("PUT", PATH, {"profile": "cpu", "concurrency": 6})
    assert "engine" not in again
    other = await api.good("PUT", PATH, MEASURED | {"node_class": "epyc"})
    assert await api.good("GET", "/capacity") == [again, other]
    (model,) = await api.good("GET", "/models")
    assert (model["concurrency"], model["concurrency_source"]) == (4.0, "measured")
    await api.good("DELETE", "/models/tiny")
    assert await api.good("GET", "/capacity?model=tiny") == [again, other]
    assert await api.good("GET", "/capacity?model=x") == []


async def test_what_is_wrong_is_named(api):
    await api.good("POST", "/models", TINY)
    assert "no model nope" in await api.bad(404, "PUT", "/models/nope/capacity", MEASURED)
    said = await api.bad(400, "PUT", PATH, MEASURED | {"profile": "gpu"})
    assert "model tiny has no profile gpu: it has cpu" in said
    assert "profile" in await api.bad(400, "PUT", PATH, {"concurrency": 1})
    for wrong in ({"concurrency": 0}, {"concurrency": "many"}, {"ttft_ms": {"p99": 1}}):
        assert await api.bad(400, "PUT", PATH, MEASURED | wrong)
    assert await api.good("GET", "/capacity") == []


async def test_an_old_row_of_another_shape_hides_no_other(api, database):
    await api.good("POST", "/models", TINY)
    await api.good("PUT", PATH, MEASURED)
    with database.connect() as db:
        db.execute(
            "insert into llmgw_core.capacity (model, profile, concurrency, ttft_ms, measured_by)"
            " values ('old', 'p', 1, '[\"odd\"]', 'someone')"
        )
    assert [row["model"] for row in await api.good("GET", "/capacity")] == ["old", "tiny"]
