"""Which replica serves the next request. Pure: loads and a random number in, one replica out.

Power of two choices: two picks at random, the better one by the scoring profile wins. It spreads
nearly as well as looking at all of them and does not herd when counts are slightly stale. With the
profile `cache`, the replica that probably has the prefix comes first, while it is not much busier
than the others (Mirrokni, Thorup and Zadimoghaddam, "Consistent hashing with bounded loads").
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Generic, NamedTuple, Protocol, TypeVar

from controller.router.affinity import Ring
from controller.router.scoring import BALANCED, Profile, Seat

if TYPE_CHECKING:
    from collections.abc import Sequence

BOUND: Final = 1.25  # times its fair share of what runs: more, and the next in rank is asked
AT_EASE: Final = 8
"""So many at once never are too many, unless its depth is under twice that."""

MOST_REPEATS: Final = 64


class Want(NamedTuple):
    """What a request wants of the choice."""

    profile: Profile = BALANCED
    key: int | None = None  # of `affinity`; only the profile `cache` looks at it


class Place(Seat, Protocol):
    """A replica's pool."""

    @property
    def key(self) -> str: ...

    @property
    def depth(self) -> int: ...

    @property
    def weight(self) -> float: ...


class Candidate(Protocol):
    """A model on a replica."""

    @property
    def pool(self) -> Place: ...


C = TypeVar("C", bound=Candidate)


def choose(candidates: Sequence[C], random_bits: int, profile: Profile = BALANCED) -> C | None:
    """The better of two random candidates; None when there are none.

    `random_bits` is a random integer of at least 32 bits.
    """
    count = len(candidates)
    if count < 2:
        return candidates[0] if count else None
    first = random_bits % count
    second = (first + 1 + (random_bits // count) % (count - 1)) % count
    a, b = candidates[first], candidates[second]
    return a if profile.prefers(a.pool, b.pool) else b


class Group(Generic[C]):
    """The ready replicas of one model, with what is the same until the table changes."""

    __slots__ = ("_parts", "members", "ring", "spread")

    def __init__(self, members: list[C], former: Group[C] | None = None) -> None:
        self.members = sorted(members, key=_key)
        self.spread = repeated(self.members)
        ranked = tuple((member.pool.key, member.pool.weight) for member in self.members)
        self.ring = Ring(ranked)
        if former is not None and former.ring.members == ranked:
            self.ring = former.ring
        whole = sum(weight for _, weight in ranked)
        self._parts = [BOUND * weight / whole for _, weight in ranked]

    def pick(self, random_bits: int, want: Want) -> C | None:
        """One of all, whatever its health; None when there is none."""
        if want.key is not None and want.profile.near:
            near = self.nearest(want.key, self.members)
            if near is not None:
                return near
        return choose(self.spread, random_bits, want.profile)

    def nearest(self, key: int, fit: Sequence[C]) -> C | None:
        """The best in rank for `key` that is in `fit` and not too busy; None when all are."""
        running = 1 + sum([member.pool.in_flight for member in self.members])
        for place in self.ring.ranked(key):
            member = self.members[place]
            pool = member.pool
            few = pool.in_flight < AT_EASE and 2 * pool.in_flight < pool.depth
            if (few or pool.in_flight < running * self._parts[place]) and (
                fit is self.members or member in fit
            ):
                return member
        return None


def _key(candidate: Candidate) -> str:
    return candidate.pool.key


def repeated(members: list[C]) -> list[C]:
    """Each member as often as its weight says, so that a random pick follows the weights."""
    weights = [member.pool.weight for member in members]
    if not members or min(weights) == max(weights):
        return members
    least = max(min(weights), max(weights) / MOST_REPEATS)
    times = [max(1, round(weight / least)) for weight in weights]
    return [member for member, n in zip(members, times, strict=True) for _ in range(n)]
