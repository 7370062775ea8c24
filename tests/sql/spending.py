"""Scopes, keys, budgets and usage rows in a test's database, and what routers ask of it."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

from psycopg.types.json import Jsonb

from tests.sql.fleet import digest

if TYPE_CHECKING:
    from tests.sql.fleet import Fleet

SPEND = """
select llmgw_core.spend(%s, array(select r from jsonb_populate_recordset(
    null::llmgw_core.usage_event, %s) r))"""


def scope(fleet: Fleet, kind: str, name: str, parent: int | None = None) -> int:
    """A new scope; returns its id."""
    made: int = fleet.value(
        "insert into llmgw_core.scope (kind, name, parent, created_by)"
        " values (%s, %s, %s, 'test') returning id",
        kind,
        name,
        parent,
    )
    return made


def key(fleet: Fleet, name: str, scope_id: int | None = None) -> str:
    """A new key, whose id is its name."""
    fleet.admin.execute(
        "insert into llmgw_core.api_key (id, hash, name, scope_id, created_by)"
        " values (%s, %s, %s, %s, 'test')",
        (name, digest(name), name, scope_id),
    )
    return name


def budget(fleet: Fleet, at: int | str, micros: int, period: str = "month", **more: Any) -> int:
    """Set a budget as a controller does: on a key by its name, or on a scope by its number."""
    on = (None, at) if isinstance(at, str) else (str(at), None)
    row = fleet.controller.execute(
        "select llmgw.budget_put_v1('test', %s, %s, %s, %s, %s, %s::numeric[]) as id",
        (*on, micros, period, more.get("zone"), more.get("warn")),
    ).fetchone()
    made: int = row["id"]
    return made


def limit(fleet: Fleet, at: int | str, model: str | None = None, **most: int) -> int:
    """Set a limit: `requests`, `tokens` a minute, `parallel`."""
    on = (None, at) if isinstance(at, str) else (str(at), None)
    row = fleet.controller.execute(
        "select llmgw.limit_put_v1('test', %s, %s, %s, %s, %s, %s) as id",
        (*on, model, most.get("requests"), most.get("tokens"), most.get("parallel")),
    ).fetchone()
    made: int = row["id"]
    return made


def used(key_id: str, micros: float | str, at: str, **more: Any) -> dict[str, Any]:
    """A usage row with its cost, as the flush hands it on."""
    return {"id": str(uuid.uuid4()), "key_id": key_id, "cost_micros": micros, "at": at, **more}


def spend(fleet: Fleet, *rows: dict[str, Any], router: uuid.UUID | None = None) -> None:
    """Charge rows as the flush does."""
    fleet.admin.execute(SPEND, (router, Jsonb(list(rows))))


def spent(fleet: Fleet, number: int, at: str) -> float:
    """What counts as spent of a budget at a moment."""
    found: float = fleet.value(
        "select llmgw_core.budget_spent(id, period, zone, %s) from llmgw_core.budget where id = %s",
        at,
        number,
    )
    return found


def spent_some(fleet: Fleet) -> None:
    """A key with a limit and a budget that passed a threshold."""
    budget(fleet, key(fleet, "spent1"), 10)
    limit(fleet, "spent1", parallel=1)
    spend(fleet, used("spent1", 9, fleet.value("select clock_timestamp()::text")))


class Asking:
    """One router's side of `allowances_v1`."""

    def __init__(self, fleet: Fleet, name: str = "r") -> None:
        self.fleet = fleet
        self.id = uuid.uuid4()
        self.call = 0
        self.name = name

    def ask(self, *asks: tuple[Any, ...], call: int | None = None) -> list[list[Any]]:
        """(kind, id, hold, keep, need, idle) each, in this minute; the answers in their order."""
        self.call += 1
        minute = self.fleet.value("select floor(extract(epoch from clock_timestamp()) / 60)::int")
        full = [[kind, number, minute, *rest] for kind, number, *rest in asks]
        row = self.fleet.controller.execute(
            "select llmgw_core.allowances_v1(%s, %s, %s) as answers",
            (self.id, self.call if call is None else call, Jsonb(full)),
        ).fetchone()
        answers: list[list[Any]] = row["answers"]
        return answers

    def amount(
        self, kind: str, number: int, hold: int = 0, keep: int = 0, need: int = 0, idle: int = 0
    ) -> int:
        """What it may hold of one thing."""
        ((_, _, amount, *_),) = self.ask((kind, number, hold, keep, need, idle))
        granted: int = amount
        return granted
