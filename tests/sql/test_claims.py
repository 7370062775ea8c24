"""Cards, ports, memory and cores are held once, even when the owner writes past every function."""

from __future__ import annotations

import psycopg
import pytest

from tests.sql.fleet import GIB
from tests.sql.test_fencing import sqlstate

SHARD = """
insert into llmgw_core.shard (replica_id, launch, rank, node_id, port, cpus, memory_mib, spec)
values (%s, 9, %s, %s, %s, %s, %s, '{}') returning id"""
CLAIM = """
insert into llmgw_core.gpu_claim (shard_id, node_id, gpu_uuid, memory_mib)
values (%s, %s, %s, %s)"""


@pytest.fixture
def direct(fleet):
    """Inserts as the owner: ``shard(rank, port, cpus, memory)`` and ``claim(shard, uuid, mib)``."""
    fleet.model("m")
    fleet.node("n1", gpus=2)
    fleet.node("n2", gpus=1)
    fleet.node("unknown", gpus=0, cpus_effective=None, memory_effective_mib=None)
    replica = fleet.replica("m")

    def shard(rank, port=None, cpus=None, memory_mib=None, node="n1"):
        return fleet.value(SHARD, replica, rank, node, port or 30000 + rank, cpus, memory_mib)

    def claim(shard_id, uuid_, memory_mib=None, node="n1"):
        fleet.admin.execute(CLAIM, (shard_id, node, uuid_, memory_mib))

    return shard, claim


def refused(call, *args, **more):
    with pytest.raises(psycopg.Error) as caught:
        call(*args, **more)
    return caught.value.sqlstate


def test_a_port_has_one_live_holder(fleet, direct):
    shard, _ = direct
    first = shard(0, port=5000)
    assert refused(shard, 1, port=5000) == "23505"
    fleet.admin.execute("update llmgw_core.shard set state = 'failed' where id = %s", (first,))
    shard(2, port=5000)


def test_memory_and_cores_stay_within_the_node(fleet, direct):
    shard, _ = direct
    shard(0, cpus=10, memory_mib=40 * GIB)
    assert refused(shard, 1, cpus=6.5) == "LG003"
    assert refused(shard, 1, memory_mib=24 * GIB + 1) == "LG003"
    last = shard(1, cpus=6, memory_mib=24 * GIB)
    fleet.admin.execute("update llmgw_core.shard set state = 'stopped' where id = %s", (last,))
    shard(2, cpus=6, memory_mib=24 * GIB)


def test_against_an_unknown_size_nothing_fits_but_nothing_asked_does(direct):
    shard, _ = direct
    assert refused(shard, 0, cpus=1, node="unknown") == "LG003"
    assert refused(shard, 0, memory_mib=1, node="unknown") == "LG003"
    shard(0, node="unknown")


def test_a_card_has_one_whole_holder_or_shares_within_it(fleet, direct):
    shard, claim = direct
    a, b, c = shard(0), shard(1), shard(2)
    claim(a, "n1-0")
    assert refused(claim, b, "n1-0") in ("LG003", "23505")
    assert refused(claim, b, "n1-0", 1) == "LG003"
    claim(a, "n1-1", 50 * GIB)
    assert refused(claim, b, "n1-1") == "LG003"
    assert refused(claim, b, "n1-1", 30 * GIB + 1) == "LG003"
    claim(b, "n1-1", 30 * GIB)
    assert refused(claim, c, "n1-1", 1) == "LG003"
    assert fleet.value("select count(*) from llmgw_core.gpu_claim") == 3


def test_claims_cannot_be_raised_past_the_card_by_update(fleet, direct):
    shard, claim = direct
    a, b = shard(0), shard(1)
    claim(a, "n1-0", 40 * GIB)
    claim(b, "n1-0", 40 * GIB)
    raise_ = "update llmgw_core.gpu_claim set memory_mib = %s where shard_id = %s"
    assert sqlstate(fleet.admin, raise_, 41 * GIB, b) == "LG003"
    assert sqlstate(fleet.admin, raise_, None, b) == "LG003"


def test_a_card_of_unknown_memory_is_not_shared(fleet, direct):
    shard, claim = direct
    fleet.admin.execute("update llmgw_core.gpu set memory_mib = null where uuid = 'n1-0'")
    assert refused(claim, shard(0), "n1-0", 1) == "LG003"
    claim(shard(1), "n1-0")


def test_holders_are_live_shards_of_the_cards_own_node(fleet, direct):
    shard, claim = direct
    a = shard(0)
    assert refused(claim, a, "n2-0", node="n2") == "LG003"
    fleet.admin.execute("update llmgw_core.shard set state = 'failed' where id = %s", (a,))
    assert refused(claim, a, "n1-0") == "LG003"


@pytest.mark.parametrize("last", ["stopped", "failed"])
def test_claims_port_and_memory_end_with_the_shard(fleet, last):
    fleet.model("m")
    node = fleet.node("n1", gpus=1)
    _, shard = fleet.running("m", node, 0, memory_mib=64 * GIB, port=20005)
    fleet.say(node, last, shard=shard)
    assert fleet.value("select count(*) from llmgw_core.gpu_claim") == 0
    fleet.running("m", node, 0, memory_mib=64 * GIB, port=20005)
