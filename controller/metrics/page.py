"""The page of metrics.

Router numbers come from all router processes of this controller through their stats sockets, fleet
numbers from the views (the same from every controller), control numbers from this process. What
nobody measured has no sample.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily

from controller.metrics import fleet, router
from controller.metrics.families import counter, gauge
from sql.errors import DatabaseError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from prometheus_client.core import Metric

    from controller.context import ControlContext

FLEET_S = 5.0


class _Fixed:
    """A collector of families made already: prometheus_client only renders."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = list(families)

    def collect(self) -> Iterator[Metric]:
        """The families."""
        return iter(self._families)


async def render(context: ControlContext) -> bytes:
    """The whole page. A part that cannot be read is left out and said so by llmgw_scrape_up."""
    families = list(control(context))
    up = GaugeMetricFamily("llmgw_scrape_up", "1 when this part could be read", labels=["part"])
    workers = await router.read(context.runtime)
    families += router.families(workers, context.carried.beside(workers))
    up.add_metric(["router"], float(bool(workers)))
    if context.pool is not None:
        try:
            with trio.fail_after(FLEET_S):
                families += await fleet.read(context.pool)
            up.add_metric(["fleet"], 1)
        except (DatabaseError, trio.TooSlowError):
            up.add_metric(["fleet"], 0)
    registry = CollectorRegistry()
    registry.register(_Fixed([*families, up]))
    return generate_latest(registry)


def control(context: ControlContext) -> Iterator[Metric]:
    """What this process knows of itself."""
    loops = context.loops.by_name.values()
    ages = [((loop.name,), loop.age_s()) for loop in loops]
    yield gauge("loop_last_success_age_seconds", "since the last success of a loop", ["loop"], ages)
    errors = [((loop.name,), loop.errors) for loop in loops]
    yield counter("loop_errors", "rounds of a loop that failed", ["loop"], errors)
    heard = context.listening.heard_at
    age = None if heard is None else trio.current_time() - heard
    yield gauge("notify_age_seconds", "since anything came through LISTEN", [], [((), age)])
    yield counter(
        "notify_connects", "LISTEN connections made", [], [((), context.listening.connects)]
    )
    leases = context.leases.values()
    held = [((lease.duty,), float(lease.held() is not None)) for lease in leases]
    yield gauge("leader", "1 while this process does the duty", ["duty"], held)
    terms = [((lease.duty,), lease.term) for lease in leases]
    yield gauge("lease_term", "term under which this process leads", ["duty"], terms)
    if context.pool is not None:
        sizes = [((state,), n) for state, n in context.pool.statistics().items()]
        yield gauge("database_connections", "connections of the control process", ["state"], sizes)
    if context.ticker is not None:
        yield from _ticks(context)


def _ticks(context: ControlContext) -> Iterator[Metric]:
    assert context.ticker is not None
    stats = context.ticker.stats
    yield gauge("tick_duration_seconds", "the last tick", [], [((), stats.seconds)])
    stages = [((stage,), seconds) for stage, seconds in stats.stages.items()]
    yield gauge("tick_stage_duration_seconds", "parts of the last tick", ["stage"], stages)
    yield counter("ticks", "ticks of this process as a leader", [], [((), stats.ticks)])
    items = [((kind,), n) for kind, n in stats.items.items()]
    yield counter("plan_items", "plan items committed", ["kind"], items)
    yield counter("plan_items_refused", "plan items refused at commit", [], [((), stats.refused)])
    found = [(key, n) for key, n in stats.rejections.items()]
    what = "candidates refused in the latest attempt"
    yield gauge("placement_rejections", what, ["model", "code"], found)
    yield gauge(
        "tick_notes", "rows and events that ticks leave alone", [], [((), len(stats.notes))]
    )
