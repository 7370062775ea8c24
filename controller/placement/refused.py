"""All refusals of one attempt, worked out when somebody reads them.

5,000 nodes refused by three profiles are 15,000 sentences; a tick that finds the same refusals as
the one before needs none of them, only `Refusals.digest`. It keeps the nodes as they were then.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import TYPE_CHECKING, overload

from controller.placement.filters import refusals
from controller.placement.model import Model, Node, Profile, Refusal
from controller.placement.reasons import Code, Reason

if TYPE_CHECKING:
    from controller.placement.gang import Unmet


@dataclass(frozen=True, slots=True)
class Batch:
    """Nodes that one profile was refused on."""

    profile: Profile
    nodes: tuple[Node, ...]
    mark: bytes
    """Depends on which node was refused for which codes and on nothing else."""
    unmet: Unmet | None = None
    """Of a profile over several nodes: why they make no gang."""

    def reasons(self, node: Node) -> tuple[Reason, ...]:
        """All of them for one of its nodes."""
        found = refusals(self.profile, node)
        if self.unmet is None:
            return found
        return (*found, *self.unmet.reasons(node, passes=not found))


class Refusals(Sequence[Refusal]):
    """The refusals of a model in order of profile, node and rule; equal when all of them are."""

    def __init__(
        self, model: str, batches: Iterable[Batch] = (), extra: Iterable[Refusal] = ()
    ) -> None:
        self._model = model
        self._batches = tuple(batches)
        self._extra = tuple(extra)

    @cached_property
    def digest(self) -> str:
        """Changes when a (profile, node, code) comes or goes, not when a number changes."""
        state = blake2b(digest_size=16)
        for refusal in self._extra:
            state.update(f"{refusal.profile}/{refusal.code};".encode())
        for batch in self._batches:
            state.update(f"{batch.profile.name}/".encode() + batch.mark)
        return state.hexdigest()

    @cached_property
    def _all(self) -> tuple[Refusal, ...]:
        return (*self._extra, *(r for batch in self._batches for r in self._expand(batch)))

    def _expand(self, batch: Batch) -> Iterator[Refusal]:
        for node in batch.nodes:
            for reason in batch.reasons(node):
                yield refusal(self._model, batch.profile, node.id, reason)

    @overload
    def __getitem__(self, index: int) -> Refusal: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Refusal]: ...
    def __getitem__(self, index: int | slice) -> Refusal | Sequence[Refusal]:
        return self._all[index]

    def __len__(self) -> int:
        return len(self._all)

    def __bool__(self) -> bool:
        return bool(self._extra) or any(batch.nodes for batch in self._batches)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self._all == tuple(other)

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"Refusals({self._model!r}, digest={self.digest!r})"


def refusal(model: str, profile: Profile, node: str | None, reason: Reason) -> Refusal:
    """A rule's reason with the names of who was refused."""
    return Refusal(
        model,
        profile.name,
        profile.pool,
        node,
        str(reason.code),
        reason.sentence,
        reason.need,
        reason.have,
    )


def without_profiles(model: Model) -> Refusals:
    """A model that nobody said how to run."""
    reason = Reason(Code.NO_PROFILES)
    return Refusals(
        model.name, (), [Refusal(model.name, "", None, None, str(reason.code), reason.sentence)]
    )


def without_nodes(model: Model) -> Refusals:
    """No node to ask: one refusal for each profile."""
    reason = Reason(Code.NO_NODES)
    return Refusals(model.name, (), [refusal(model.name, p, None, reason) for p in model.profiles])
