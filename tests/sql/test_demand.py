"""What routers tell of demand, what is made of it, and measurements of capacity."""

from __future__ import annotations

import uuid

import pytest
from psycopg.types.json import Jsonb

from sql import queries
from tests.sql.fleet import refusal_of
from tests.usage_columns import listed

REPORT = "select llmgw_core.router_report_v2(%s, '[]', %s)"


def router(fleet) -> uuid.UUID:
    name = uuid.uuid4()
    fleet.controller.execute(
        "select llmgw_core.controller_join_v1(%s, 'router', 'h', 1, '0')", (name,)
    )
    return name


def tell(fleet, name, *rows):
    fleet.controller.execute(REPORT, (name, Jsonb(list(rows))))


def said(model="m", waiting=0, in_flight=0, wanted_age_ms=None):
    row = {"model": model, "waiting": waiting, "in_flight": in_flight}
    return {**row, "wanted_age_ms": wanted_age_ms}


def asked(fleet, model="m"):
    (row,) = fleet.rows(
        "select waiting, in_flight, peak, wanted_at is not null as wanted, routers"
        " from llmgw.demand where model = %s",
        model,
    )
    return tuple(row.values())


def earlier(fleet, seconds):
    """The clock of what was told so far is put back."""
    fleet.admin.execute(
        "update llmgw_core.demand set peak_since = peak_since - make_interval(secs => %(s)s),"
        " wanted_at = wanted_at - make_interval(secs => %(s)s)",
        {"s": seconds},
    )


def test_demand_is_the_sum_over_live_routers_and_unknown_without(fleet):
    fleet.model("m")
    assert asked(fleet) == (None, None, None, False, 0)
    assert fleet.value("select router->>'queue' from llmgw.summary") is None
    one, two = router(fleet), router(fleet)
    assert asked(fleet) == (0, 0, 0, False, 2)
    tell(fleet, one, said(waiting=2, in_flight=3, wanted_age_ms=5), said("unheard-of", 1))
    tell(fleet, two, said(in_flight=4))
    assert asked(fleet) == (2, 7, 9, True, 2)
    assert fleet.value("select router->'queue' from llmgw.summary") == 2
    tell(fleet, one)  # it names the model no more
    assert asked(fleet) == (0, 4, 9, False, 2)
    fleet.admin.execute(
        "update llmgw_core.controller set seen_at = clock_timestamp() - interval '11 s'"
        " where id = %s",
        (two,),
    )
    assert asked(fleet) == (0, 0, 5, False, 1)


@pytest.mark.parametrize(
    ("ages", "peak"),
    [((30, 0), 9), ((55, 0), 9), ((61, 50), 9), ((61, 61), 2), ((121, 0), 2), ((200, 121), 1)],
)
def test_the_peak_of_the_last_minute_is_always_whole(fleet, ages, peak):
    fleet.model("m")
    one = router(fleet)
    tell(fleet, one, said(in_flight=9))
    earlier(fleet, ages[0])
    tell(fleet, one, said(in_flight=2))
    earlier(fleet, ages[1])
    tell(fleet, one, said(in_flight=1))
    assert asked(fleet)[2] == peak


def test_a_newly_wanted_model_is_news_once(fleet):
    fleet.model("m")
    one = router(fleet)

    def news(*rows):
        before = fleet.value("select last_value from llmgw_core.change")
        tell(fleet, one, *rows)
        return fleet.value("select last_value from llmgw_core.change") - before

    assert news(said(in_flight=1)) == 0
    assert news(said(waiting=1, wanted_age_ms=3)) == 1
    assert news(said(waiting=2, wanted_age_ms=900)) == 0
    assert news(said(in_flight=2)) == 0
    assert news(said(waiting=1, wanted_age_ms=3)) == 1
    earlier(fleet, 11)  # nobody asked since
    assert news(said(wanted_age_ms=11_500)) == 0
    assert news(said(waiting=1, wanted_age_ms=3)) == 1


def test_housekeeping_forgets_demand_of_routers_and_models_that_are_gone(fleet):
    fleet.model("m")
    one = router(fleet)
    tell(fleet, one, said(in_flight=1))
    tell(fleet, uuid.uuid4(), said(in_flight=1))
    keep = "select llmgw_core.housekeep_v1(%s)"
    fleet.controller.execute(keep, (fleet.lead("housekeeping"),))
    assert fleet.rows("select router_id from llmgw_core.demand") == [{"router_id": one}]
    fleet.controller.execute("select llmgw.model_remove_v1('me', 'm')")
    fleet.controller.execute(keep, (fleet.lead("housekeeping"),))
    assert fleet.rows("select router_id from llmgw_core.demand") == []


PUT = "select llmgw.capacity_put_v1('me', %s, %s)"


def put(fleet, model="m", **measured):
    fleet.controller.execute(PUT, (model, Jsonb(measured)))


def used(fleet, model="m"):
    (row,) = fleet.rows(
        "select d.concurrency, m.concurrency_source, d.concurrency_profile from llmgw.demand d"
        " join llmgw.models m on m.name = d.model and m.concurrency = d.concurrency"
        " where d.model = %s",
        model,
    )
    return tuple(row.values())


def test_a_measurement_replaces_and_outlives_its_model(fleet):
    fleet.model("m")
    assert used(fleet) == (8.0, "default", None)
    put(fleet, profile="p", concurrency=4)
    put(fleet, profile="p", concurrency=12, ttft_ms={"p50": 20, "p95": 90}, replica=7)
    assert used(fleet) == (12.0, "measured", "p")
    put(fleet, profile="p", concurrency=6, node_class="small")
    assert used(fleet) == (6.0, "measured", "p")  # the weakest class counts
    fleet.controller.execute("select llmgw.model_remove_v1('me', 'm')")
    (first, _) = fleet.rows("select * from llmgw.capacity")
    assert (first["concurrency"], first["ttft_ms"], first["replica"], first["measured_by"]) == (
        12.0,
        {"p50": 20, "p95": 90},
        7,
        "me",
    )


def test_the_number_is_that_of_the_profile_that_runs(fleet):
    profiles = ({"name": n, "engine": "llamacpp", "fingerprint": n} for n in ("gpu", "cpu"))
    fleet.model("m", *profiles)
    put(fleet, profile="gpu", concurrency=64)
    put(fleet, profile="cpu", concurrency=2)
    assert used(fleet) == (64.0, "measured", "gpu")
    fleet.replica("m")
    fleet.admin.execute("update llmgw_core.replica set profile = 'cpu'")
    assert used(fleet) == (2.0, "measured", "cpu")


def test_unknown_models_and_profiles_are_refused_by_name(fleet):
    fleet.model("m")
    known = Jsonb({"profile": "p", "concurrency": 1})
    assert refusal_of(fleet.controller, PUT, ("none", known)) == "LG005"
    other = Jsonb({"profile": "q", "concurrency": 1})
    assert refusal_of(fleet.controller, PUT, ("m", other)) == "LG003"


def test_who_leaves_for_whom_is_kept_until_it_is_wanted_again(fleet):
    fleet.model("m")
    node = fleet.node("n1")
    replica, _ = fleet.running("m", node)
    fleet.move(replica, "draining", room_for="other")
    assert fleet.value("select room_for from llmgw_core.replica") == "other"
    fleet.move(replica, "ready")
    assert fleet.value("select room_for from llmgw_core.replica") is None


def test_D26_models_that_do_little_but_take_turns_are_trouble(fleet):
    fleet.model("m")
    node = fleet.node("n1")
    replica, _ = fleet.running("m", node)
    turns = "select why from llmgw.trouble where what = 'models take turns' and object = 'm'"
    for other in ("a", "b", "a", "b"):
        assert fleet.rows(turns) == []
        fleet.move(replica, "draining", room_for=other, model="m")
        fleet.move(replica, "ready")
    (row,) = fleet.rows(turns)
    assert row["why"].startswith("4 of its replicas made room within 10 minutes, for a, b")


def shares(fleet, *routers) -> list[int]:
    """What each router sends the one replica at once."""
    query = queries("router")["route_replicas"].replace("$1", "%s")
    rows = [fleet.controller.execute(query, (name,)).fetchall() for name in routers]
    return [row["share"] for (row,) in rows]


def depth(fleet) -> tuple[int, str]:
    (row,) = fleet.rows("select depth, depth_source from llmgw.replicas")
    return row["depth"], row["depth_source"]


def uses(fleet, name, replica, in_flight):
    rows = Jsonb([{"replica_id": replica, "in_flight": in_flight}])
    fleet.controller.execute("select llmgw_core.router_report_v1(%s, %s)", (name, rows))


def served(fleet) -> int:
    """A ready replica of the profile p."""
    fleet.model("m")
    replica = fleet.replica("m")
    for state in ("starting", "ready"):
        fleet.admin.execute("update llmgw_core.replica set state = %s", (state,))
    fleet.admin.execute("update llmgw_core.replica set profile = 'p', endpoint = 'http://e:1'")
    return replica


def test_the_depth_of_a_replica_is_measured_or_the_setting_and_it_is_said_which(fleet):
    served(fleet)
    assert depth(fleet) == (1024, "default")
    fleet.admin.execute("update llmgw_core.setting set value = 32 where name = 'depth'")
    assert depth(fleet) == (32, "default")
    put(fleet, profile="p", concurrency=12.7)
    assert depth(fleet) == (12, "measured")
    put(fleet, profile="p", concurrency=0.3, node_class="small")
    assert depth(fleet) == (1, "measured")  # the weakest class, and never nothing


def test_a_router_sends_what_the_others_leave_of_a_depth_and_never_less_than_its_part(fleet):
    replica = served(fleet)
    put(fleet, profile="p", concurrency=10)
    one = router(fleet)
    assert shares(fleet, one) == [10]
    assert shares(fleet, uuid.uuid4()) == [10]  # it has not joined yet
    two, three = router(fleet), router(fleet)
    assert shares(fleet, one, two, three) == [10, 10, 10]  # nobody else sends anything
    uses(fleet, one, replica, 10)
    assert shares(fleet, one, two) == [10, 4]  # its part, though nothing is left
    uses(fleet, one, replica, 4)
    uses(fleet, two, replica, 3)
    assert shares(fleet, one, two, three) == [7, 6, 4]
    fleet.admin.execute(
        "update llmgw_core.controller set seen_at = seen_at - interval '1 min' where id <> %s",
        (three,),
    )
    assert shares(fleet, three) == [10]  # the others died; what they ran does not count


def test_how_long_a_request_waited_is_kept(fleet):
    row = {"id": str(uuid.uuid4()), "key_id": "k", "endpoint": "chat", "status": "ok"}
    now = fleet.rows("select extract(epoch from clock_timestamp())::float as now")[0]["now"]
    rows = [
        {**row, "stream": False, "at": now, "queue_ms": 12.5},
        {**row, "id": str(uuid.uuid4()), "stream": True, "at": now},
    ]
    fleet.controller.execute(
        "select llmgw_core.usage_flush_v2(%s)", (Jsonb([listed(row) for row in rows]),)
    )
    kept = fleet.rows("select queue_ms from llmgw_core.usage_event order by stream")
    assert [row["queue_ms"] for row in kept] == [12.5, None]
