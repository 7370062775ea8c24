"""A real admin app on a real socket, and rows to show."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import trio
from hypercorn.config import Config
from hypercorn.trio import serve

from controller.api.server import make_app

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import httpx
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
    schema: str = "ok"


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
    "profiles": [
        {"name": "cpu", "engine": "llamacpp", "args": ["-c", 4096], "memory": "512MiB", "cpus": 1}
    ],
}


def command(name: str, **more: Any) -> dict[str, Any]:
    """A model run by a command."""
    profile = {"name": "p", "engine": "command", "command": ["serve", "--port", "{port}"]}
    return {"name": name, "source": "file:/models/x", "profiles": [profile]} | more


def populate(db: psycopg.Connection) -> None:
    """A small fleet as agents and the leader would have left it: 3 nodes, 4 cards, 2 replicas."""
    db.execute(Path(__file__).with_name("fleet.sql").read_text())


def view_rows(db: psycopg.Connection, view: str, order: str) -> list[dict[str, Any]]:
    """The rows that psql shows, unknowns left out."""
    rows = db.execute(
        f"select jsonb_strip_nulls(to_jsonb(v))::text from llmgw.{view} v order by {order}"
    )
    return [json.loads(row[0]) for row in rows]


def without_ages(value: Any) -> Any:
    """The same without figures that grow while one looks."""
    ages = ("last_seen_ago", "seen_ago", "age_seconds", "idle_seconds")
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
                await self.pool.fetchval(
                    "select agent.report_log($1, $2, $3, $4)", SECRET, ask["id"], text, end
                )
            await trio.sleep(0.05)
