"""The loop: enrolment, generations, an absent database, questions for logs."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Any

import trio

from agent.logfile import read_from, tail, trim
from agent.loop import FACTS_S, STALE_S
from agent.loops import LAST_S, Backoff
from agent.provision import TIDY_S
from agent.state import StateDir, node_secret
from sql.errors import DatabaseAway
from tests.agent.conftest import Node, until
from tests.agent.paper_door import PaperDoor

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Make = Callable[..., dict[str, Any]]


async def test_a_new_node_enrols_once_and_reports(node: Node) -> None:
    node.door = PaperDoor(token="welcome")
    async with node.running(token="welcome", secret="n" * 43):
        await until(lambda: len(node.door.reports) >= 2, "it syncs")
        await until(lambda: "host" in node.door.facts, "it reports its machine")
    assert (node.door.enrolled, node.door.secret) == (1, "n" * 43)
    first = node.door.reports[0]
    assert first["applied_gen"] is None
    assert first["clock"] > 1e9
    assert node.door.reports[-1]["applied_gen"] == node.door.gen


async def test_a_node_unknown_to_another_database_enrols_there_and_forgets_generations(
    node: Node, odd: Make
) -> None:
    node.door.gen = 50
    node.door.assign(odd(1))
    async with node.running():
        await node.state(1, "ready")
    node.door = PaperDoor(token="again", gen=2)
    node.door.assignments = [odd(2)]
    async with node.running(token="again"):
        await node.state(2, "ready")
        await until(lambda: node.processes(1) == [], "the old database's shard is gone")
        assert (node.folder / "gen").read_text() == "2\n"


async def test_a_lower_generation_than_the_highest_seen_is_ignored(node: Node, odd: Make) -> None:
    node.door.gen = 50
    node.door.assign(odd(1))
    async with node.running():
        await node.state(1, "ready")
    node.door.gen, node.door.assignments = 7, []
    node.door.reports.clear()
    async with node.running():
        await until(lambda: len(node.door.reports) >= 3, "it heard the old list several times")
        assert len(node.processes(1)) == 1
        assert node.door.reports[-1]["applied_gen"] is None


async def test_engines_run_on_while_the_database_is_away(node: Node, odd: Make) -> None:
    node.door.assign(odd(1), odd(2))
    async with node.running():
        await node.state(1, "ready")
        await node.state(2, "ready")
        node.door.away = DatabaseAway("Postgres cannot be reached")
        os.kill(node.door.words[2]["pid"], signal.SIGKILL)
        await until(lambda: node.processes(2) == [], "one engine ends meanwhile")
        assert len(node.processes(1)) == 1
        node.door.away = None
        await node.state(2, "failed")
        assert node.door.states[1] == "ready"
    assert node.door.illegal == []


async def test_news_are_told_at_once_but_at_most_five_times_a_second(node: Node, odd: Make) -> None:
    node.door.poll_ms = 600_000
    node.door.assign(odd(1))
    begun = trio.current_time()
    async with node.running():
        await node.state(1, "ready")
    assert len(node.door.reports) <= 1 + 5 * (trio.current_time() - begun)


async def test_questions_for_logs_are_answered_and_bad_ones_cost_nothing(
    node: Node, odd: Make
) -> None:
    node.door.assign(odd(1))
    async with node.running():
        await node.state(1, "ready")
        node.door.asks = [
            {"id": 1, "kind": "log", "shard": "../../etc/passwd", "lines": 5},
            {"id": 2, "kind": "log", "shard": 1, "lines": 1},
            {"id": 3, "kind": "log", "shard": 1, "lines": 9, "from_offset": 4},
            {"id": 4, "kind": "log", "shard": 99, "lines": 9},
        ]
        await until(lambda: {2, 3, 4} <= node.door.logs.keys(), "answers came")
    assert node.door.logs[2] == ("odd engine runs\n", 16)
    assert node.door.logs[3] == ("engine runs\n", 16)
    assert node.door.logs[4] == ("", 0)
    assert 1 not in node.door.logs


def test_backoff_grows_to_its_bound_with_jitter() -> None:
    waits = [Backoff("seed").next_s() for _ in range(2)]
    assert waits[0] == waits[1]
    backoff = Backoff("seed")
    many = [backoff.next_s() for _ in range(40)]
    assert all(LAST_S / 2 <= w <= LAST_S for w in many[10:])
    assert len(set(many[10:])) > 20
    backoff.reset()
    assert backoff.next_s() <= 0.5


def test_no_loop_rests_until_it_is_called_stale() -> None:
    assert max(FACTS_S, TIDY_S) <= STALE_S / 2


def test_a_log_is_cut_while_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "shard-1.log"
    with path.open("ab", buffering=0) as writer:  # as an engine holds it
        writer.write(b"".join(b"line %d\n" % i for i in range(2000)))
        assert trim(path, 10_000)
        writer.write(b"after\n")
    assert path.read_bytes() == b"after\n"
    kept = path.with_name("shard-1.log.1").read_bytes()
    assert len(kept) == 5_000
    assert kept.endswith(b"line 1999\n")
    assert not trim(path, 10_000)
    assert read_from(path, 9_999).text == "after\n"  # cut meanwhile: from its beginning
    assert tail(path, 1).text == "after\n"
    assert tail(path, 3).text == "line 1998\nline 1999\nafter\n", "a crash may be told before it"
    assert tail(path, 3).offset == 6
    assert tail(path, 9, limit_bytes=20).text == "line 1999\nafter\n"
    assert tail(path, 9, limit_bytes=5).text == "fter\n"
    assert not trim(tmp_path / "none", 1)


def test_a_tail_is_clean_text_of_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"a" * 100 + b"\n" + b"b\x00\xff\n" * 3)
    assert tail(path, 2).text == "b��\n" * 2
    assert tail(path, 9, limit_bytes=50).text == "b��\n" * 3
    assert tail(path, 9, limit_bytes=50).offset == 113


def test_of_forgotten_shards_the_newest_logs_stay(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    (state.shards / "1.json").touch()
    for shard in range(1, 61):
        state.log_of(shard).touch()
        os.utime(state.log_of(shard), (shard, shard))
    state.remove_old_logs()
    left = {path.name for path in state.logs.iterdir()}
    assert left == {f"shard-{n}.log" for n in [1, *range(11, 61)]}
    state.close()


def test_the_secret_is_made_once_and_is_private(tmp_path: Path) -> None:
    made = node_secret(tmp_path / "node_secret")
    assert len(made) >= 43
    assert node_secret(tmp_path / "node_secret") == made
    assert (tmp_path / "node_secret").stat().st_mode & 0o777 == 0o600


def test_the_state_folder_is_private(tmp_path: Path) -> None:
    StateDir(tmp_path / "state").close()
    assert (tmp_path / "state").stat().st_mode & 0o777 == 0o700
