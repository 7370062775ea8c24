"""Answers that an engine compressed although it was asked not to (case A16). Pure, bounded."""

from __future__ import annotations

import zlib

CODINGS = frozenset((b"gzip", b"x-gzip", b"deflate"))
MOST_BYTES = 1024 * 1024
"""One piece from a socket may become so much: 64 KiB of a bomb would be 64 MiB."""

MOST_MEMBERS = 64
"""A gzip text may be several in a row (RFC 1952 2.2); each costs a copy of what follows it."""


class Unzip:
    """Decodes one answer that comes in pieces."""

    __slots__ = ("_machine", "_wrapped", "failed")

    def __init__(self, coding: bytes) -> None:
        self._wrapped = zlib.MAX_WBITS if coding == b"deflate" else zlib.MAX_WBITS | 16
        self._machine = zlib.decompressobj(self._wrapped)
        self.failed = False

    @property
    def whole(self) -> bool:
        """Whether what was fed ends where its coding does."""
        return self._machine.eof and not self.failed

    def feed(self, data: bytes) -> bytes:
        """What `data` says; nothing once it was invalid or too much."""
        plain = b""
        for _ in range(MOST_MEMBERS):
            if not data or self.failed:
                break
            if self._machine.eof:
                self._machine = zlib.decompressobj(self._wrapped)
            try:
                plain += self._machine.decompress(data, MOST_BYTES + 1 - len(plain))
            except zlib.error:
                self.failed = True
            data = self._machine.unused_data
            self.failed = self.failed or len(plain) > MOST_BYTES
        self.failed = self.failed or bool(data)
        return b"" if self.failed else plain
