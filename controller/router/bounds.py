"""Which budgets and limits hold for which keys: all of them in memory, by what they sit on. Pure.

Read whole once, then what changed (`tenancy.py`). Whether anything is left of a bound is not known
here but in its `Allowance`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from controller.router.allowance import Allowance, Kind

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from controller.router.auth import Key

MOST_PLANS: Final = 50_000
"""Keys whose bounds were looked up; then all are looked up anew."""
WINDOWS: Final = {
    "requests_per_min": Kind.REQUESTS,
    "tokens_per_min": Kind.TOKENS,
    "parallel": Kind.SLOTS,
}


@dataclass(frozen=True, slots=True)
class Bound:
    """One number that holds for a scope or key and all below it; equal ones share an allowance."""

    kind: Kind
    id: int  # of the budget or limit
    level: str  # org, team, user, key
    whole: int
    period: str  # of a budget
    model: str | None  # None: of all models together


Place = int | str
"""What a bound sits on: a scope's id, or a key's."""


class Bounds:
    """All bounds there are, and what is left of those that requests have asked for."""

    def __init__(self) -> None:
        self.allowances: dict[tuple[Kind, int], Allowance] = {}
        self._at: dict[Place, dict[tuple[str, int], tuple[Bound, ...]]] = {}
        self._places: dict[tuple[str, int], Place] = {}
        self._plans: dict[str, tuple[tuple[int, ...], tuple[Bound, ...]]] = {}

    def __len__(self) -> int:
        return len(self._places)

    def of(self, key: Key) -> tuple[Bound, ...]:
        """Every bound that holds for a key, whatever the model; mostly none."""
        if not self._at:
            return ()
        known = self._plans.get(key.id)
        if known is not None and known[0] == key.chain:
            return known[1]
        places: tuple[Place, ...] = (*key.chain, key.id)
        found = tuple(
            bound
            for place in places
            for group in self._at.get(place, {}).values()
            for bound in group
        )
        if len(self._plans) >= MOST_PLANS:
            self._plans.clear()
        self._plans[key.id] = key.chain, found
        return found

    def allowance(self, bound: Bound) -> Allowance:
        """What is left of a bound here; of a new one nothing until Postgres says."""
        found = self.allowances.get((bound.kind, bound.id))
        if found is None:
            found = Allowance(bound.kind, bound.id, bound.whole)
            self.allowances[bound.kind, bound.id] = found
        return found

    def learn(
        self, budgets: Iterable[Mapping[str, Any]], limits: Iterable[Mapping[str, Any]]
    ) -> None:
        """Budgets and limits of `route_bounds` that are new, changed or gone."""
        for row in budgets:
            bound = Bound(Kind.MONEY, row["id"], row["level"], row["micros"], row["period"], None)
            self._put("budget", row, () if row["gone"] else (bound,))
        for row in limits:
            some = (
                Bound(kind, row["id"], row["level"], row[name], "minute", row["model"])
                for name, kind in WINDOWS.items()
                if row[name] is not None
            )
            self._put("limit", row, () if row["gone"] else tuple(some))

    def _put(self, what: str, row: Mapping[str, Any], bounds: tuple[Bound, ...]) -> None:
        """Replace what a budget or limit bounds. What it left is asked for anew: it may be less."""
        name = what, row["id"]
        place: Place = row["key_id"] if row["scope_id"] is None else row["scope_id"]
        if self._at.get(place, {}).get(name, ()) == bounds:
            return
        self._plans.clear()
        if bounds:
            self._places[name] = place
            self._at.setdefault(place, {})[name] = bounds
        elif self._places.pop(name, None) is not None:
            del self._at[place][name]
            if not self._at[place]:
                del self._at[place]
        for kind in (Kind.MONEY,) if what == "budget" else WINDOWS.values():
            allowance = self.allowances.get((kind, row["id"]))
            if allowance is not None:
                allowance.doubt()
