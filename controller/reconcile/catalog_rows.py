"""Rows of the catalog, of demand and of settings -> `Model`, `Asked`, `Settings`. Pure.

Called by `mirror.py`, and by what-if with a catalog that is not in the database.
"""

from __future__ import annotations

from collections import defaultdict
from math import inf
from typing import TYPE_CHECKING, Any, Final

from controller.placement.model import Asked, Model, Profile, Settings
from controller.reconcile.fitted import fitted
from controller.reconcile.rows import Notes, Row, at_least, each, whole

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence


POSITIVE: Final = frozenset({"concurrency", "start_deadline"})
"""Settings that something is divided by, or that nothing could ever keep if they were zero."""


def models(
    tables: Mapping[str, Sequence[Row]], settings: Mapping[str, float], notes: Notes
) -> list[Model]:
    """The catalog of these rows (facts, models, profiles); demand comes later."""
    where = {row["name"]: row["source"] for row in tables["models"]}
    facts = {row["source"]: row["facts"] for row in tables["facts"]}
    sizes = {row["source"]: row["weights_mib"] for row in tables["facts"]}

    def read(row: Row) -> tuple[str, Profile]:
        name = row["model"]
        return name, fitted(_profile(row, where[name], settings, sizes), facts)

    profiles: defaultdict[str, list[Profile]] = defaultdict(list)
    for name, profile in each(tables["profiles"], read, "profile", "model", notes):
        profiles[name].append(profile)
    return each(tables["models"], lambda r: _model(r, profiles[r["name"]]), "model", "name", notes)


def demand(rows: Sequence[Row], notes: Notes) -> dict[str, Asked]:
    """Model -> what is asked of it."""
    return dict(each(rows, _asked, "demand", "model", notes))


def numbers(rows: Iterable[Row], notes: Notes) -> dict[str, float]:
    """Settings by name, those with a value that can be computed with."""
    found: dict[str, float] = {}
    for row in rows:
        name, value = row["name"], row["value"]
        if value is None:
            continue
        if 0 <= value < inf and (value > 0 or name not in POSITIVE):
            found[name] = value
        else:
            notes[name].append(
                f"setting {name} is {value:g}, which cannot be: the program's own number holds; "
                f"give it another value in llmgw_core.setting"
            )
    return found


def settings(named: Mapping[str, float]) -> Settings:
    """The numbers of llmgw_core.setting; a missing row leaves the default of the program."""
    names = {
        "backoff_base_s": "backoff_base",
        "backoff_max_s": "backoff_max",
        "stable_s": "stable",
        "start_deadline_s": "start_deadline",
        "drain_deadline_s": "drain_deadline",
        "silent_share_max": "silent_share_max",
        "min_residence_s": "min_residence",
        "fairness_s": "fairness",
        "idle_timeout_s": "idle_timeout",
        "concurrency": "concurrency",
        "demand_stale_s": "demand_stale",
    }
    known: dict[str, Any] = {field: named[name] for field, name in names.items() if name in named}
    return Settings(**known)


def _profile(
    row: Row, source: str, numbers: Mapping[str, float], sizes: Mapping[str, int | None]
) -> Profile:
    """A profile, with the part of the agent's assignment document that the catalog decides."""
    spec = {
        name: row[name]
        for name in ("engine", "engine_version", "args", "env", "command", "health_path")
    }
    grace = row["stop_grace_s"]
    spec |= {
        "source": source,
        "start_deadline_s": row["start_deadline_s"] or numbers.get("start_deadline", 1800.0),
        "stop_grace_s": 30.0 if grace is None else grace,
    }
    made = Profile(
        name=row["name"],
        engine=row["engine"],
        fingerprint=row["fingerprint"],
        engine_version=row["engine_version"],
        pool=row["pool"],
        pool_labels={key: tuple(values) for key, values in (row["pool_labels"] or {}).items()},
        gpu_class=row["gpu_class"],
        gpus=row["gpus"],
        gpu_memory_mib=row["gpu_memory_mib"],
        share=row["share"],
        cpus=row["cpus"],
        memory_mib=row["memory_mib"],
        arch=row["arch"],
        cpu_flags=tuple(row["cpu_flags"]),
        shards=row["shards"],
        fabric=row["fabric"],
        driver_min=row["driver_min"],
        cuda_min=row["cuda_min"],
        exclude_nodes=frozenset(row["exclude_nodes"]),
        weights_mib=sizes.get(source),
        alone_of=row["model"] if row["spread"] == "node" else None,
        start_deadline_s=row["start_deadline_s"],
        spec=spec,
    )
    return at_least(whole(made), gpus=0, shards=1, gpu_memory_mib=1, cpus=0, memory_mib=1)


def _asked(row: Row) -> tuple[str, Asked]:
    made = Asked(
        waiting=row["waiting"] or 0,
        in_flight=row["in_flight"] or 0,
        peak=row["peak"] or 0,
        wanted_at=row["wanted_at"],
        concurrency=row["concurrency"],
        heard=row["routers"] > 0,
    )
    return row["model"], made


def _model(row: Row, profiles: list[Profile]) -> Model:
    made = Model(
        name=row["name"],
        source=row["source"],
        min_replicas=row["min_replicas"],
        max_replicas=row["max_replicas"],
        idle_timeout_s=row["idle_timeout_s"],
        profiles=tuple(profiles),
        priority=row["priority"],
        asked=Asked(heard=False),
    )
    return at_least(whole(made), min_replicas=0, max_replicas=0)
