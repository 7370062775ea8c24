"""What the loop needs of the shards of a node: `agent.shards` does it with processes.

The fleet simulation does it without, under the same loop.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import trio

if TYPE_CHECKING:
    from collections.abc import Iterable


class News:
    """Whether a shard has something new for the database; one waiter."""

    def __init__(self) -> None:
        self._event = trio.Event()

    def tell(self) -> None:
        """There is news."""
        self._event.set()

    def take(self) -> None:
        """What is told from here on counts as new."""
        self._event = trio.Event()

    async def wait(self) -> None:
        """Return when there is news."""
        await self._event.wait()


class Work(Protocol):
    """The shards of one node."""

    @property
    def news(self) -> News:
        """Told when a shard changes."""
        ...

    @property
    def longest_grace_s(self) -> float:
        """The longest time that a running shard may take to stop."""
        ...

    async def restore(self, nursery: trio.Nursery) -> None:
        """Take up what an earlier agent left. Tasks live in `nursery`."""
        ...

    def apply(self, documents: Iterable[object]) -> None:
        """Make the node run what a newer list says."""
        ...

    def report(self) -> list[dict[str, Any]]:
        """The words of all known shards for the next sync."""
        ...

    async def told(self, words: list[dict[str, Any]]) -> bool:
        """The database has these words. True when there is already more to say."""
        ...

    def unknown_again(self) -> None:
        """The node was enrolled anew."""
        ...

    async def suspend(self, timeout_s: float) -> None:
        """Stop everything because the agent ends."""
        ...

    def pids(self) -> set[int]:
        """All processes of engines."""
        ...
