"""Builds small fleets in a test's database by the functions that agents and controllers call.

Synchronous (psycopg); other tests may import it: ``with open_fleet(database) as fleet: ...``.
"""

from __future__ import annotations

import itertools
import secrets
import uuid
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg.rows import dict_row
from psycopg.types.json import Jsonb

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tests.conftest import Database

GIB = 1024
HOST: dict[str, Any] = {
    "hostname": "host",
    "mgmt_addr": "10.0.0.1",
    "os": "Debian 12",
    "arch": "x86_64",
    "cpu_flags": ["avx2"],
    "cpus_host": 16,
    "cpus_effective": 16.0,
    "memory_host_mib": 64 * GIB,
    "memory_effective_mib": 64 * GIB,
    "memory_available_mib": 60 * GIB,
    "labels": {"rack": "r1"},
    "agent_version": "0.1.0",
    "ports": [20000, 20099],
    "warnings": [],
}
SICK = """findings = '[{"code": "xid_79", "text": "Xid 79", "unhealthy": true}]'"""
"""What an agent found of a card that is out; healthy and problems follow by trigger."""
PROFILE: dict[str, Any] = {"name": "p", "engine": "llamacpp", "fingerprint": "f1"}
SPEC: dict[str, Any] = {"engine": "llamacpp", "source": "file:/m.gguf", "args": [], "env": {}}


def digest(secret: str) -> bytes:
    """What the database keeps of a token or key."""
    return sha256(secret.encode()).digest()


def card(index: int, **more: Any) -> dict[str, Any]:
    """One GPU as an agent reports it: 80 GiB of class H100."""
    known = {"uuid": f"GPU-{index}", "index": index, "name": "NVIDIA H100", "class": "H100"}
    return {**known, "memory_mib": 80 * GIB, "healthy": True, "problems": [], **more}


def port(hca: str = "mlx5_0", **more: Any) -> dict[str, Any]:
    """One InfiniBand port as an agent reports it, on the fabric of subnet manager 01."""
    known = {"hca": hca, "port": 1, "link_layer": "InfiniBand", "state": "ACTIVE", "active": True}
    fabric = {"rate_gbps": 400, "key": "ib:01", "sm_guid": "01", "sm_lid": 1, "lid": 5}
    return {**known, "phys_state": "LinkUp", **fabric, **more}


@dataclass(slots=True)
class Node:
    """An enrolled node; ``token`` is its secret and ``boot`` its agent's process."""

    name: str
    token: str
    boot: str = field(default_factory=lambda: str(uuid.uuid4()))


class Fleet:
    """Three connections (superuser, controller, agent) and what tests do with them."""

    def __init__(self, admin: Any, controller: Any, agent: Any) -> None:
        self.admin = admin
        self.controller = controller
        self.agent = agent
        self.holder = uuid.uuid4()
        self._ports = itertools.count(20000)

    def value(self, statement: str, *args: Any) -> Any:
        """First column of the first row, as the superuser."""
        row = self.admin.execute(statement, args).fetchone()
        return next(iter(row.values())) if row else None

    def rows(self, statement: str, *args: Any) -> list[dict[str, Any]]:
        """All rows, as the superuser."""
        found: list[dict[str, Any]] = self.admin.execute(statement, args).fetchall()
        return found

    def token(self, node: str | None, *, uses: int = 1, ttl_s: float = 3600) -> str:
        """An enrolment token, for one node or any new one."""
        made = secrets.token_urlsafe(24)
        self.controller.execute(
            "select llmgw.node_enroll_v1('test', %s, %s, %s, %s)", (node, digest(made), uses, ttl_s)
        )
        return made

    def enrol(self, name: str, token: str | None = None) -> Node:
        """Enrols a node with a token bound to it, or the given one; it said nothing yet."""
        secret = secrets.token_urlsafe(32)
        given = token or self.token(name)
        self.agent.execute("select agent.enroll(%s, %s, %s)", (given, name, secret))
        return Node(name, secret)

    def node(self, name: str, gpus: int = 0, *, beat: bool = True, **host: Any) -> Node:
        """An enrolled node with facts, ``gpus`` cards, llamacpp, and a first beat."""
        node = self.enrol(name)
        self.report(node, "host", {**HOST, "hostname": name, **host})
        self.report(node, "gpus", [card(i, uuid=f"{name}-{i}") for i in range(gpus)])
        self.report(node, "engines", [{"engine": "llamacpp", "version": "1"}])
        if beat:
            self.sync(node)
        return node

    def report(self, node: Node, what: str, facts: Any) -> None:
        """``agent.report_<what>``."""
        self.agent.execute(f"select agent.report_{what}(%s, %s)", (node.token, Jsonb(facts)))

    def sync(self, node: Node, have_gen: int | None = None, **report: Any) -> dict[str, Any]:
        """``agent.sync`` with this report; by default the agent has applied everything."""
        gen = self.value("select alloc_gen from llmgw_core.node where id = %s", node.name)
        document = {"boot": node.boot, "applied_gen": gen, **report}
        found: dict[str, Any] = self.agent.execute(
            "select * from agent.sync(%s, %s, %s)", (node.token, have_gen, Jsonb(document))
        ).fetchone()
        return found

    def say(self, node: Node, *states: str, shard: int, **more: Any) -> None:
        """Reports these states of one shard, one sync each."""
        for state in states:
            self.sync(node, shards=[{"shard": shard, "state": state, **more}])

    def apply(
        self,
        models: Sequence[dict[str, Any]] = (),
        pools: Sequence[dict[str, Any]] = (),
        *,
        prune: bool = False,
    ) -> dict[str, str]:
        """Applies a catalog as from the API: name -> added, changed, unchanged or removed."""
        rows = self.controller.execute(
            "select * from llmgw_core.catalog_apply_v1('test', %s, %s, 'api', null, %s)",
            (Jsonb(list(pools)), Jsonb(list(models)), prune),
        ).fetchall()
        return {row["name"]: row["action"] for row in rows}

    def model(self, name: str, *profiles: dict[str, Any], **more: Any) -> dict[str, Any]:
        """Adds a model (default: one replica, one CPU profile ``p``) and returns its document."""
        document = {
            "name": name,
            "source": "file:/m.gguf",
            "min_replicas": 1,
            "max_replicas": 4,
            "aliases": [],
            "fallbacks": [],
            "profiles": [{**PROFILE, **p} for p in profiles or ({},)],
            **more,
        }
        self.apply([document])
        return document

    def lead(self, duty: str = "tick") -> int:
        """Takes or renews a duty and returns its term."""
        row = self.controller.execute(
            "select term from llmgw_core.lease_take_v1(%s, %s)", (duty, self.holder)
        ).fetchone()
        assert row is not None, f"another holder leads {duty}"
        term: int = row["term"]
        return term

    def commit(self, *items: Any, term: int | None = None) -> list[str]:
        """``commit_plan_v1``: the outcome of each item, ``ok`` or why not."""
        number = self.lead() if term is None else term
        rows = self.controller.execute(
            "select outcome from llmgw_core.commit_plan_v1(%s, %s) order by position",
            (number, Jsonb(list(items))),
        ).fetchall()
        return [row["outcome"] for row in rows]

    def replica(self, model: str) -> int:
        """A new pending replica of a model in the catalog."""
        assert self.commit({"kind": "create", "model": model, "reason": "test"}) == ["ok"]
        number: int = self.value("select max(id) from llmgw_core.replica")
        return number

    def place(self, replica: int, *shards: dict[str, Any], **more: Any) -> dict[str, Any]:
        """A placement item; see ``part`` for its shards."""
        ranked = [{"rank": rank, **shard} for rank, shard in enumerate(shards)]
        item = {"kind": "place", "replica_id": replica, "profile": "p", "fingerprint": "f1"}
        return {**item, "reason": "fits", "spec": SPEC, "shards": ranked, **more}

    def part(self, node: Node, *gpus: int, **more: Any) -> dict[str, Any]:
        """One shard of a placement on these cards of a node (by index), on a port of its own."""
        gen = self.value("select alloc_gen from llmgw_core.node where id = %s", node.name)
        uuids = [f"{node.name}-{index}" for index in gpus]
        return {
            "node_id": node.name,
            "basis": gen,
            "gpus": uuids,
            "port": next(self._ports),
            **more,
        }

    def move(self, replica: int, to_state: str, **more: Any) -> list[str]:
        """Moves a replica from the state it is in."""
        state = self.value("select state from llmgw_core.replica where id = %s", replica)
        item = {"kind": "move", "replica_id": replica, "from_state": state, "to_state": to_state}
        return self.commit({**item, "reason": "test", **more})

    def running(self, model: str, node: Node, *gpus: int, **more: Any) -> tuple[int, int]:
        """A replica that is ready on one node; returns its number and its shard's."""
        replica = self.replica(model)
        assert self.commit(self.place(replica, self.part(node, *gpus, **more))) == ["ok"]
        shard: int = self.value("select max(id) from llmgw_core.shard")
        self.say(node, "starting", "ready", shard=shard, pid=100)
        assert self.move(replica, "ready") == ["ok"]
        return replica, shard

    def silence(self, node: Node, seconds: float) -> None:
        """Moves a node's last beat back by so many seconds."""
        self.admin.execute(
            "update llmgw_core.beat set seen_at = seen_at - make_interval(secs => %s)"
            " where node_id = %s",
            (seconds, node.name),
        )


def connected(database: Database, url: str) -> psycopg.Connection[Any]:
    """A connection whose rows are dictionaries."""
    connection: psycopg.Connection[Any] = database.connect(url)
    connection.row_factory = dict_row
    return connection


@contextmanager
def open_fleet(database: Database) -> Iterator[Fleet]:
    """A fleet builder for one test's database."""
    with (
        connected(database, database.url) as admin,
        connected(database, database.controller_url) as controller,
        connected(database, database.agent_url) as agent,
    ):
        yield Fleet(admin, controller, agent)


def refusal_of(connection: Any, statement: str, args: Sequence[Any] = ()) -> str | None:
    """The SQLSTATE with which a statement is refused, or None when it passes."""
    try:
        connection.execute(statement, args)
    except psycopg.Error as error:
        return error.sqlstate or "no SQLSTATE"
    return None


def snapshot(admin: Any, without: Sequence[str] = ()) -> dict[str, list[str]]:
    """Every row of every table of llmgw_core as sorted text, to show what did not change.

    But for `touched`, which says that something may have changed.
    """
    tables = admin.execute(
        "select c.relname as name from pg_class c where c.relnamespace = 'llmgw_core'::regnamespace"
        " and c.relkind = 'r' and c.relname <> 'touched' order by 1"
    ).fetchall()
    names = [row["name"] for row in tables if row["name"] not in without]
    return {
        name: sorted(
            row["row"] for row in admin.execute(f'select t::text as row from llmgw_core."{name}" t')
        )
        for name in names
    }
