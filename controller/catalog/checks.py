"""Rules between objects: names and aliases unique together, fallbacks and pools that exist.

Pure: what else is there comes in as `Known`. The database refuses the same; here faults get words.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from typing import TYPE_CHECKING

from controller.catalog.faults import CatalogError, nearest

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from controller.catalog.definition import Catalog, Model


@dataclass(frozen=True, slots=True)
class Known:
    """What others have declared and what stays after this change."""

    models: frozenset[str] = frozenset()
    aliases: Mapping[str, str] = field(default_factory=dict)
    """alias -> its model"""
    pools: frozenset[str] = frozenset()
    fallbacks: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """model -> the models that answer instead"""


def check(catalog: Catalog, known: Known) -> None:
    """Raises CatalogError with the first fault."""
    owners = {alias: f"an alias of model {model}" for alias, model in known.aliases.items()}
    owners |= {
        name: f"the name of model {name}"
        for name in known.models - {m.name for m in catalog.models}
    }
    for model in catalog.models:
        if model.name in owners:
            twice = owners[model.name] == f"the name of model {model.name}"
            raise CatalogError(
                f"model {model.name} is declared twice: drop one"
                if twice
                else f"model {model.name}: its name is {owners[model.name]}: choose another"
            )
        owners[model.name] = f"the name of model {model.name}"
    for model in catalog.models:
        for alias in model.aliases:
            if alias in owners:
                raise CatalogError(
                    f"model {model.name}: the alias {alias} is {owners[alias]}: choose another"
                )
            owners[alias] = f"an alias of model {model.name}"
    names = known.models | {model.name for model in catalog.models}
    pools = known.pools | set(catalog.pools)
    for model in catalog.models:
        _fallbacks(model, names, owners)
        _pools(model, pools)


def circle(catalog: Catalog, known: Known) -> list[str]:
    """Models whose fallbacks lead back to the first, which stands at the end too; empty if none.

    No fault: two models may stand in for each other. A request tries each once.
    """
    graph = {**known.fallbacks, **{model.name: model.fallbacks for model in catalog.models}}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(reversed(error.args[1]))  # it names who comes before whom
    return []


def _fallbacks(model: Model, names: frozenset[str], owners: Mapping[str, str]) -> None:
    for fallback in model.fallbacks:
        if fallback in names:
            continue
        if fallback in owners:
            raise CatalogError(
                f"model {model.name}: the fallback {fallback} is {owners[fallback]}: "
                "name that model"
            )
        right = nearest(fallback, sorted(names), "model")
        raise CatalogError(
            f"model {model.name}: there is no model {fallback} to fall back to: {right}"
        )


def _pools(model: Model, pools: frozenset[str]) -> None:
    for profile in model.profiles:
        if profile.pool is not None and profile.pool not in pools:
            right = (
                nearest(profile.pool, sorted(pools), "pool")
                if pools
                else "declare it: [pools.NAME] labels = {..}"
            )
            raise CatalogError(
                f"model {model.name}, profile {profile.name}: there is no pool "
                f"{profile.pool}, so nothing could ever place it: {right}"
            )
