"""Builds Prometheus families from plain rows; a None value is no sample."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    Rows = Iterable[tuple[Sequence[str], float | None]]

PREFIX = "llmgw_"


def gauge(name: str, what: str, labels: Sequence[str], rows: Rows) -> GaugeMetricFamily:
    """A gauge with one sample per row whose value is known."""
    family = GaugeMetricFamily(PREFIX + name, what, labels=labels)
    for values, number in rows:
        if number is not None:
            family.add_metric([str(value) for value in values], float(number))
    return family


def counter(name: str, what: str, labels: Sequence[str], rows: Rows) -> CounterMetricFamily:
    """A counter (its samples end in _total) with one sample per row whose value is known."""
    family = CounterMetricFamily(PREFIX + name, what, labels=labels)
    for values, number in rows:
        if number is not None:
            family.add_metric([str(value) for value in values], float(number))
    return family
