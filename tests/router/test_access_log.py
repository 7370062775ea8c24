"""The access log: one line per request, whole, without secrets, and never in anybody's way."""

from __future__ import annotations

import json
import os
import resource
from contextlib import contextmanager
from datetime import UTC, datetime
from random import Random
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis.strategies import floats, lists
from structlog.testing import capture_logs

from controller.router.access_line import LINES, MOST_WORDS, Lines, _words, line
from controller.router.access_log import Sink, parts
from controller.router.config import StaticEndpoint, Timeouts
from controller.router.stats import Stats
from controller.router.tokens import Tokens
from controller.router.usage import UsageRow
from tests.router.captures import REPOSITORY
from tests.router.wire import until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.router.conftest import House


def row(code: str | None = None, at: float | None = None) -> UsageRow:
    return UsageRow(
        "1", "k", "m", "m", None, "chat", "ok", 200, False, Tokens(7, 2), None, 0.00123, 1, code,
        b"r-1", 10.0, None, at,
    )  # fmt: skip


def told(path: Path) -> list[dict[str, Any]]:
    """The lines that are whole: a reader may come while one is written."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.split("\n")[:-1]]


async def lines(path: Path, number: int) -> list[dict[str, Any]]:
    await until(lambda: len(told(path)) >= number)
    return told(path)


async def test_every_end_of_a_request_is_one_line_without_secrets(
    house: House, tmp_path: Path
) -> None:
    path = tmp_path / "access.log"
    await house.start(access_log=str(path))
    sent = await house.wire()
    await sent.chat(model="short", secret="my words", headers={"x_request_id": "id-1"})
    await sent.answer()
    size = len(json.dumps({"model": "short", "messages": [{"role": "user", "content": "hi"}],
                           "secret": "my words"}))  # fmt: skip
    streamed = await house.ask(stream=True, stream_options={"include_usage": True})
    await house.ask(model="nope")
    await house.ask(fake={"status": 500})
    await sent.get("/healthz", key=None)
    await sent.get("/v1/models", key="sk-bad-key")
    await sent.send(b"rubbish\r\n\r\n")
    assert (await sent.answer()).status == 400
    gone = await house.wire()
    await gone.chat(headers={"x_fake": json.dumps({"delay": 20})})
    await until(lambda: house.core.exchanges)
    gone.close()
    found = await lines(path, 8)
    assert [
        (row["endpoint"], row["status"], row["outcome"], row["error_code"]) for row in found
    ] == [
        ("chat.completions", 200, "ok", None),
        ("chat.completions", 200, "ok", None),
        ("chat.completions", 404, "error", "model_not_found"),
        ("chat.completions", 500, "error", "upstream_500"),
        ("healthz", 200, "ok", None),
        ("models", 401, "error", "invalid_api_key"),
        ("other", 400, "error", "bad_request"),
        ("chat.completions", 499, "client_closed", "client_closed"),
    ]
    first, second = found[0], found[1]
    assert (first["request_id"], first["key"], first["client"]) == ("id-1", "k", "127.0.0.1")
    assert (first["model_asked"], first["model"], first["replica"]) == ("short", "m", "e0")
    assert (first["attempts"], first["prompt_tokens"], first["completion_tokens"]) == (1, 7, 3)
    assert first["bytes_in"] == size
    assert second["bytes_out"] > len(streamed.body)
    assert found[3]["bytes_out"] > 0
    assert second["stream"] is True
    assert 0 < second["ttft_ms"] <= second["total_ms"]
    assert (first["queue_ms"], found[2]["queue_ms"]) == (0, None)  # it never came so far
    assert (first["estimated"], found[-1]["estimated"]) == (False, True)  # the engine never told
    assert first["time"].endswith("Z")
    assert found[5]["key"] is None
    text = path.read_text()
    for secret in ("sk-test", "sk-bad-key", "my words", 'hi"'):
        assert secret not in text
    assert path.stat().st_mode & 0o077 == 0o040


def test_a_line_has_the_fields_that_the_documentation_tells_in_their_order() -> None:
    fields = json.loads(line((row(), None, "::1", 0), 0, "now"))
    documented = (REPOSITORY / "controller/router/README.md").read_text()
    assert f"`{' '.join(fields)}`" in documented


async def test_a_line_tells_every_byte_of_an_answer(house: House, tmp_path: Path) -> None:
    path = tmp_path / "access.log"
    await house.start(access_log=str(path))
    ends = {False: b"}}", True: b"0\r\n\r\n"}
    sizes = []
    for stream in (False, True):
        for connection in ("keep-alive", "close"):
            sent = await house.wire()
            await sent.chat(stream=stream, headers={"connection": connection})
            while not sent.buffer.endswith(ends[stream]) and await sent.more():
                pass
            sizes.append(len(sent.buffer))
    assert [row["bytes_out"] for row in await lines(path, 4)] == sizes


async def test_bytes_that_waited_for_a_client_that_never_read_are_not_told(
    house: House, tmp_path: Path
) -> None:
    path = tmp_path / "access.log"
    house.engine(raw="x" * 20_000_000)
    await house.start(access_log=str(path), timeouts=Timeouts(client_write_s=0.2))
    sent = await house.wire()
    await sent.chat()
    [row] = await lines(path, 1)
    assert row["outcome"] == "client_closed"
    while await sent.more():
        pass
    assert row["bytes_out"] == len(sent.buffer)


async def test_a_sample_tells_a_share_and_every_failure(house: House, tmp_path: Path) -> None:
    path = tmp_path / "access.log"
    await house.start(access_log=str(path), access_log_sample=0.0)
    for _ in range(3):
        assert (await house.ask()).status == 200
        assert (await house.ask(model="nope")).status == 404
    assert [row["status"] for row in await lines(path, 3)] == [404, 404, 404]
    half = Lines(0.5, Random(1), Stats())
    assert 400 < sum(half.wants("ok") for _ in range(1000)) < 600
    assert all(half.wants(outcome) for outcome in ("error", "partial", "client_closed"))


async def test_not_being_ready_is_a_failure(house: House, tmp_path: Path) -> None:
    """Else a log of errors would not tell why a load balancer sent nothing."""
    path = tmp_path / "access.log"
    await house.start(
        endpoints=(StaticEndpoint("e0", house.engine().url, ()),),
        access_log=str(path),
        access_log_sample=0.0,
    )
    wire = await house.wire()
    assert (await wire.get("/healthz", key=None)).status == 200
    assert (await wire.get("/readyz", key=None)).status == 503
    (row,) = await lines(path, 1)
    assert (row["endpoint"], row["status"], row["outcome"]) == ("readyz", 503, "error")
    assert row["error_code"] == "not_ready"


async def test_a_rotated_file_is_made_anew_and_the_last_lines_are_written_at_the_end(
    house: House, tmp_path: Path
) -> None:
    path, old = tmp_path / "access.log", tmp_path / "access.log.1"
    await house.start(access_log=str(path))
    await house.ask()
    await lines(path, 1)
    path.rename(old)
    await house.ask()
    await lines(path, 1)
    await house.ask()
    house.running.stop()
    await lines(path, 2)
    assert len(told(old)) == 1


def test_what_cannot_be_written_is_counted_and_raises_nothing(tmp_path: Path) -> None:
    sink = Sink(str(tmp_path / "no-folder" / "log"))
    assert sink.write([b"a\n", b"b\n"]) == 2
    (tmp_path / "no-folder").mkdir()
    assert sink.write([b"c\n"]) == 0


@contextmanager
def full_at(size: int) -> Iterator[None]:
    """No file of ours may be larger, as on a disk that is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("left", [0, 6, 12, 20])
def test_a_full_disk_costs_the_lines_that_are_counted_and_no_other(
    tmp_path: Path, left: int
) -> None:
    path = tmp_path / "log"
    first, other = Sink(str(path)), Sink(str(path))  # two workers'
    batch = [b'{"n":%02d}\n' % number for number in range(20)]
    assert (first.write(batch), other.write(batch[:1])) == (0, 0)
    with capture_logs(), full_at(path.stat().st_size + left):
        lost = first.write(batch) + other.write(batch)
    assert lost == 40 - left // len(batch[0])
    assert other.write(batch) + first.write(batch) == 0
    found = path.read_bytes().split(b"\n")[:-1]
    whole = [line for line in found if line + b"\n" in batch]
    assert len(whole) == 101 - lost
    assert len(found) - len(whole) == bool(left % len(batch[0]))  # what was cut is a line by itself


def test_a_full_queue_drops_and_counts() -> None:
    stats = Stats()
    lines = Lines(1.0, Random(1), stats)
    for _ in range(LINES + 7):
        lines.add((row(), "e1", "127.0.0.1:1", 5), 0)
    assert len(lines.take()) == LINES
    assert stats.counts == {"access_log_lines_lost": 7}


def rendered(*rows: UsageRow) -> list[dict[str, Any]]:
    lines = Lines(1.0, Random(1), Stats())
    for each in rows:
        lines.add((each, "e1", "127.0.0.1:1", 5), 9)
    return [json.loads(text) for text in lines.take()]


def test_B20_what_can_be_no_json_is_told_without_it() -> None:
    (told,) = rendered(row("half \ud800 of a letter", 1764489600.123))
    assert told["error_code"] == "half ? of a letter"
    assert (told["time"], told["total_ms"]) == ("2025-11-30T08:00:00.123000Z", 1.2)


@pytest.mark.parametrize("word", ['"', "\\", "\n\x00\x7f", "ü \u2028 😀", "\u20ac" * 256])
def test_a_line_is_json_whatever_a_client_calls_its_model(word: str) -> None:
    asked = row()
    asked.model_asked, asked.queue_s, asked.tokens = word, 0.05, Tokens(None, 3, 2, estimated=True)
    for _ in range(2):  # the second time it is known how the word is written
        (told,) = rendered(asked)
        assert told | {"time": ""} == {
            "time": "", "request_id": "r-1", "key": "k", "client": "127.0.0.1:1",
            "endpoint": "chat", "model_asked": word, "model": "m", "replica": "e1",
            "stream": False, "status": 200, "outcome": "ok", "error_code": None, "attempts": 1,
            "total_ms": 1.2, "queue_ms": 50.0, "ttft_ms": None, "prompt_tokens": None,
            "completion_tokens": 3, "cached_tokens": 2, "estimated": True, "bytes_in": 5,
            "bytes_out": 9,
        }  # fmt: skip


def test_words_that_come_once_are_not_kept_for_ever() -> None:
    for number in range(2 * MOST_WORDS):
        asked = row()
        asked.model_asked = f"m{number}"
        assert rendered(asked)[0]["model_asked"] == f"m{number}"
    assert len(_words) <= MOST_WORDS


@given(times=lists(floats(0, 4e9), max_size=5))
def test_times_are_those_of_a_calendar_to_the_microsecond(times: list[float]) -> None:
    told = [datetime.fromisoformat(each["time"]) for each in rendered(*(row(at=t) for t in times))]
    for at, t in zip(told, times, strict=True):
        assert abs(at.timestamp() - t) < 2e-6
    assert {at.tzinfo for at in told} <= {UTC}


@pytest.mark.parametrize("most", [1, 10, 4096])
def test_a_pipe_gets_whole_lines_in_pieces_it_takes_whole(most: int) -> None:
    given = [b"%d\n" % n * (n % 5 + 1) for n in range(40)]
    found = parts(given, most)
    assert [text for part in found for text in part] == given
    assert all(sum(map(len, part)) <= most or len(part) == 1 for part in found)
    assert parts([], most) == []


def test_a_reader_that_left_a_pipe_costs_lines_only() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    sink = Sink("/dev/null")
    sink._path, sink._fd = None, writer
    assert sink.write([b"a\n"]) == 1
    os.close(writer)
