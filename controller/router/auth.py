"""API keys in memory: sha256 of what the client sends -> who it is. No database on the way.

The set is replaced whole by `refresh.py`; a revoked key is simply absent. Expiry uses the
database's clock, sampled at each refresh and carried on by the monotonic clock.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from controller.router.config import StaticKey

MAX_KEY_BYTES = 512  # longer ones cannot be ours; hashing them would only burn time


@dataclass(frozen=True, slots=True)
class Key:
    """A key that may be used: what it is called, what it may reach, until when."""

    id: str
    models: frozenset[str] | None = None  # None = every model
    expires_at: float | None = None  # unix seconds of the database's clock
    tenant: str | None = None  # who takes turns with others; None: the key by itself
    weight: float = 1.0  # turns of its tenant while others wait too, above 0

    @property
    def tenancy(self) -> tuple[str, float]:
        """Whose turn one of its requests takes, and the weight."""
        return self.tenant or self.id, self.weight

    def allows(self, asked: str, model: str) -> bool:
        """Whether this key may use `model`, asked for by the name `asked`."""
        return self.models is None or model in self.models or asked in self.models


ANYONE = Key("open")


class Keys:
    """The present set of keys; `open` lets everybody in (static mode without keys only)."""

    def __init__(self, *, open_to_all: bool = False) -> None:
        self.open_to_all = open_to_all
        self._by_hash: Mapping[bytes, Key] = {}
        self._clock_offset: float | None = None

    def __len__(self) -> int:
        return len(self._by_hash)

    def replace(self, by_hash: Mapping[bytes, Key], database_now: float | None) -> None:
        """Swap the whole set; `database_now` in unix seconds, None when no clock is known."""
        self._by_hash = by_hash
        if database_now is not None:
            self._clock_offset = database_now - time.monotonic()

    def find(self, authorization: bytes) -> Key | None:
        """The key in an Authorization header's value, or None for anything that is not one."""
        if self.open_to_all:
            return ANYONE
        if authorization[:7].lower() != b"bearer " or len(authorization) > MAX_KEY_BYTES:
            return None
        key = self._by_hash.get(sha256(authorization[7:].strip()).digest())
        if key is None or key.expires_at is None:
            return key
        now = self.now()
        # An expiry that cannot be judged counts as passed.
        return key if now is not None and now < key.expires_at else None

    def database_time(self, moment: float) -> float | None:
        """A moment of the monotonic clock in unix seconds of the database's; None while unknown."""
        return None if self._clock_offset is None else moment + self._clock_offset

    def now(self) -> float | None:
        """Unix seconds by the database's clock; None before it was seen."""
        return self.database_time(time.monotonic())


def static_keys(keys: Iterable[StaticKey]) -> dict[bytes, Key]:
    """Keys written into the configuration, hashed as the database's are."""
    return {
        sha256(key.secret.encode()).digest(): Key(
            key.id, None if key.models is None else frozenset(key.models)
        )
        for key in keys
    }
