"""What attempts to place a model found, as people see it: kept once, counted by code."""

from __future__ import annotations

from psycopg.types.json import Jsonb


def refusal(profile, node, code, **more):
    return {"profile": profile, "node": node, "code": code, "reason": f"because of {code}", **more}


def attempt(fleet, model, *, placed, refusals=()):
    """Records what an attempt to place a model found; returns how many were new."""
    found = [{"model": model, "placed": placed, "refusals": list(refusals)}]
    call = "select llmgw_core.record_attempts_v1(%s, %s) as n"
    return fleet.controller.execute(call, (fleet.lead(), Jsonb(found))).fetchone()["n"]


def test_placements_tell_four_outcomes_apart(fleet):
    node = fleet.node("n1")
    for name in ("never", "placed", "bumpy", "stuck"):
        fleet.model(name)
    assert attempt(fleet, "placed", placed=True) == 1
    assert attempt(fleet, "bumpy", placed=True, refusals=[refusal("p", node.name, "memory")]) == 1
    why = [
        refusal("p", "n1", "memory", need="2 GiB", have="1 GiB"),
        refusal("q", "n1", "gpu_count"),
        refusal("q", "n2", "gpu_count"),
    ]
    assert attempt(fleet, "stuck", placed=False, refusals=why) == 1
    shown = {
        row["model"]: row
        for row in fleet.rows("select model, outcome, refused, main_reason from llmgw.placements")
    }
    assert {name: (row["outcome"], row["refused"]) for name, row in shown.items()} == {
        "never": ("no attempt yet", 0),
        "placed": ("placed and nothing rejected", 0),
        "bumpy": ("placed, rejected along the way", 1),
        "stuck": ("could not be placed", 3),
    }
    assert shown["stuck"]["main_reason"] == "because of memory (1 of 1 candidates)"
    assert [
        row["code"] for row in fleet.rows("select code from llmgw.rejections where model = 'stuck'")
    ] == ["memory", "gpu_count", "gpu_count"]
    assert fleet.rows("select code, candidates, for_example from llmgw.why_not") == [
        {"code": "gpu_count", "candidates": 2, "for_example": ["n1", "n2"]},
        {"code": "memory", "candidates": 1, "for_example": ["n1"]},
    ]


def test_equal_refusals_are_kept_once_until_they_grow_old(fleet):
    fleet.model("m")
    first = [refusal("p", "n1", "memory", have="1 GiB"), refusal("p", "n2", "memory")]
    assert attempt(fleet, "m", placed=False, refusals=first) == 1
    assert (
        attempt(
            fleet,
            "m",
            placed=False,
            refusals=[refusal("p", "n2", "memory"), refusal("p", "n1", "memory", have="2 GiB")],
        )
        == 0
    )
    assert fleet.value("select count(*) from llmgw_core.rejection") == 2
    assert attempt(fleet, "m", placed=True, refusals=first) == 1
    assert attempt(fleet, "m", placed=True, refusals=first[:1]) == 1
    assert fleet.value("select refused from llmgw.placements") == 1
    assert attempt(fleet, "m", placed=True, refusals=first[:1]) == 0
    # Their partition will be dropped one day; a model that is stuck for a month must still say why.
    fleet.admin.execute(
        "update llmgw_core.attempt set decision_at = decision_at - interval '16 days'"
    )
    assert attempt(fleet, "m", placed=True, refusals=first[:1]) == 1


def test_a_code_that_the_database_does_not_know_costs_no_other_row(fleet):
    for name in ("m", "other"):
        fleet.model(name)
    found = [refusal("p", "n1", "gpu_taken"), refusal("p", "n2", "from_the_future"), {"node": "n3"}]
    documents = [
        {"model": name, "placed": False, "refusals": found[: 3 - i]}
        for i, name in enumerate(("m", "other"))
    ]
    call = "select llmgw_core.record_attempts_v1(%s, %s) as n"
    assert fleet.controller.execute(call, (fleet.lead(), Jsonb(documents))).fetchone()["n"] == 2
    counted = fleet.rows("select model, code, candidates from llmgw.why_not order by model, code")
    assert [tuple(row.values()) for row in counted] == [
        ("m", "from_the_future", 1),
        ("m", "gpu_taken", 1),
        ("m", "none", 1),
        ("other", "from_the_future", 1),
        ("other", "gpu_taken", 1),
    ]
