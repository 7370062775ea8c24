"""Answers that an engine compressed although it was asked not to (case A16). Pure, bounded."""

from __future__ import annotations

import zlib

CODINGS = frozenset((b"gzip", b"x-gzip", b"deflate"))
MOST_BYTES = 1024 * 1024
"""One piece from a socket may become so much: 64 KiB of a bomb would be 64 MiB."""


class Unzip:
    """Decodes one answer that comes in pieces."""

    __slots__ = ("_machine", "failed")

    def __init__(self, coding: bytes) -> None:
        wrapped = zlib.MAX_WBITS if coding == b"deflate" else zlib.MAX_WBITS | 16
        self._machine = zlib.decompressobj(wrapped)
        self.failed = False

    def feed(self, data: bytes) -> bytes:
        """What `data` says; nothing once it was invalid or too much."""
        if self.failed:
            return b""
        try:
            plain = self._machine.decompress(data, MOST_BYTES)
        except zlib.error:
            self.failed = True
            return b""
        self.failed = bool(self._machine.unconsumed_tail)
        return b"" if self.failed else plain
