"""Which replicas probably hold a request's prefix in their cache. Pure.

A request has a key: its session when it names one, else the beginning of its prompt. Keys fall
into slots, and each slot ranks all replicas by rendezvous hashing (Thaler and Ravishankar, 1998):
when a replica comes or goes, only the slots move that it wins or had. All routers rank alike.
"""

from __future__ import annotations

import heapq
import math
from hashlib import blake2b
from itertools import islice
from typing import TYPE_CHECKING, Any
from zlib import crc32

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

SLOTS = 4096
CHOICES = 3  # ranked replicas of a slot; when all are busy, any other will do
LEADING = 1024  # characters of the prompt that are looked at
PARTS = 16  # messages, or parts of one, that are looked at
SESSION_HEADER = b"x-llmgw-session"
_SESSION_FIELDS = ("prompt_cache_key", "user")
_MASK = (1 << 64) - 1
_ODD, _ODDER = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9  # splitmix64's


class Ring:
    """The ranking of some replicas; `members` are pairs of key and weight."""

    def __init__(self, members: tuple[tuple[str, float], ...]) -> None:
        self.members = members
        self._seeds: list[int] = []  # made when they are first needed
        self._even = len({weight for _, weight in members}) < 2
        self._ranked: dict[int, tuple[int, ...]] = {}

    def ranked(self, key: int) -> tuple[int, ...]:
        """Places in `members` of the best few for `key`, best first.

        A slot's ranking costs a hash per member, once.
        """
        slot = key % SLOTS
        found = self._ranked.get(slot)
        if found is None:
            found = self._ranked[slot] = self._rank(slot)
        return found

    def _rank(self, slot: int) -> tuple[int, ...]:
        self._seeds = self._seeds or [_seed(key) for key, _ in self.members]
        mark = slot * _ODD & _MASK
        # Two rounds of multiplying and folding: each bit of the result depends on all bits.
        hashes = [
            ((half := (seed ^ mark) * _ODDER & _MASK) ^ half >> 32) * _ODD & _MASK
            for seed in self._seeds
        ]
        if self._even:
            return tuple(heapq.nlargest(CHOICES, range(len(hashes)), hashes.__getitem__))
        # -weight / ln(u) for u in (0, 1): the weighted form of "the highest hash wins".
        worths = [
            -weight / math.log((number + 1) / (_MASK + 2))
            for number, (_, weight) in zip(hashes, self.members, strict=True)
        ]
        return tuple(heapq.nlargest(CHOICES, range(len(worths)), worths.__getitem__))


def _seed(key: str) -> int:
    return int.from_bytes(blake2b(key.encode(), digest_size=8).digest())


def affinity(headers: Iterable[tuple[bytes, bytes]], document: dict[str, Any]) -> int | None:
    """The key of a request, None when nothing in it says where it belongs."""
    for name, value in headers:
        if name == SESSION_HEADER and value:
            return crc32(value)
    for session in (*map(document.get, _SESSION_FIELDS), _anthropic_user(document)):
        if isinstance(session, str) and session:
            return crc32(session[:LEADING].encode("utf-8", "replace"))
    text = leading(document)
    return crc32(text.encode("utf-8", "replace")) if text else None


def _anthropic_user(document: dict[str, Any]) -> object:
    """What `user` is to Anthropic's clients."""
    metadata = document.get("metadata")
    return metadata.get("user_id") if isinstance(metadata, dict) else None


def leading(document: dict[str, Any]) -> str:
    """The beginning of the prompt, no further than its first words by the user.

    Stopping there keeps a conversation's key the same while it grows.
    """
    found, size = [], 0
    for text in _in_order(document):
        found.append(text[: LEADING - size])
        size += len(found[-1])
        if size >= LEADING:
            break
    return "\n".join(found)


def _in_order(document: dict[str, Any]) -> Iterator[str]:
    for field in ("system", "instructions"):
        yield from _texts(document.get(field))
    messages = document.get("messages", document.get("input", document.get("prompt")))
    if not isinstance(messages, list):
        yield from _texts(messages)
        return
    for message in islice(messages, PARTS):
        if not isinstance(message, dict):  # several prompts, or one of token numbers
            yield from _texts(messages)
            return
        yield from _texts(message.get("content"))
        if message.get("role") == "user":
            return


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for part in islice(value, PARTS):
            text = part.get("text") if isinstance(part, dict) else part
            if isinstance(text, str):
                yield text
            elif isinstance(text, int):
                yield str([n for n in value[:LEADING] if type(n) is int])  # token numbers
                return
