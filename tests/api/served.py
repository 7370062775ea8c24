"""A real admin app on a real socket, and rows to show."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import trio
from hypercorn.config import Config
from hypercorn.trio import serve

from controller.api import make_app

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import psycopg

    from sql.pool import Pool


@dataclass(frozen=True)
class Settings:
    """What the API reads of the controller's settings."""

    admin_listen: str = "127.0.0.1:0"
    admin_token_file: Path | None = None


@dataclass(frozen=True)
class Context:
    """What the API reads of the control process."""

    pool: Pool | None
    config: Settings = field(default_factory=Settings)


@asynccontextmanager
async def serving(context: Context) -> AsyncIterator[str]:
    """The app behind hypercorn; yields its URL."""
    config = Config()
    config.bind = ["127.0.0.1:0"]
    config.errorlog = None
    stop = trio.Event()
    async with trio.open_nursery() as nursery:
        app = make_app(context)
        start = partial(serve, app, config, shutdown_trigger=stop.wait)
        urls = await nursery.start(start)
        try:
            yield urls[0]
        finally:
            stop.set()


@dataclass
class Api:
    """A client with JSON in and out."""

    client: httpx.AsyncClient

    async def __call__(self, verb: str, path: str, body: Any = None, **more: Any) -> httpx.Response:
        """One request below /api/v1."""
        return await self.client.request(verb, f"/api/v1{path}", json=body, **more)

    async def good(self, verb: str, path: str, body: Any = None) -> Any:
        """The answer of a request that must succeed."""
        answer = await self(verb, path, body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def bad(self, status: int, verb: str, path: str, body: Any = None) -> str:
        """The error of a request that must be refused with this status."""
        answer = await self(verb, path, body)
        assert answer.status_code == status, (answer.status_code, answer.text)
        document = answer.json()
        assert list(document) == ["error"]
        return document["error"]


TINY = {
    "name": "tiny",
    "source": "file:/models/tiny.gguf",
    "aliases": ["small"],
    "profiles": [{"name": "cpu", "engine": "llamacpp", "args": ["-c", 4096], "memory": "512MiB", "cpus": 1}],
}


def command(name: str, **more: Any) -> dict[str, Any]:
    """A model run by a command."""
    profile = {"name": "p", "engine": "command", "command": ["serve", "--port", "{port}"]}
    return {"name": name, "source": "file:/models/x", "profiles": [profile]} | more


def populate(db: psycopg.Connection) -> None:
    """A small fleet as agents and the leader would have left it: 3 nodes, 4 cards, 2 replicas."""
    db.execute(
        """
        insert into llmgw_core.node (id, intent, hostname, mgmt_addr, memory_effective_mib, cpus_effective, labels, warnings)
        values ('n1', 'ready', 'host-one', '10.0.0.1', 65536, 16, '{"role": "gpu"}', array['no AVX2']),
               ('n2', 'cordoned', null, '10.0.0.2', null, null, '{}', null),
               ('n3', 'ready', null, null, null, null, '{}', null);
        insert into llmgw_core.beat (node_id, seen_at, applied_gen, clock_skew_s)
        values ('n1', clock_timestamp(), 0, 0.01), ('n2', clock_timestamp(), 0, 7.5), ('n3', clock_timestamp() - interval '1 h', 0, 0);
        insert into llmgw_core.gpu (node_id, uuid, index, name, class, memory_mib, healthy, problems)
        select 'n1', 'GPU-' || i, i, 'NVIDIA H100 80GB HBM3', 'H100', 81559, i <> 3,
               case when i = 3 then array['Xid 79: fell off the bus'] else '{}' end
        from generate_series(0, 3) i;
        insert into llmgw_core.node_load (node_id, at, cpu_percent, load1, memory_used_mib, gpus)
        values ('n1', clock_timestamp(), 12.5, 1.5, 1024, '{"GPU-0": {"memory_used_mib": 70000, "memory_foreign_mib": 0, "utilization_percent": 93, "power_w": 512.25}, "GPU-1": {"memory_foreign_mib": 0}, "GPU-2": {"memory_foreign_mib": 0}}');
        insert into llmgw_core.engine (node_id, engine, version, state) values ('n1', 'vllm', '0.32.0', 'installed'), ('n1', 'sglang', '1.0', 'provisioning');
        insert into llmgw_core.disk (node_id, mount, filesystem, kind, total_mib, free_mib) values ('n1', '/', 'ext4', 'local', 1048576, 524288);
        insert into llmgw_core.weight (node_id, source, path, bytes, complete) values ('n1', 'file:/models/tiny.gguf', '/models/tiny.gguf', 123456, true);
        insert into llmgw_core.replica (model, profile, fingerprint, state, launch, endpoint, term, pool) values
            ('tiny', 'cpu', 'old', 'ready', 1, 'http://10.0.0.1:20000', 1, 'gpus'), ('tiny', null, null, 'pending', 0, null, 1, null);
        insert into llmgw_core.shard (replica_id, launch, rank, node_id, port, state, spec, cpu_cores, memory_bytes, fetching)
            select id, 1, 0, 'n1', 20000, 'ready', '{}', 0.5, 1000000, '{"source": "hf:a/b", "bytes_done": 5, "bytes_total": 10}' from llmgw_core.replica where launch = 1;
        insert into llmgw_core.gpu_claim (shard_id, node_id, gpu_uuid) select id, 'n1', 'GPU-0' from llmgw_core.shard;
        insert into llmgw_core.router_use (router_id, replica_id, in_flight, last_used_at, reported_at)
            select gen_random_uuid(), id, 0, clock_timestamp() - interval '90 s', clock_timestamp() from llmgw_core.replica where launch = 1;
        with d as (insert into llmgw_core.decision (term, kind, model, reason, detail) values (1, 'attempt', 'tiny', 'not placed', '{"score": 1}') returning id, at),
             r as (insert into llmgw_core.rejection (decision_id, at, position, model, profile, node_id, code, reason, need, have)
                   select id, at, 0, 'tiny', 'cpu', 'n2', 'node_cordoned', 'the node is cordoned', 'ready', null from d)
        insert into llmgw_core.attempt (model, decision_id, decision_at, checked_at, placed, digest)
            select 'tiny', id, at, at, false, '\\x00' from d;
        """
    )


def view_rows(db: psycopg.Connection, view: str, order: str) -> list[dict[str, Any]]:
    """The rows that psql shows, unknowns left out."""
    rows = db.execute(f"select jsonb_strip_nulls(to_jsonb(v))::text from llmgw.{view} v order by {order}")
    return [json.loads(row[0]) for row in rows]


def without_ages(value: Any) -> Any:
    """The same without figures that grow while one looks."""
    ages = ("last_seen_ago", "age_seconds", "idle_seconds")
    if isinstance(value, dict):
        return {k: without_ages(v) for k, v in value.items() if k not in ages}
    if isinstance(value, str) and value.startswith("silent for"):
        return "silent"
    return [without_ages(v) for v in value] if isinstance(value, list) else value


SECRET = "s" * 40
LINES = "one\ntwo\n"


class Agent:
    """The node's side: enrolled as n1, answers what it is asked."""

    def __init__(self, pool):
        self.pool = pool
        self.asked = []
        self.log = LINES

    async def enroll(self, token):
        """Exchange the token for the secret."""
        await self.pool.fetchval("select agent.enroll($1, 'n1', $2)", token, SECRET)

    async def run(self):
        """Sync and answer until cancelled."""
        report = {"boot": "11111111-1111-1111-1111-111111111111", "applied_gen": 0}
        while True:
            row = await self.pool.fetchrow("select * from agent.sync($1, 0, $2)", SECRET, report)
            for ask in row["asks"]:
                self.asked.append(ask)
                start = ask.get("from_offset", 0)
                text, end = self.log[start:], len(self.log)
                await self.pool.fetchval("select agent.report_log($1, $2, $3, $4)", SECRET, ask["id"], text, end)
            await trio.sleep(0.05)
