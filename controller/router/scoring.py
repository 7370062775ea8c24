"""Which of two replicas looks better to the next request, by scoring profile. Pure arithmetic.

The numbers are kept by `fleet.py`: requests in flight from here (they count at once, case C08),
`foreign`, what others run or have queued there as far as its metrics tell, and `drag`, which makes
a small, a full, a light-weighted or a new replica look busier than it is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

KV_EASY: Final = 0.8  # share of the key-value cache in use from which a replica is avoided
KV_DRAG: Final = 5.0  # so that a full cache doubles its load
RAMP_S: Final = 30.0
"""A new replica is brought to its full share over so long: its caches are cold."""
RAMP_FROM: Final = 0.1
SMOOTH: Final = 0.2  # weight of the newest time to first byte in the average


class Seat(Protocol):
    """One replica, as seen from here."""

    in_flight: int
    foreign: float
    drag: float
    first_byte_s: float  # moving average, 0 = unknown


class Profile(NamedTuple):
    """A named way to choose; `near` first asks where the request's prefix is likely cached."""

    name: str
    prefers: Callable[[Seat, Seat], bool]
    near: bool = False


def load(seat: Seat) -> float:
    """How busy it is: requests over its share; comparable between replicas, no unit."""
    return (seat.in_flight + seat.foreign) * seat.drag


def less_loaded(a: Seat, b: Seat) -> bool:
    """Whether the next request goes to `a` rather than `b`; `a` when they are equal."""
    return (a.in_flight + a.foreign) * a.drag <= (b.in_flight + b.foreign) * b.drag


def faster(a: Seat, b: Seat) -> bool:
    """The same by the wait to expect: time to first byte, as much longer as it is busier."""
    if not (a.first_byte_s and b.first_byte_s):
        return less_loaded(a, b)
    here = (a.in_flight + a.foreign + 1) * a.drag * a.first_byte_s
    return here <= (b.in_flight + b.foreign + 1) * b.drag * b.first_byte_s


BALANCED: Final = Profile("balanced", less_loaded)
LATENCY: Final = Profile("latency", faster)
CACHE: Final = Profile("cache", less_loaded, near=True)
PROFILES: Final = {profile.name: profile for profile in (BALANCED, LATENCY, CACHE)}


def drag(depth: float, weight: float, kv: float | None, age_s: float) -> float:
    """How much one request weighs on a replica. `kv` in 0..1, None when unknown."""
    full = 0.0 if kv is None else max(0.0, kv - KV_EASY) * KV_DRAG
    return (1.0 + full) / (depth * weight * ramp(age_s))


def ramp(age_s: float) -> float:
    """The part of its share that a replica gets when it is so old: RAMP_FROM to 1."""
    return min(1.0, RAMP_FROM + (1.0 - RAMP_FROM) * max(0.0, age_s) / RAMP_S)


def smoothed(average_s: float, newest_s: float) -> float:
    """The moving average after one more time; the first stands for itself."""
    return newest_s if not average_s else average_s + SMOOTH * (newest_s - average_s)
