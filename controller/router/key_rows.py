"""Keys out of rows of `keys_by_hash`. Pure, but for what it shares.

What many keys have in common is kept once: with 200,000 keys that is half of their memory.
"""

from __future__ import annotations

from ipaddress import ip_network
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import orjson

from controller.router.auth import Key

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping

    from controller.router.auth import Network

T = TypeVar("T")
MOST_SHARED = 20_000


class Place(NamedTuple):
    """Where a key is in the tree of scopes; ids, from the top and by kind."""

    chain: tuple[int, ...]
    tenant: str | None
    org: int | None
    team: int | None
    user: int | None
    weight: float


NOWHERE = Place((), None, None, None, None, 1.0)


class KeyRows:
    """Makes keys; one per process, for what they share."""

    def __init__(self) -> None:
        self._shared: dict[Hashable, Any] = {}

    def secrets_of(self, row: Mapping[str, Any]) -> dict[bytes, Key]:
        """The secrets by which the key of a row may be used, by hash; each with its end."""
        place, models, tags = self._place(row), self._models(row["models"]), self._tags(row["tags"])
        networks, fallback = self._networks(row["ips"]), self._fallback(row)

        def until(moment: float | None) -> Key:
            return Key(
                row["id"],
                models,
                moment,
                place.tenant,
                place.weight,
                chain=place.chain,
                org=place.org,
                team=place.team,
                user=place.user,
                tags=tags,
                networks=networks,
                fallback=fallback,
            )

        expires_at: float | None = row["expires_at"]
        secrets = {bytes(row["hash"]): until(expires_at)}
        for old, ends in zip(row["old_hashes"] or (), row["old_until"] or (), strict=True):
            secrets[bytes(old)] = until(ends if expires_at is None else min(ends, expires_at))
        return secrets

    def _place(self, row: Mapping[str, Any]) -> Place:
        if not row["chain"]:
            return NOWHERE
        chain, weight = tuple(row["chain"]), float(row["weight"])

        def made() -> Place:
            ids = row["org_id"], row["team_id"], row["user_id"]
            return Place(chain, f"scope {chain[0]}", *ids, weight)

        return self._once(("place", chain, weight), made)

    def _models(self, names: list[str] | None) -> frozenset[str] | None:
        if names is None:
            return None
        return self._once(("models", *names), lambda: frozenset(names))

    def _tags(self, tags: Mapping[str, object] | None) -> Mapping[str, object] | None:
        if not tags:
            return None
        return self._once(orjson.dumps(tags), lambda: tags)

    def _networks(self, texts: list[str] | None) -> tuple[Network, ...] | None:
        if texts is None:
            return None
        return self._once(("networks", *texts), lambda: tuple(map(ip_network, texts)))

    def _fallback(self, row: Mapping[str, Any]) -> tuple[str, frozenset[str]] | None:
        reasons: list[str] | None = row["fallback"]
        if reasons is None:
            return None
        by: str = row["fallback_by"]
        return self._once(("fallback", by, *reasons), lambda: (by, frozenset(reasons)))

    def _once(self, name: Hashable, make: Callable[[], T]) -> T:
        found: T | None = self._shared.get(name)
        if found is None:
            if len(self._shared) >= MOST_SHARED:
                self._shared.clear()  # those in use stay in use; from here on it is shared anew
            found = self._shared[name] = make()
        return found
