"""How many replicas a model should have now, from what clients ask of it. Pure.

Called by `scale.py` for each model and by `room.py` for those that compete. Up at once; down only
when the smaller number was enough, with room to spare, for a whole minute, and every replica has
had its minimum residence. To nothing only when nobody has used any replica for the idle timeout.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from controller.placement.model import Model, Replica, Settings

SPARE: Final = 0.8
"""Fewer replicas must serve the last minute's peak with this share of what they can."""


@dataclass(frozen=True, slots=True)
class Standing:
    """A replica with the state it has once this plan's move of it is made."""

    replica: Replica
    state: str
    moved: bool


@dataclass(frozen=True, slots=True)
class Wish:
    """A number of replicas, and why when clients decided it."""

    count: int
    why: str = ""


def needed(model: Model, now: float, settings: Settings) -> int:
    """Replicas for what is asked at this moment, within min and max."""
    low = max(model.min_replicas, 0)
    asked = model.asked
    if low >= model.max_replicas or not _is_asked(model, now, settings):
        return low
    wanted = ceil(asked.load / _concurrency(model, settings))
    return min(max(wanted, low, 1), model.max_replicas)


def desired(model: Model, active: Sequence[Standing], now: float, settings: Settings) -> Wish:
    """The number for a model with these replicas. Never outside min and max."""
    base = needed(model, now, settings)
    most = max(model.max_replicas, model.min_replicas, 0)
    have = min(len(active), most)
    if base >= have:
        return Wish(base, _asks(model, settings) if base > max(model.min_replicas, 0) else "")
    if not model.asked.heard:
        return Wish(have, "no router tells what is asked")
    if base == 0 and all(_unused(s, model, now, settings) for s in active):
        return Wish(0, f"nobody has used it for {_patience(model, settings):g} s")
    fewer = _enough(model, base, settings)
    if fewer < have and all(_has_stayed(s, now, settings) for s in active):
        return Wish(fewer, f"at most {model.asked.peak} requests at once lately")
    return Wish(have, "more than asked for, but not for long enough")


def holds(model: Model, count: int, now: float, settings: Settings) -> bool:
    """Whether so many ready replicas are right whatever each of them does; cheap."""
    if count > max(model.max_replicas, model.min_replicas):
        return False
    base = needed(model, now, settings)
    return base == count or (0 < base < count and _enough(model, base, settings) >= count)


def _enough(model: Model, base: int, settings: Settings) -> int:
    """The fewest that would have served the last minute with room to spare."""
    quiet = ceil(model.asked.peak / (SPARE * _concurrency(model, settings)))
    most = max(model.max_replicas, model.min_replicas, 0)
    return min(max(base, model.min_replicas, 1, quiet), most)


def idle_since(replica: Replica) -> float | None:
    """When the last request on any router ended; None when it is busy or nobody can say.

    One that every router knows and none has used is idle since it became ready.
    """
    if replica.in_flight is None or replica.in_flight > 0:
        return None
    ready = replica.ready_at if replica.ready_at is not None else replica.state_at
    return max(ready, replica.last_used_at or 0.0)


def resides(replica: Replica, now: float, settings: Settings) -> bool:
    """Whether a ready replica has not yet stayed for its minimum."""
    ready = replica.ready_at if replica.ready_at is not None else replica.state_at
    return now - ready < settings.min_residence_s


def _is_asked(model: Model, now: float, settings: Settings) -> bool:
    asked = model.asked
    if asked.load > 0:
        return True
    return asked.wanted_at is not None and now - asked.wanted_at < settings.demand_stale_s


def _concurrency(model: Model, settings: Settings) -> float:
    own = model.asked.concurrency
    return settings.concurrency if own is None else own


def _patience(model: Model, settings: Settings) -> float:
    own = model.idle_timeout_s
    return max(settings.idle_timeout_s if own is None else own, settings.min_residence_s)


def _unused(standing: Standing, model: Model, now: float, settings: Settings) -> bool:
    replica = standing.replica
    if standing.state == "ready":
        since = idle_since(replica)
        return since is not None and now - since >= _patience(model, settings)
    if standing.state == "starting":
        return False  # a load goes on though its callers have left (D19)
    wanted = max(replica.created_at, model.asked.wanted_at or 0.0)
    return now - wanted >= settings.min_residence_s


def _has_stayed(standing: Standing, now: float, settings: Settings) -> bool:
    if standing.state == "ready":
        return not resides(standing.replica, now, settings)
    if standing.state == "starting":
        return False
    return now - standing.replica.created_at >= settings.min_residence_s


def _asks(model: Model, settings: Settings) -> str:
    asked = model.asked
    return (
        f"{asked.waiting} waiting and {asked.in_flight} running, "
        f"{_concurrency(model, settings):g} at once on each"
    )
