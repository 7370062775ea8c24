"""Which replica serves the next request. Pure: loads and a random number in, one replica out.

Power of two choices over requests in flight: two picks at random, the less loaded one wins. It
spreads nearly as well as looking at all of them and does not herd when counts are slightly stale.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Sequence


class Loaded(Protocol):
    """Anything that knows how many requests it is working on."""

    @property
    def in_flight(self) -> int: ...


L = TypeVar("L", bound=Loaded)


def choose(candidates: Sequence[L], random_bits: int) -> L | None:
    """The less loaded of two random candidates; None when there are none.

    `random_bits` is a random integer of at least 32 bits.
    """
    count = len(candidates)
    if count < 2:
        return candidates[0] if count else None
    first = random_bits % count
    second = (first + 1 + (random_bits // count) % (count - 1)) % count
    a, b = candidates[first], candidates[second]
    return a if a.in_flight <= b.in_flight else b
