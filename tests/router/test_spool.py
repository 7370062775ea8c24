"""The spool: what is there when a process died, what damage costs, and a disk that is full."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import uuid
from typing import TYPE_CHECKING, Any

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from controller.router.leftovers import Leftovers
from controller.router.segment import NoSegment, Owner, Segment
from controller.router.spool import Spool
from tests.router.wire import until

if TYPE_CHECKING:
    from pathlib import Path

OWNER = Owner(uuid.UUID(int=1), uuid.UUID(int=2))
SIZE = 1 << 16
FIRST = 64  # where records begin


def rows(count: int, begin: int = 0) -> list[bytes]:
    return [b'["row", %d]' % number for number in range(begin, begin + count)]


def everything(segment: Segment) -> list[bytes]:
    found: list[bytes] = []
    while True:
        records, end = segment.read(7)
        segment.acknowledge(end)
        if not records:
            return found
        found += records


def left(path: Path, payloads: list[bytes]) -> None:
    """A file as a dead router leaves it."""
    segment = Segment.make(path, SIZE, OWNER)
    for payload in payloads:
        assert segment.append(payload)
    segment.close()


class Table:
    """A stand-in for Postgres: keeps what is written, or is away."""

    def __init__(self) -> None:
        self.rows: list[bytes] = []
        self.routers: set[uuid.UUID] = set()
        self.away = False

    async def write(self, router: uuid.UUID, records: list[bytes]) -> None:
        await trio.lowlevel.checkpoint()
        if self.away:
            raise ConnectionError("the database is away")
        self.routers.add(router)
        self.rows += records


def test_records_come_back_in_order_and_once(tmp_path: Path) -> None:
    left(tmp_path / "a.spool", rows(20))
    segment = Segment.take_over(tmp_path / "a.spool")
    assert segment is not None
    assert segment.owner == OWNER
    first, end = segment.read(5)
    assert first == rows(5)
    assert segment.read(5)[0] == first  # not acknowledged yet
    segment.acknowledge(end)
    segment.close()
    again = Segment.take_over(tmp_path / "a.spool")
    assert again is not None
    assert everything(again) == rows(15, begin=5)
    assert not again.damaged
    again.remove()
    assert Segment.take_over(tmp_path / "a.spool") is None


def test_a_file_whose_maker_lives_is_left_alone(tmp_path: Path) -> None:
    segment = Segment.make(tmp_path / "a.spool", SIZE, OWNER)
    assert Segment.take_over(tmp_path / "a.spool") is None
    segment.close()
    taken = Segment.take_over(tmp_path / "a.spool")
    assert taken is not None
    taken.close()


def test_a_full_file_takes_no_more(tmp_path: Path) -> None:
    segment = Segment.make(tmp_path / "a.spool", SIZE, OWNER)
    count = 0
    while segment.append(b"x" * 1000):
        count += 1
    assert count == (SIZE - FIRST) // 1012
    assert everything(segment) == [b"x" * 1000] * count
    segment.remove()


def never_marked(path: Path, at: int) -> bool:
    """As one that was being copied when its maker was killed."""
    return path.read_bytes()[at : at + 4] == bytes(4)


class Killed(Exception):
    """In the middle of a copy."""


class TornMap:
    """The map of a process that is killed in its next copy, as at the first touch of a page."""

    def __init__(self, whole: Any, copied: int) -> None:
        self._whole = whole
        self._copied = copied

    def __setitem__(self, where: slice, what: bytes) -> None:
        begun = what[: self._copied]
        self._whole[where.start : where.start + len(begun)] = begun
        raise Killed


@pytest.mark.parametrize("copied", [1, 5, 12, 17, 21])
def test_who_was_killed_in_copying_a_record_leaves_none_and_no_damage(
    tmp_path: Path, copied: int
) -> None:
    path = tmp_path / "a.spool"
    dead: Any = Segment.make(path, SIZE, OWNER)
    for row in rows(3):
        dead.append(row)
    whole, dead._map = dead._map, TornMap(dead._map, copied)
    with pytest.raises(Killed):
        dead.append(b'["row", 3]')
    dead._map = whole
    dead.close()
    segment = Segment.take_over(path)
    assert segment is not None
    assert everything(segment) == rows(3)
    assert not segment.damaged
    segment.remove()


@given(st.integers(FIRST, FIRST + 20 * 26), st.binary(min_size=1, max_size=40))
def test_damage_costs_only_the_records_that_it_hits(
    tmp_path_factory: pytest.TempPathFactory, at: int, noise: bytes
) -> None:
    path = tmp_path_factory.mktemp("spool") / "a.spool"
    payloads = [b'["row", %04d]' % number for number in range(20)]
    left(path, payloads)
    size = 12 + len(payloads[0])
    with path.open("r+b") as file:
        file.seek(at)
        before = file.read(len(noise))
        file.seek(at)
        file.write(noise)
    segment = Segment.take_over(path)
    assert segment is not None
    found = everything(segment)
    hit = range((at - FIRST) // size, (at + len(noise) - 1 - FIRST) // size + 1)
    assert [row for row in payloads if row in found] == found
    assert set(payloads) - set(found) <= {payloads[n] for n in hit if n < len(payloads)}
    if noise == before:
        assert found == payloads
    elif len(found) < len(payloads) and not never_marked(path, FIRST + size * 19):
        assert segment.damaged
    segment.remove()


@pytest.mark.parametrize("content", [b"", b"x", b"x" * 100, b"llmgwSP0" + bytes(100)])
def test_what_is_no_spool_is_told_apart(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.spool").write_bytes(content)
    with pytest.raises(NoSegment, match="no spool of this version"):
        Segment.take_over(tmp_path / "a.spool")


def test_a_senseless_mark_of_what_was_acknowledged_begins_anew(tmp_path: Path) -> None:
    left(tmp_path / "a.spool", rows(3))
    with (tmp_path / "a.spool").open("r+b") as file:
        file.seek(40)
        file.write(b"\xff" * 8)
    segment = Segment.take_over(tmp_path / "a.spool")
    assert segment is not None
    assert everything(segment) == rows(3)
    assert segment.damaged
    segment.remove()


KILLED = """
import os, sys, uuid
from pathlib import Path
from controller.router.segment import Owner, Segment
owner = Owner(uuid.UUID(int=1), uuid.UUID(int=2))
segment = Segment.make(Path(sys.argv[1]), 1 << 22, owner)
for number in range(10**9):
    if not segment.append(b'["row", %d]' % number):
        sys.exit("full")
    if number % 100 == 0:
        os.write(1, b"%d\\n" % number)
"""


def test_kill_9_loses_no_record_that_was_appended(tmp_path: Path) -> None:
    path = tmp_path / "a.spool"
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, str(path)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        told = [int(process.stdout.readline()) for _ in range(20)]
        process.send_signal(signal.SIGKILL)
        process.wait()
        told += [int(line) for line in process.stdout.read().split()]
    segment = Segment.take_over(path)
    assert segment is not None
    found = everything(segment)
    assert len(found) > told[-1]
    assert found == rows(len(found))
    assert not segment.damaged  # the one that was being copied is none yet
    segment.remove()


async def test_a_spool_rolls_over_its_files_and_removes_them(tmp_path: Path) -> None:
    spool = Spool(tmp_path, OWNER, 8 * SIZE, SIZE)
    assert not spool.append(b"too early")
    async with trio.open_nursery() as inner:
        inner.start_soon(spool.run)
        await until(lambda: spool.size)
        sent = []
        for number in range(40):
            row = b"%d" % number * 5000
            await until(lambda row=row: spool.append(row))
            sent.append(row)
        assert len(spool) == 40
        assert len(list(tmp_path.glob("*.spool"))) > 3
        got = []
        while records := spool.batch(3):
            assert spool.batch(3) == records
            spool.acknowledge()
            got += records
        assert got == sent
        assert len(spool) == 0
        await until(lambda: len(list(tmp_path.glob("*.spool"))) <= 2)
        inner.cancel_scope.cancel()  # what it was making is finished first
    spool.close()
    assert not list(tmp_path.iterdir())


@pytest.mark.interpreted
async def test_files_that_were_to_be_removed_when_a_spool_ends_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool = Spool(tmp_path, OWNER, 8 * SIZE, SIZE)
    remove = Segment.remove
    async with trio.open_nursery() as inner:

        def last_one(segment: Segment) -> None:
            trio.from_thread.run_sync(inner.cancel_scope.cancel)
            remove(segment)

        inner.start_soon(spool.run)
        await until(lambda: spool.size)
        for _ in range(20):
            await until(lambda: spool.append(b"x" * 20_000))
        monkeypatch.setattr(Segment, "remove", last_one)
        while spool.batch(1):
            spool.acknowledge()
        assert len(spool._done) > 2
    monkeypatch.undo()
    spool.close()
    assert not list(tmp_path.iterdir())


async def test_a_spool_keeps_to_its_limit_and_goes_on_when_there_is_room(
    nursery: trio.Nursery, tmp_path: Path
) -> None:
    spool = Spool(tmp_path, OWNER, 0, SIZE)
    nursery.start_soon(spool.run)
    await until(lambda: spool.size)
    row = b"x" * 20_000
    await until(lambda: spool.append(row) and spool.trouble)
    kept = len(spool)
    assert spool.size == 2 * SIZE
    while spool.append(row):
        kept += 1
    assert not spool.append(row)
    while spool.batch(1):
        spool.acknowledge()
        kept -= 1
    assert kept == 0
    await until(lambda: spool.append(row))
    spool.close()
    assert len(list(tmp_path.glob("*.spool"))) >= 1  # its row waits for whoever comes


async def test_a_full_disk_is_found_out_when_a_file_is_made(
    nursery: trio.Nursery, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("controller.router.spool.AGAIN_S", 0.01)
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        spool = Spool(tmp_path, OWNER, 8 * SIZE, SIZE)
        nursery.start_soon(spool.run)
        await until(lambda: spool.trouble)
        assert "No space left" in str(spool.trouble)
        assert not spool.append(b"row")
        await until(lambda: not list(tmp_path.iterdir()))  # the next try is removed, too
        assert not spool.ready.is_set()  # a router that starts waits for the next try
    await until(spool.ready.is_set)
    assert spool.append(b"row")
    assert spool.trouble is None
    spool.close()


async def test_leftovers_are_written_once_and_removed(tmp_path: Path) -> None:
    left(tmp_path / "a.spool", rows(2500))
    left(tmp_path / "b.spool", rows(10, begin=2500))
    alive = Segment.make(tmp_path / "c.spool", SIZE, OWNER)
    other = Segment.make(tmp_path / "d.spool", SIZE, OWNER._replace(database=uuid.UUID(int=9)))
    other.append(b"foreign")
    other.close()
    (tmp_path / "e.spool").write_bytes(b"?")
    (tmp_path / ".f.spool.new").write_bytes(bytes(100))  # its maker was killed in making it
    (tmp_path / ".g.spool.new").write_bytes(b"")  # its maker is about to lock it
    table = Table()
    leftovers = Leftovers(tmp_path, OWNER.database, table.write)
    assert await leftovers.settle() == 2510
    assert table.rows == rows(2510)
    assert table.routers == {OWNER.router}
    assert await leftovers.settle() == 0
    there = {path.name for path in tmp_path.iterdir()}
    assert there == {"c.spool", "d.spool", "e.spool", ".g.spool.new"}
    alive.remove()


async def test_a_file_that_cannot_be_opened_keeps_no_other_from_being_written(
    tmp_path: Path,
) -> None:
    """As that of another user, whose files nobody else may read (root may read all)."""
    (tmp_path / ".a.spool.new").mkdir()
    (tmp_path / "a.spool").mkdir()
    left(tmp_path / "b.spool", rows(5))
    table = Table()
    assert await Leftovers(tmp_path, OWNER.database, table.write).settle() == 5
    assert {path.name for path in tmp_path.iterdir()} == {".a.spool.new", "a.spool"}


async def test_leftovers_wait_for_the_database(tmp_path: Path) -> None:
    left(tmp_path / "a.spool", rows(5))
    table = Table()
    table.away = True
    leftovers = Leftovers(tmp_path, OWNER.database, table.write)
    with pytest.raises(ConnectionError):
        await leftovers.settle()
    table.away = False
    assert await leftovers.settle() == 5


async def test_damaged_files_are_kept_aside(tmp_path: Path) -> None:
    for number in range(12):
        left(tmp_path / f"{number:02}.spool", rows(3))
        with (tmp_path / f"{number:02}.spool").open("r+b") as file:
            file.seek(FIRST + 14)
            file.write(b"?")
    table = Table()
    leftovers = Leftovers(tmp_path, OWNER.database, table.write)
    assert await leftovers.settle() == 24
    assert leftovers.damaged == 12
    assert table.rows == rows(2, begin=1) * 12
    kept = sorted(path.name for path in tmp_path.iterdir())
    assert kept == [f"{number:02}.damaged" for number in range(2, 12)]
