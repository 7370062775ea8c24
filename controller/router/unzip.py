"""Answers that an engine compressed although it was asked not to (case A16). Pure, bounded."""

from __future__ import annotations

import zlib

CODINGS = frozenset((b"gzip", b"x-gzip", b"deflate"))
MOST_BYTES = 1024 * 1024
"""One piece from a socket may become so much: 64 KiB of a bomb would be 64 MiB."""

MOST_MEMBERS = 64
"""A gzip text may be several in a row (RFC 1952 2.2); each costs a copy of what follows it."""


def decompressor(coding: bytes) -> zlib._Decompress:
    """For one member, or for a zlib stream."""
    return zlib.decompressobj(zlib.MAX_WBITS if coding == b"deflate" else zlib.MAX_WBITS | 16)


class Unzip:
    """Decodes one answer that comes in pieces."""

    __slots__ = ("_coding", "_machine", "failed")

    def __init__(self, coding: bytes) -> None:
        self._coding = coding
        self._machine = decompressor(coding)
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
                self._machine = decompressor(self._coding)
            try:
                plain += self._machine.decompress(data, MOST_BYTES + 1 - len(plain))
            except zlib.error:
                self.failed = True
            data = self._machine.unused_data
            self.failed = self.failed or len(plain) > MOST_BYTES
        self.failed = self.failed or bool(data)
        return b"" if self.failed else plain
