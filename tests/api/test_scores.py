"""Points of placement: what was kept of the choice, and what nodes have now."""

from __future__ import annotations

import pytest

from controller.api.views import ExplainView
from tests.cli.served import Ctl
from tests.control.duties import cards, duty
from tests.sql.fleet import open_fleet


@pytest.fixture
async def placed(database, asyncio_loop):
    """One replica placed by a real tick; three nodes of one, two and two cards."""
    with open_fleet(database) as fleet:
        for name, count in (("n1", 1), ("n2", 2), ("n3", 2)):
            cards(fleet, name, count)
        fleet.model("m", {"gpus": 1, "gpu_class": "H100"}, max_replicas=1)
        async with duty(database.settings()) as leader:
            while await leader.tick():
                pass
        yield fleet


async def test_scores_add_up_and_name_the_chosen_node(api, placed, url):
    plain = await api.good("GET", "/explain-placement?model=m")
    assert "scores" not in plain
    found = await api.good("GET", "/explain-placement?model=m&scores=true")
    ExplainView.model_validate(found)
    chosen, *now = found["scores"]
    assert (chosen["node"], chosen["replica"], chosen["profile"]) == ("n1", 1, "p")
    for row in found["scores"]:
        assert row["total"] == pytest.approx(sum(row["parts"].values()), abs=0.01)
    assert chosen["total"] >= max(row["total"] for row in now)
    assert [row["node"] for row in now] == ["n2", "n3"]
    assert all("replica" not in row for row in now)
    text = await Ctl(url).good("explain-placement", "m", "--scores")
    assert "chosen, the latest first:" in text
    assert "spread 300" in text
    assert "one more replica now, best first:" in text
    document = (await Ctl(url)("explain-placement", "m", "--scores", "--json")).document
    assert document["scores"] == found["scores"]


async def test_no_node_fits(api, placed, url):
    for name in ("n2", "n3"):
        await api.good("POST", f"/nodes/{name}/state", {"state": "cordon"})
    found = await api.good("GET", "/explain-placement?model=m&scores=true")
    assert [row["node"] for row in found["scores"]] == ["n1"]
    text = await Ctl(url).good("explain-placement", "m", "--scores")
    assert "No node fits one more replica now." in text


async def test_of_a_model_that_is_not_there(api, placed):
    assert "no model x" in await api.bad(404, "GET", "/explain-placement?model=x&scores=true")
