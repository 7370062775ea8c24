"""Requests that were made, for tests of reports: scopes, keys, a price, rows as routers send."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

from psycopg.types.json import Jsonb

from tests.usage_columns import listed

if TYPE_CHECKING:
    import psycopg


class Made:
    """acme/ml/ann has key kann00, acme/web has kweb00, and kout00 is in no scope."""

    def __init__(self, db: psycopg.Connection) -> None:
        self._db = db
        self._number = 0
        self._past("usage_event", 60)
        self._past("usage_minute", 35)
        self.acme = self._scope("org", "acme", None)
        self.ml = self._scope("team", "ml", self.acme)
        self.web = self._scope("team", "web", self.acme)
        self.ann = self._scope("user", "ann", self.ml)
        self.scopes = {
            "kann00": {"org_id": self.acme, "team_id": self.ml, "user_id": self.ann},
            "kweb00": {"org_id": self.acme, "team_id": self.web},
            "kout00": {},
        }
        for key, above in self.scopes.items():
            db.execute(
                "insert into llmgw_core.api_key (id, hash, name, created_by, scope_id)"
                " values (%s, sha256(%s::bytea), %s, 'test', %s)",
                (key, key, f"name of {key}", max(above.values(), default=None)),
            )
        db.execute(
            "insert into llmgw_core.price (model, since, prompt, completion, set_by)"
            " values ('m', now() - interval '60 days', 1000000, 2000000, 'test')"
        )

    def _past(self, table: str, days: int) -> None:
        """A partition for the days before those that there are, as an older database has."""
        (first, last) = self._db.execute(
            "select to_char(now() at time zone 'UTC' - make_interval(days => %s), 'YYYYMMDD'),"
            " min(right(c.relname, 8))"
            " from pg_inherits i join pg_class c on c.oid = i.inhrelid"
            " where i.inhparent = %s::regclass",
            (days, f"llmgw_core.{table}"),
        ).fetchone() or ("", "")
        self._db.execute(
            f"create table llmgw_core.{table}_{first} partition of llmgw_core.{table}"  # type: ignore[arg-type]
            f" for values from ('{first} 00:00+00') to ('{last} 00:00+00')"
        )

    def _scope(self, kind: str, name: str, parent: int | None) -> int:
        made = self._db.execute(
            "insert into llmgw_core.scope (kind, name, parent, created_by)"
            " values (%s, %s, %s, 'test') returning id",
            (kind, name, parent),
        ).fetchone()
        assert made is not None
        return int(made[0])

    def row(self, key: str, ago_s: float = 60.0, **more: Any) -> dict[str, Any]:
        """A row of a key, with a number of its own; it costs 7 micros."""
        self._number += 1
        now = self._db.execute("select extract(epoch from now())::float8").fetchone()
        assert now is not None
        return {
            "id": uuid.UUID(int=self._number).hex, "at": now[0] - ago_s, "key_id": key,
            "model_asked": "m", "model": "m", "endpoint": "chat.completions", "status": "ok",
            "http_status": 200, "stream": False, "prompt_tokens": 3, "completion_tokens": 2,
            "total_ms": 50.0, "attempts": 1, **self.scopes[key], **more,
        }  # fmt: skip

    def used(self, *rows: dict[str, Any]) -> None:
        """Write them."""
        batch = Jsonb([listed(row) for row in rows])
        self._db.execute("select llmgw_core.usage_flush_v3(gen_random_uuid(), %s)", (batch,))

    def month(self) -> None:
        """Requests of several days, some without a price, some failed."""
        for ago_s in (30, 3600, 90_000, 20 * 86400, 50 * 86400):
            self.used(
                self.row("kann00", ago_s),
                self.row("kann00", ago_s, stream=True),
                self.row("kweb00", ago_s, model="free"),
                self.row("kout00", ago_s, status="error", prompt_tokens=None),
            )
