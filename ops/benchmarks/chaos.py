"""`ops/bench chaos`: does usage add up, do budgets hold and is no key wedged, whatever is killed?

Clients with 40 keys below teams with budgets and limits, plain and streamed, three router processes
of one supervisor and one Postgres; all of them are killed at random. Exits 1 when anything does not
hold. It is made of what the chaos tests are made of: `tests/end_to_end/chaos.py`.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from controller.router.spooling import LOOK_S
from ops.benchmarks import chaos_sums, processes, report
from ops.benchmarks.chaos_rig import (
    BROKEN,
    CACHED,
    ENDLESS,
    KEYS,
    MAY_REFUSE,
    MOST,
    PROMPT,
    UNAVAILABLE,
    WORKERS,
    Clients,
    Fleet,
    cost,
    prepare,
    team_of,
)
from tests.control.process import until
from tests.end_to_end.chaos import Postgres, Watch, knows_keys, postgres
from tests.fake_engine import FakeEngine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PATIENCE_S = 150.0
"""A key may wait for the next minute, and for what a dead router holds."""
SPOOLED = {".spool", ".damaged", ".jsonl"}
Found = tuple[str, Any, bool]
"""A figure's name, the figure, whether it is as it must be."""


def serves(load: Clients, key: int) -> bool:
    """Whether a key without bounds in its way is served, and one that is used up refused.

    Of a budget that is to be used up the rest is used up here.
    """
    ends = {"200"} if team_of(key) not in {"spent", "each"} else {"insufficient_quota"}
    deadline, number = time.monotonic() + PATIENCE_S, 0
    while time.monotonic() < deadline:
        end = load.once(f"k{key:02}-{number}")
        number += 1
        if end in ends:
            return True
        time.sleep(0 if end == "200" else 0.5)
    return False


def settle(fleet: Fleet, load: Clients, database: Postgres, lease_s: float) -> Iterator[Found]:
    """After the load: all is written, every key is asked, and nothing is in use."""
    late = []
    ((now,),) = database.rows("select clock_timestamp()")

    def wait(said: Callable[[], Any], what: str, limit_s: float) -> None:
        try:
            until(said, what, limit_s)
        except AssertionError as error:
            late.append(str(error))

    wait(lambda: not chaos_sums.missing(database, set(load.whole)), "whole answers have rows", 60)
    wait(lambda: not database.rows(chaos_sums.OF_DEAD, now), "leases of the dead end", lease_s + 30)
    wait(fleet.settled, "spools of the dead are settled", LOOK_S + 30)
    with ThreadPoolExecutor(8) as pool:
        served = list(pool.map(lambda key: serves(load, key), range(KEYS)))
    wait(fleet.written, "all rows are written", 60)
    wait(lambda: not database.rows(chaos_sums.HELD), "nothing is in use", 60)
    wedged = [key for key, well in enumerate(served) if not well]
    yield "keys wedged", wedged, not wedged
    yield "came too late", late, not late


def measure(count: int, seed: int, lease_s: float) -> list[Found]:
    """Figures by name, and whether each is as it must be."""
    with (
        tempfile.TemporaryDirectory(prefix="llmgw-chaos-") as folder,
        postgres() as database,
        FakeEngine() as one,
        FakeEngine() as other,
    ):
        prepare(database, count, lease_s)
        fleet = Fleet(Path(folder), database, [one.url, other.url], seed)
        load = Clients(fleet.controller.client, seed)
        began = time.monotonic()
        try:
            with Watch(database, chaos_sums.OVER, 0.02) as watch:
                fleet.start()
                knows_keys(fleet.controller, WORKERS)
                with load:
                    fleet.rage(load, count)
                took = time.monotonic() - began
                early = dict(load.refused)
                found = list(settle(fleet, load, database, lease_s))
        finally:
            fleet.controller.__exit__()
        served = Counter(
            record.headers["x-request-id"]
            for engine in (one, other) for record in engine.chats() if record.answered
        )  # fmt: skip
        found += told(load, fleet, watch, early, took)
        cut = {name for name, how in load.how.items() if how in BROKEN}
        found += chaos_sums.rows(database, as_rows(load), set(load.whole), cut, served)
        found += chaos_sums.sums(database)
        rest = chaos_sums.unspent(database, MOST, ENDLESS)
        found.append(("used-up budgets with more than a request left", len(rest), not rest))
        left = database.rows(chaos_sums.LEASES)
        found.append(("leases and slots left", len(left), not left))
        files = [path.name for path in fleet.state.rglob("*") if path.suffix in SPOOLED]
        found.append(("spool files left", len(files), not files))
    return found


def told(
    load: Clients, fleet: Fleet, watch: Watch, early: dict[Any, int], took: float
) -> Iterator[Found]:
    """What happened under load, as clients and the watch saw it."""
    yield "requests; whole answers", f"{len(load.sent)}; {len(load.whole)}", True
    yield "answers torn though they ended well", len(load.torn), not load.torn
    yield "seconds of load; answers a second", f"{took:.0f}; {len(load.whole) / took:.0f}", True
    yield "killed", dict(fleet.killed), min(fleet.killed.values(), default=0) > 0
    strange = load.ends.keys() - BROKEN - UNAVAILABLE - {"200", *(code for _, code in MAY_REFUSE)}
    yield "ends of requests", dict(load.ends.most_common()), not strange
    wrong = {key: count for key, count in load.refused.items() if key not in MAY_REFUSE}
    yield "refusals without a cause", wrong, not wrong
    for reason in sorted(MAY_REFUSE):
        yield f"refusals under load: {' '.join(reason)}", early.get(reason, 0), True
    used_up = sum(early.get((team, "insufficient_quota"), 0) for team in ("spent", "each"))
    yield "refusals of used-up budgets under load", used_up, used_up > 0
    yield "looks at spent + held", watch.looks, watch.looks > 0
    for kind, most in sorted(watch.most.items()):
        yield f"fullest bound of {kind}: beyond it", f"{most:g}", most <= 0


def as_rows(load: Clients) -> dict[str, tuple[Any, ...]]:
    """What the row of each request must hold if it was answered whole."""
    return {
        name: (f"key{load.number(name):03}", PROMPT, CACHED, tokens, cost(tokens))
        for name, tokens in load.sent.items()
    }


@click.command()
@click.option("--requests", "count", type=click.IntRange(100), default=20_000, show_default=True)
@click.option("--seed", default=1, show_default=True, help="Of requests and kills.")
@click.option(
    "--lease",
    "lease_s",
    type=click.IntRange(5),
    default=60,
    show_default=True,
    help="Seconds that a dead router's part of a budget stays its own.",
)
@click.option("--json", "file", type=click.Path(path_type=Path), help="Write all figures there.")
def chaos(count: int, seed: int, lease_s: int, file: Path | None) -> None:
    """Kill routers and Postgres under load; everything must add up."""
    command, machine = (
        f"ops/bench chaos --requests {count} --seed {seed} --lease {lease_s}",
        processes.machine(),
    )
    found = measure(count, seed, lease_s)
    report.heading(command, machine)
    for name, figure, holds in found:
        print(f"{'' if holds else 'WRONG':6}{name:58} {figure}")
    if file is not None:
        figures = {name: {"figure": str(figure), "holds": holds} for name, figure, holds in found}
        file.write_text(
            json.dumps({"command": command, "machine": machine, "figures": figures}, indent=1)
        )
    wrong = [name for name, _, holds in found if not holds]
    print(f"does not hold: {'; '.join(wrong)}" if wrong else "everything holds")
    sys.exit(1 if wrong else 0)
