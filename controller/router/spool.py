"""Usage rows on disk from the moment they are settled until Postgres has them. One per process.

The event loop only copies bytes into mapped files (`segment.py`); files are made and removed by a
worker thread, ahead of need. Without room, or before the first file is there, rows wait in memory
only (`usage.py`), which is counted.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import structlog
import trio

from controller.router.segment import Owner, Segment

if TYPE_CHECKING:
    from pathlib import Path

SUFFIX = ".spool"
SEGMENT_BYTES = 8 * 1024 * 1024
"""About 20,000 rows: a second of a busy router."""
AGAIN_S = 1.0
"""After a file could not be made."""

log = structlog.get_logger(__name__)


class Spool:
    """Records that no database has acknowledged, oldest first."""

    def __init__(
        self, folder: Path, owner: Owner, limit: int, segment_bytes: int = SEGMENT_BYTES
    ) -> None:
        """`limit`: bytes that all files together may take, of which there are at least two."""
        self.folder = folder
        self.owner = owner
        self.trouble: str | None = None  # why there is no room for more
        self.ready = trio.Event()  # the first file is there
        self._bytes = segment_bytes
        self._most = max(2, limit // segment_bytes)
        self._segments: deque[Segment] = deque()  # the last one is written to
        self._spare: Segment | None = None
        self._done: list[Segment] = []
        self._made = 0
        self._rows = 0
        self._read = 0  # rows of the batch that waits to be acknowledged
        self._read_to = 0
        self._work = trio.Event()

    def __len__(self) -> int:
        return self._rows

    @property
    def size(self) -> int:
        """Bytes that the files take."""
        return self._bytes * (len(self._segments) + (self._spare is not None) + len(self._done))

    def append(self, record: bytes) -> bool:
        """Keep a record; False when there is no room."""
        last = self._segments[-1] if self._segments else None
        if last is None or not last.append(record):
            if self._spare is None:
                self._work.set()
                return False
            last, self._spare = self._spare, None
            self._segments.append(last)
            if not last.append(record):
                return False  # longer than a whole file
        if self._spare is None and 2 * last.room < self._bytes:
            self._work.set()
        self._rows += 1
        return True

    def batch(self, limit: int) -> list[bytes]:
        """The oldest records; they stay until `acknowledge`."""
        while self._segments:
            segment = self._segments[0]
            records, self._read_to = segment.read(limit)
            self._read = len(records)
            if records or len(self._segments) == 1:
                return records
            self._retire()
        return []

    def oldest(self) -> bytes | None:
        """The oldest record, for a look."""
        for segment in self._segments:
            records, _ = segment.read(1)
            if records:
                return records[0]
        return None

    def acknowledge(self) -> None:
        """The last batch is safe in Postgres."""
        self._segments[0].acknowledge(self._read_to)
        self._rows -= self._read
        self._read = 0

    def _retire(self) -> None:
        """The oldest file was read to its end and acknowledged."""
        self._done.append(self._segments.popleft())
        self._work.set()

    async def run(self) -> None:
        """Make and remove files until cancelled."""
        while True:
            self._work = trio.Event()
            while self._done:
                await trio.to_thread.run_sync(self._done[0].remove)
                del self._done[0]  # not before: what a cancelled one leaves is removed by `close`
            if not await self._provide():
                await trio.sleep(AGAIN_S)
                continue
            self.ready.set()
            await self._work.wait()

    async def _provide(self) -> bool:
        """Have a file ready when one will be needed; False when that failed."""
        last = self._segments[-1] if self._segments else None
        if self._spare is not None or (last is not None and 2 * last.room >= self._bytes):
            return True
        if len(self._segments) + 1 > self._most:
            self._complain(f"its limit of {self._most * self._bytes} bytes is reached")
            return False
        path = self.folder / f"{self.owner.router}-{self._made}{SUFFIX}"
        self._made += 1
        try:
            made = await trio.to_thread.run_sync(Segment.make, path, self._bytes, self.owner)
        except OSError as error:
            self._complain(str(error))
            return False
        if self._segments:
            self._spare = made
        else:
            self._segments.append(made)
        self.trouble = None
        return True

    def _complain(self, why: str) -> None:
        if self.trouble is None:
            log.warning("no more room for usage rows on disk", folder=str(self.folder), why=why)
        self.trouble = why

    def close(self) -> None:
        """Leave: files without rows are removed, others wait for whoever takes them over."""
        self.batch(1)
        for segment in (*self._segments, *self._done, *([self._spare] if self._spare else ())):
            if segment in self._segments and self._rows:
                segment.close()
            else:
                segment.remove()
        self._segments.clear()
        self._spare = None
        self._rows = 0
