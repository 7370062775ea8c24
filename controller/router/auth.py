"""Who sends a request: sha256 of what the client sends -> a key in memory. No database on the way.

What is not in memory is looked up in Postgres beside the hot path (`key_reader.py`). Expiry uses
the database's clock, sampled at each refresh and carried on by the monotonic clock.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Final

from controller.router.clock import monotonic
from controller.router.errors import BAD_KEY, ApiError
from controller.router.keycache import KeyCache

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from controller.router.config import StaticKey
    from controller.router.table import Model

MAX_KEY_BYTES: Final = 512  # longer ones cannot be ours; hashing them would only burn time

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


@dataclass(frozen=True, slots=True)
class Key:
    """A key that may be used: what it is called, what it may reach, until when, for whom."""

    id: str
    models: frozenset[str] | None = None  # names or aliases; None = every model
    expires_at: float | None = None  # unix seconds of the database's clock
    tenant: str | None = None  # who takes turns with others; None: the key by itself
    weight: float = 1.0  # turns of its tenant while others wait too, above 0
    chain: tuple[int, ...] = ()  # scopes it is in, from the top
    org: int | None = None  # the same by kind
    team: int | None = None
    user: int | None = None
    tags: Mapping[str, object] | None = None
    networks: tuple[Network, ...] | None = None  # peers that may use it; None = everybody
    fallback: tuple[str, frozenset[str]] | None = None  # who says why it may fall back, and why

    @property
    def tenancy(self) -> tuple[str, float]:
        """Whose turn one of its requests takes, and the weight."""
        return self.tenant or self.id, self.weight

    def allows(self, model: Model) -> bool:
        """Whether this key may use `model`, by whichever of its names it is listed."""
        models = self.models
        return models is None or model.name in models or not models.isdisjoint(model.aliases)

    def admits(self, address: str) -> bool:
        """Whether a peer at `address` may use this key."""
        if self.networks is None:
            return True
        try:
            peer = ipaddress.ip_address(address.partition("%")[0])
        except ValueError:
            return False
        peer = getattr(peer, "ipv4_mapped", None) or peer
        return any(peer in network for network in self.networks)


ANYONE: Final = Key("open")


class Shown:
    """What a connection showed last, and its hash: most show the same key with every request."""

    __slots__ = ("_authorization", "_digest")

    def __init__(self) -> None:
        self._authorization = self._digest = b""

    def digest_of(self, authorization: bytes) -> bytes:
        """Of the key in a header of the scheme Bearer."""
        if authorization != self._authorization:
            self._authorization = authorization
            self._digest = sha256(authorization[7:].strip()).digest()
        return self._digest


class Keys:
    """The keys that this process knows; `open` lets everybody in (static mode without keys only).

    `lazy`: what is not known may still be a key, and is to be looked up.
    """

    def __init__(self, *, open_to_all: bool = False) -> None:
        self.open_to_all = open_to_all
        self.lazy = False
        self.cache = KeyCache()
        self.read_at: float | None = None  # monotonic: what was in the database then is known
        self._fixed: Mapping[bytes, Key] = {}
        self._clock_offset: float | None = None

    def __len__(self) -> int:
        return len(self._fixed) + len(self.cache)

    def fix(self, by_hash: Mapping[bytes, Key]) -> None:
        """Keys that are always there, by hash: those of the configuration."""
        self._fixed = by_hash

    def set_clock(self, database_now: float) -> None:
        """The database's clock shows this, in unix seconds."""
        self._clock_offset = database_now - monotonic()

    def find(self, authorization: bytes, shown: Shown) -> Key | ApiError | bytes:
        """Whose Authorization header this is; bytes: the hash to look up.

        One error for everything that is no key any more or never was (case B19).
        """
        if self.open_to_all:
            return ANYONE
        usual = authorization.startswith(b"Bearer ")
        if not usual and authorization[:7].lower() != b"bearer ":
            return BAD_KEY
        if len(authorization) > MAX_KEY_BYTES:
            return BAD_KEY
        digest = shown.digest_of(authorization)
        key = self._fixed.get(digest) or self.cache.get(digest)
        if key is None:
            # Ours are ASCII: nobody asks Postgres for another.
            asks = self.lazy and authorization.isascii()
            asks = asks and not self.cache.is_unknown(digest, monotonic())
            return digest if asks else BAD_KEY
        if key.expires_at is not None:
            now = self.now()
            if now is None or now >= key.expires_at:
                return BAD_KEY  # also an expiry that cannot be judged
        return key

    def database_time(self, moment: float) -> float | None:
        """A moment of the monotonic clock in unix seconds of the database's; None while unknown."""
        return None if self._clock_offset is None else moment + self._clock_offset

    def now(self) -> float | None:
        """Unix seconds by the database's clock; None before it was seen."""
        return self.database_time(monotonic())


def static_keys(keys: Iterable[StaticKey]) -> dict[bytes, Key]:
    """Keys written into the configuration, hashed as the database's are."""
    return {
        sha256(key.secret.encode()).digest(): Key(
            key.id,
            None if key.models is None else frozenset(key.models),
            weight=key.weight,
        )
        for key in keys
    }
