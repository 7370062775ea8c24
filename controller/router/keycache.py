"""Keys of the database by the hash of each of their secrets: bounded, the least used go first.

Besides: hashes that are nobody's, remembered for a moment so that a flood of wrong keys asks
Postgres little; and which keys were used, for Postgres. No I/O.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from controller.router.auth import Key

MOST_KEYS: Final = 200_000
MOST_UNKNOWN: Final = 20_000
UNKNOWN_S: Final = 2.0


class KeyCache:
    """Some of the database's keys. What it holds is right as of the last refresh."""

    def __init__(self, most: int = MOST_KEYS, most_unknown: int = MOST_UNKNOWN) -> None:
        self._most = most
        self._most_unknown = most_unknown
        self._by_hash: dict[bytes, Key] = {}
        self._hashes: OrderedDict[str, tuple[bytes, ...]] = OrderedDict()  # by id; latest used last
        self._unknown: OrderedDict[bytes, float] = (
            OrderedDict()
        )  # until when; the next to end first
        self._used: set[str] = set()

    def __len__(self) -> int:
        return len(self._hashes)

    def __contains__(self, identity: str) -> bool:
        return identity in self._hashes

    @property
    def ids(self) -> list[str]:
        """Ids of all keys here."""
        return list(self._hashes)

    def get(self, digest: bytes) -> Key | None:
        """The key with a secret of this hash, which counts as used."""
        key = self._by_hash.get(digest)
        if key is not None:
            self._hashes.move_to_end(key.id)
            self._used.add(key.id)
        return key

    def is_unknown(self, digest: bytes, now: float) -> bool:
        """Whether this was looked up a moment ago and was nobody's; `now` in monotonic seconds."""
        until = self._unknown.get(digest)
        return until is not None and now < until

    def learn(self, identity: str, secrets: Mapping[bytes, Key]) -> None:
        """A key as the database has it now: the secrets by which it may be used, by hash."""
        self.drop(identity)
        self._by_hash.update(secrets)
        self._hashes[identity] = tuple(secrets)
        while len(self._by_hash) > self._most:
            self.drop(next(iter(self._hashes)))

    def drop(self, identity: str) -> None:
        """A key that is none any more, or for which there is no room."""
        for digest in self._hashes.pop(identity, ()):
            self._by_hash.pop(digest, None)

    def learn_unknown(self, digests: Iterable[bytes], now: float) -> None:
        """These are nobody's."""
        until = now + UNKNOWN_S
        for digest in digests:
            self._unknown[digest] = until
            self._unknown.move_to_end(digest)
        while len(self._unknown) > self._most_unknown or (
            self._unknown and next(iter(self._unknown.values())) <= now
        ):
            self._unknown.popitem(last=False)

    def take_used(self) -> list[str]:
        """Ids of the keys that were used since the last call."""
        used, self._used = self._used, set()
        return list(used)

    def note_used(self, ids: Iterable[str]) -> None:
        """These were used, and Postgres was not told yet."""
        self._used.update(ids)
