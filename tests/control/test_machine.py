"""Any sequence of events on a real Postgres, by the real tick: what must hold after each of them.

Rules run in a thread, which hypothesis wants; whatever is asked of the leader runs in trio.
"""

from __future__ import annotations

import contextlib
import uuid
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
import trio
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)
from psycopg import sql as psql

from controller.reconcile import lifecycle, snapshot
from controller.reconcile.decide import decide
from sql import states
from tests.control.duties import duty
from tests.control.living import Agents
from tests.control.test_mirror import differ
from tests.sql.fleet import SICK

if TYPE_CHECKING:
    from tests.control.duties import Duty
    from tests.sql.fleet import Fleet

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
NODES, MODELS = ("n0", "n1", "n2", "n3"), ("m0", "m1", "m2")
ROUNDS = 40
"""Ticks after which a fleet that is left alone must be at rest."""
QUICK = {
    "guard": 0, "silent_share_max": 1, "backoff_base": 0, "drain_deadline": 0, "min_residence": 0
}  # fmt: skip
LIVE = "s.state not in ('stopped', 'failed')"
BROKEN = {
    "a card twice": """select node_id, gpu_uuid from llmgw_core.gpu_claim group by 1, 2
        having count(*) > 1 and count(*) > count(memory_mib)""",
    "a port twice": f"""select node_id, p from llmgw_core.shard s,
        unnest(array[port, master_port]) p where {LIVE} and p is not null
        group by 1, 2 having count(*) > 1""",
    "a claim of no live shard": f"""select c.* from llmgw_core.gpu_claim c left join
        llmgw_core.shard s on s.id = c.shard_id and s.node_id = c.node_id and {LIVE}
        where s.id is null""",
    "half a gang": """select r.id from llmgw_core.replica r join llmgw_core.shard s
        on s.replica_id = r.id and s.launch = r.launch where r.state in ('starting', 'ready')
        group by r.id having count(*) <> max((s.spec->>'shards')::int)""",
    "an illegal move": """select d.detail from llmgw_core.decision d left join
        llmgw_core.transition t on t.kind = 'replica' and t.from_state = d.detail->>'from_state'
        and t.to_state = d.detail->>'to_state' where d.kind = 'move' and t.kind is null""",
    "runs for nobody": f"""select s.id from llmgw_core.shard s
        join llmgw_core.replica r on r.id = s.replica_id where {LIVE} and s.desired = 'running'
        and (s.launch <> r.launch or r.state in ('pending', 'stopping', 'failed', 'gone'))""",
}
LEFT = f"""select s.id, r.state from llmgw_core.shard s
    join llmgw_core.replica r on r.id = s.replica_id
    where {LIVE} and (r.state not in ('starting', 'ready') or s.launch <> r.launch)"""
ALIVE = f"select id from llmgw_core.shard s where {LIVE}"
COUNTS = """select m.name, m.min_replicas as least, m.max_replicas as most,
    (select array_agg(state) from llmgw_core.replica r where r.model = m.name and r.state <> 'gone')
        as there from llmgw_core.model m"""
REPLICA, SHARD = "update llmgw_core.replica set ", "update llmgw_core.shard set "
BY_HAND = [
    # What a superuser may type with every rule of the schema in force; some of it is refused.
    f"{REPLICA} state = 'draining' where id = %s and state = 'ready'",
    f"{REPLICA} state = 'failed' where id = %s and state = 'ready'",
    f"{REPLICA} state = 'stopping' where id = %s and state = 'starting'",
    f"{REPLICA} state = 'gone' where id = %s and state = 'failed'",
    f"{REPLICA} launch = 0 where id = %s",
    f"{REPLICA} launch = launch + 1 where id = %s",
    f"{REPLICA} restarts = -7 where id = %s",
    f"{REPLICA} model = 'm1' where id = %s",
    "delete from llmgw_core.replica where id = %s",
    "delete from llmgw_core.shard where replica_id = %s",
    f"{SHARD} desired = 'stopped' where replica_id = %s",
    f"{SHARD} state = 'failed' where replica_id = %s and state = 'ready'",
    f"{SHARD} state = 'assigned' where replica_id = %s and state = 'ready'",
    f"{SHARD} rank = rank + 5 where replica_id = %s",
    f"{SHARD} node_id = 'n1' where replica_id = %s",
    "delete from llmgw_core.gpu_claim where shard_id = %s",
    "update llmgw_core.node set alloc_gen = alloc_gen + %s",
]
"""With the number of a replica."""


class Machine(RuleBasedStateMachine):
    """Needs ``fleet`` and ``one`` of the test that runs it."""

    fleet: Fleet
    one: Duty

    @initialize()
    def empty(self) -> None:
        tables = psql.SQL("truncate llmgw_core.node, llmgw_core.model, llmgw_core.replica cascade")
        self.fleet.admin.execute(tables)
        self.agents = Agents(self.fleet)
        for name in NODES[:2]:
            self.agents.join(name, 2)
        self.fleet.model("m0", {"gpus": 1}, min_replicas=2)
        self.fleet.model("m1", {"shards": 2, "fabric": "any"})
        self.router = uuid.uuid4()
        self.fleet.controller.execute(
            "select llmgw_core.controller_join_v1(%s, 'router', 'h', 1, '0')", (self.router,)
        )
        self.live(3)

    def live(self, rounds: int) -> None:
        """The leader decides and the agents obey."""
        for _ in range(rounds):
            self.fleet.controller.execute(
                "select llmgw_core.router_report_v2(%s, '[]', '[]')", (self.router,)
            )
            self.tick()
            self.agents.work()

    @rule(name=st.sampled_from(NODES), gpus=st.integers(0, 2))
    def join(self, name: str, gpus: int) -> None:
        if name not in self.agents.nodes:
            self.agents.join(name, gpus)

    @rule(name=st.sampled_from(NODES), seconds=st.sampled_from([40, 200]))
    def fall_silent(self, name: str, seconds: int) -> None:
        if name in self.agents.nodes:
            self.agents.silent.add(name)
            self.fleet.silence(self.agents.nodes[name], seconds)

    @rule()
    def come_back(self) -> None:
        self.agents.silent.clear()
        self.agents.work()

    @rule(name=st.sampled_from(NODES), word=st.sampled_from(["ready", "cordoned", "draining"]))
    def say(self, name: str, word: str) -> None:
        if name in self.agents.nodes:
            self.fleet.controller.execute("select llmgw.set_node_intent(%s, %s)", (name, word))

    @rule(card=st.integers(0, 1), name=st.sampled_from(NODES), sick=st.booleans())
    def card_falls_sick_or_heals(self, card: int, name: str, sick: bool) -> None:
        found = SICK if sick else "findings = '[]'"
        self.fleet.admin.execute(
            f"update llmgw_core.gpu set {found} where uuid = %s", (f"{name}-{card}",)
        )

    @rule(
        name=st.sampled_from(MODELS), gpus=st.integers(0, 2), shards=st.integers(1, 2),
        least=st.integers(0, 3),
    )  # fmt: skip
    def model(self, name: str, gpus: int, shards: int, least: int) -> None:
        profile = {
            "gpus": gpus, "shards": shards, "fabric": "any", "fingerprint": f"{gpus}/{shards}"
        }  # fmt: skip
        self.fleet.model(name, profile, min_replicas=least, max_replicas=least + 1)

    @rule(name=st.sampled_from(MODELS))
    def remove(self, name: str) -> None:
        with contextlib.suppress(psycopg.Error):  # it is not there
            self.fleet.controller.execute("select llmgw.model_remove_v1('test', %s)", (name,))

    @rule(number=st.integers(0, 5), state=st.sampled_from(["failed", "stopped"]))
    def engine_ends(self, number: int, state: str) -> None:
        self.agents.end(number, state)

    @rule(name=st.sampled_from(MODELS), force=st.booleans())
    def replace(self, name: str, force: bool) -> None:
        with contextlib.suppress(psycopg.Error):
            self.fleet.controller.execute(
                "select llmgw.replace_v1('test', %s, null, %s)", (name, force)
            )

    @rule(number=st.integers(0, 3), edit=st.sampled_from(BY_HAND), then=st.booleans())
    def edit_by_hand(self, number: int, edit: str, then: bool) -> None:
        live = "select id from llmgw_core.replica where state <> 'gone' order by id"
        if there := self.fleet.rows(live):
            with contextlib.suppress(psycopg.Error):
                self.fleet.admin.execute(edit, (there[number % len(there)]["id"],))
            self.live(then)

    @rule(rounds=st.integers(1, 3))
    def time_passes(self, rounds: int) -> None:
        self.live(rounds)

    @rule()
    def agents_alone(self) -> None:
        self.agents.work()

    def tick(self) -> None:
        trio.from_thread.run(self.one.tick)

    @invariant()
    def nothing_is_broken(self) -> None:
        for what, query in BROKEN.items():
            assert self.fleet.rows(query) == [], what
        trio.from_thread.run(self._look)

    async def _look(self) -> None:
        pool = self.one.pool
        assert await differ(pool, self.one.ticker._mirror) == []
        seen = await snapshot.read(pool)
        plan = decide(seen.snapshot, seen.now, 5)
        assert plan == decide(seen.snapshot, seen.now, 5)
        for attempt in plan.attempts:
            named = {(r.profile, r.node) for r in attempt.refusals}
            profiles = next(m.profiles for m in seen.snapshot.models if m.name == attempt.model)
            every = {(p.name, n.id) for p in profiles for n in seen.snapshot.nodes}
            assert attempt.placed or every <= named, attempt
        for item in plan.items:
            assert not hasattr(item, "to_state") or item.to_state in states.REPLICA[item.from_state]
        around, _ = lifecycle.survey(seen.snapshot, seen.now, 5)
        for replica in seen.snapshot.replicas:
            if replica not in around.restless:
                assert lifecycle.fault(replica) is None
                assert lifecycle.step(replica, around) is None

    def teardown(self) -> None:
        """Left alone, with all its nodes, the fleet comes to rest; nothing runs for nobody."""
        self.agents.silent.clear()
        for name in self.agents.nodes:
            self.say(name, "ready")
        quiet = 0
        for _ in range(ROUNDS):
            before = self._decided()
            self.live(1)
            quiet = quiet + 1 if self._decided() == before else 0
            if quiet == 3:
                break
        last = "select kind, reason, detail from llmgw_core.decision order by id desc limit 6"
        assert quiet == 3, self.fleet.rows(last)
        self.nothing_is_broken()
        assert self.fleet.rows(LEFT) == []
        for row in self.fleet.rows(COUNTS):
            there: Any = row["there"] or []
            assert row["least"] <= len(there) <= row["most"], row
            assert set(there) <= {"ready", "pending"}, row
        ran = {id_ for known in self.agents.engines.values() for id_ in known}
        assert ran == {row["id"] for row in self.fleet.rows(ALIVE)}

    def _decided(self) -> Any:
        return self.fleet.value("select max(id) from llmgw_core.decision where kind <> 'attempt'")


async def test_any_history_keeps_every_invariant_and_comes_to_rest(
    asyncio_loop, database, fleet
) -> None:
    for name, value in QUICK.items():
        fleet.admin.execute(
            "update llmgw_core.setting set value = %s where name = %s", (value, name)
        )
    async with duty(database.settings()) as one:
        Machine.fleet, Machine.one = fleet, one
        few = settings(
            max_examples=10, stateful_step_count=15, deadline=None,
            suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        await trio.to_thread.run_sync(lambda: run_state_machine_as_test(Machine, settings=few))
