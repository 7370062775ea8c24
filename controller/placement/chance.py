"""Chance that can be repeated: numbers made from a seed and ids by hashing.

Decisions must be the same for the same inputs on every controller, so neither `random` nor
Python's salted `hash` will do.
"""

from __future__ import annotations

from hashlib import blake2b


def draw(*parts: object) -> int:
    """64 even bits that depend on the parts alone."""
    text = "\x1f".join(map(str, parts)).encode("utf-8", "surrogatepass")
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "big")


def mixed(number: int) -> int:
    """Another 64 bits for these 64: cheaper than a draw where thousands are wanted."""
    number = (number ^ (number >> 31)) * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
    return number ^ (number >> 29)


def share(*parts: object) -> float:
    """A number from 0 (included) to 1 (excluded) that depends on the parts alone."""
    return (draw(*parts) >> 11) / (1 << 53)
