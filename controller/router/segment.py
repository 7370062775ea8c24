"""One file of the spool: records behind each other in a mapped file whose room is taken beforehand.

A record is copied into the page cache and marked then, so it is there for whoever comes after a
`kill -9`, without a system call. The room is allocated when the file is made (a disk that is full
says so then, not by a SIGBUS in a callback), and what was never written is zero. The maker holds a
lock on the file as long as it lives; the lock is free when it is dead.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import uuid
import zlib
from typing import TYPE_CHECKING, Final, NamedTuple, Self

if TYPE_CHECKING:
    from pathlib import Path

_HEAD: Final = struct.Struct("<8s16s16sQ")  # magic, router, database, acknowledged
_MAGIC: Final = b"llmgwSP1"
_NEW: Final = ".new"  # ends the name of a file that is being made
_FIRST: Final = 64  # where records begin
_ACKNOWLEDGED: Final = struct.Struct("<Q")
_ACKNOWLEDGED_AT: Final = _HEAD.size - _ACKNOWLEDGED.size
_RECORD: Final = struct.Struct("<4sII")  # mark, length, CRC-32 of the payload
_MARK: Final = b"\xffROW"  # 0xFF is in no UTF-8, so it is in no payload


class Owner(NamedTuple):
    """Whose rows: the router's life that made them, and the database that they are for."""

    router: uuid.UUID
    database: uuid.UUID


class NoSegment(Exception):
    """A file that nobody can read as a segment: cut short, or of another program."""


class Segment:
    """Records of one file, oldest first. Raises OSError where the file system does."""

    __slots__ = ("_acknowledged", "_file", "_map", "_tail", "damaged", "owner", "path", "size")

    def __init__(self, path: Path, file: int, owner: Owner, tail: int) -> None:
        self.path = path
        self.owner = owner
        self.size = os.fstat(file).st_size
        self.damaged: set[int] = set()  # places that hold no whole record
        self._file = file
        self._map = mmap.mmap(file, self.size)
        self._tail = tail
        (self._acknowledged,) = _ACKNOWLEDGED.unpack_from(self._map, _ACKNOWLEDGED_AT)
        if not _FIRST <= self._acknowledged <= self.size:
            self._acknowledged = _FIRST  # rows that are sent again do no harm
            self.damaged.add(_ACKNOWLEDGED_AT)

    @classmethod
    def make(cls, path: Path, size: int, owner: Owner) -> Self:
        """A new one, locked before others can see it. OSError when there is no room for it."""
        new = path.with_name(f".{path.name}{_NEW}")
        file = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.posix_fallocate(file, 0, size)
            head = _HEAD.pack(_MAGIC, owner.router.bytes, owner.database.bytes, _FIRST)
            os.pwrite(file, head, 0)
            new.rename(path)
            return cls(path, file, owner, _FIRST)
        except BaseException:
            os.close(file)
            new.unlink(missing_ok=True)
            raise

    @staticmethod
    def sweep(folder: Path) -> None:
        """Remove files that were never whole: their makers were killed in making them."""
        for path in folder.glob(f".*{_NEW}"):
            try:
                with path.open("rb") as file:
                    # One without a size has a maker that may be about to lock it.
                    if os.fstat(file.fileno()).st_size:
                        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        path.unlink(missing_ok=True)
            except OSError:
                continue  # it was renamed, is being made, or is another user's

    @classmethod
    def take_over(cls, path: Path) -> Self | None:
        """One whose maker is dead; None while it lives, or when another took it over and is done.

        NoSegment when it cannot be read.
        """
        try:
            file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            found = os.fstat(file)
            head = os.pread(file, _HEAD.size, 0)
            if not found.st_nlink:
                os.close(file)
                return None
            if found.st_size <= _FIRST or head[: len(_MAGIC)] != _MAGIC:
                raise NoSegment(f"{path} is no spool of this version")
            _, router, database, _ = _HEAD.unpack(head)
            owner = Owner(uuid.UUID(bytes=router), uuid.UUID(bytes=database))
            return cls(path, file, owner, found.st_size)
        except BlockingIOError:
            os.close(file)
            return None
        except BaseException:
            os.close(file)
            raise

    def append(self, payload: bytes) -> bool:
        """Keep a record; False when it does not fit in any more."""
        length = len(payload)
        end = self._tail + _RECORD.size + length
        if end > self.size:
            return False
        head = _RECORD.pack(b"", length, zlib.crc32(payload))
        self._map[self._tail : end] = head + payload
        # Last: who is killed in the copy above, as at a new page, leaves no record.
        self._map[self._tail : self._tail + len(_MARK)] = _MARK
        self._tail = end
        return True

    @property
    def room(self) -> int:
        """Bytes that are left, heads of records included."""
        return self.size - self._tail

    def read(self, limit: int) -> tuple[list[bytes], int]:
        """The oldest records that are not acknowledged, and what to acknowledge them with.

        What was changed on the disk is skipped and noted in `damaged`; a record without its mark
        was being copied when its maker was killed: nobody was told of it.
        """
        records: list[bytes] = []
        expected = position = self._acknowledged
        while len(records) < limit:
            at = self._map.find(_MARK, position, self._tail)
            if at < 0:
                end = min(expected + len(_MARK), self._tail)
                if self._map[expected:end].strip(b"\0"):
                    self.damaged.add(expected)  # the mark itself: one that was never set is zero
                position = self._tail  # so that it is noted once
                break
            payload = self._payload(at)
            if payload is None or at != expected:
                self.damaged.add(expected)
            if payload is None:
                position = at + len(_MARK)
                continue
            records.append(payload)
            expected = position = at + _RECORD.size + len(payload)
        return records, position

    def _payload(self, at: int) -> bytes | None:
        begin = at + _RECORD.size
        if begin > self._tail:
            return None
        _, length, crc = _RECORD.unpack_from(self._map, at)
        payload = self._map[begin : begin + length]
        whole = begin + length <= self._tail and zlib.crc32(payload) == crc
        return payload if whole else None

    def acknowledge(self, position: int) -> None:
        """All before `position` (from `read`) is safe elsewhere."""
        _ACKNOWLEDGED.pack_into(self._map, _ACKNOWLEDGED_AT, position)
        self._acknowledged = position

    def close(self) -> None:
        """Let go of it: whoever comes may take it over."""
        self._map.close()
        os.close(self._file)

    def remove(self) -> None:
        """Delete it and close."""
        self.path.unlink(missing_ok=True)
        self.close()
