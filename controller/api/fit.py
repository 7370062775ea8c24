"""The handler of `GET /fit`: whether a model fits on the cards there are, line by line."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from pydantic import ConfigDict, Field

from controller.api.errors import ApiError
from controller.api.known import unknown_model
from controller.api.views import PLAIN_NAMES, Answer
from controller.catalog.profile import Strict
from controller.placement.fit import Estimate, estimate
from controller.placement.reasons import size

if TYPE_CHECKING:
    from collections.abc import Mapping

    from controller.api.call import Call


class FitQuery(Strict):
    """Which model, and of which of its profiles and on which cards."""

    model: str = Field(min_length=1)
    profile: str | None = Field(None, min_length=1, description="absent: each of them")
    gpu: str | None = Field(None, min_length=1, description="class of cards; absent: each there is")


class FitLine(Answer):
    """One part of what the fullest card holds."""

    name: str
    mib: int
    why: str


class FitCase(Answer):
    """One class of cards; fits is absent when unknown, missing says why."""

    model_config = ConfigDict(**PLAIN_NAMES)

    class_: str | None = None
    cards: int
    card_mib: int | None = None
    fits: bool | None = None
    verdict: str
    need_mib: int | None = None
    fault: str | None = None
    context: int | None = None
    sequences: float | None = None
    tokens: int | None = None
    lines: list[FitLine]
    missing: list[str]
    notes: list[str]


class FitProfile(Answer):
    """One profile. With gpu_memory_mib the profile itself says what it needs, and is believed."""

    profile: str
    engine: str
    gpus: int
    shards: int
    gpu_memory_mib: int | None = None
    cases: list[FitCase]


class FitWeights(Answer):
    """Whose report of the weights the facts come from."""

    node: str
    path: str
    bytes: int | None = None


class FitView(Answer):
    """What a model needs of each card; without weights on any node the facts are missing."""

    model: str
    source: str
    weights: FitWeights | None = None
    problem: str | None = None
    profiles: list[FitProfile]


async def fit(call: Call) -> Any:
    """The estimate for each profile of a model and each class of cards in the fleet."""
    query = call.query
    found = await call.value("fit", query.model)
    if found is None:
        added = ApiError(404, f"model {query.model} was added this moment: ask again")
        raise await unknown_model(call, query.model) or added
    names = [row["name"] for row in found["profiles"]]
    if query.profile is not None and query.profile not in names:
        raise ApiError(
            404,
            f"model {found['model']} has no profile {query.profile}: it has {', '.join(names)}",
        )
    wanted = [row for row in found["profiles"] if query.profile in (None, row["name"])]
    report = found["weights"] or {}
    usable = report.get("usable") is True
    answer = {
        "model": found["model"],
        "source": found["source"],
        "weights": {name: report[name] for name in ("node", "path", "bytes")} if usable else None,
        "problem": None if usable else _problem(found["source"], report),
        "profiles": [
            _profile(row, report.get("facts") if usable else None, _cards(row, found, query.gpu))
            for row in wanted
        ],
    }
    return _told(answer)


def _problem(source: str, report: Mapping[str, Any]) -> str:
    """Why there are no facts to estimate from."""
    if not report:
        return (
            f"no agent has the weights of {source} yet: what they hold is known once a node has "
            "fetched them"
        )
    why = report["reason"] or ("no facts could be read" if report["complete"] else "not complete")
    return f"no agent has the whole weights of {source} yet: {report['node']} says: {why}"


def _cards(
    row: Mapping[str, Any], found: Mapping[str, Any], asked: str | None
) -> list[dict[str, Any]]:
    """The classes of cards to look at: the one asked for, the profile's own, or all there are."""
    if row["gpus"] == 0:
        return []
    name = asked or row["gpu_class"]
    there = [card for card in found["cards"] if name in (None, card["class"])]
    return there or [{"class": name, "mib": None, "count": 0}]


def _profile(
    row: Mapping[str, Any], facts: Mapping[str, Any] | None, cards: list[dict[str, Any]]
) -> dict[str, Any]:
    how = {name: row[name] for name in ("engine", "env", "gpus", "shards", "fabric")}
    return {
        "profile": row["name"],
        "engine": row["engine"],
        "gpus": row["gpus"],
        "shards": row["shards"],
        "gpu_memory_mib": row["gpu_memory_mib"],
        "cases": [
            _case(
                card,
                _believed(estimate(facts, **how, args=_args(row, card), card_mib=card["mib"]), row),
                row,
            )
            for card in cards
        ],
    }


def _args(row: Mapping[str, Any], card: Mapping[str, Any]) -> list[str]:
    """The profile's arguments, with the part of a shared card that the agent tells vLLM."""
    args = [str(word) for word in row["args"] or ()]
    if not row["share"] or row["engine"] != "vllm" or card["mib"] is None:
        return args
    return [f"--gpu-memory-utilization={row['gpu_memory_mib'] / card['mib']:.3f}", *args]


def _believed(found: Estimate, row: Mapping[str, Any]) -> Estimate:
    """What the profile says of its need goes before the estimate, as in placement."""
    own, need = row["gpu_memory_mib"], found.need_mib
    if own is None:
        return found
    if found.card_mib is not None and own > found.card_mib:
        return replace(found, fits=False)
    if need is not None and need > own:
        note = f"the profile's gpu_memory of {size(own)} is believed, and {size(need - own)} less"
        return replace(found, notes=(*found.notes, f"{note} than this estimate"))
    return found


def _case(card: Mapping[str, Any], found: Estimate, row: Mapping[str, Any]) -> dict[str, Any]:
    told = {name: value for name, value in asdict(found).items() if name != "strict"}
    return {
        "class": card["class"],
        "cards": card["count"],
        "verdict": _verdict(card, found, row["gpu_memory_mib"]),
    } | told


def _verdict(card: Mapping[str, Any], found: Estimate, own_mib: int | None) -> str:
    """One sentence: fits, does not fit by how much, or unknown because of what."""
    if own_mib is not None and found.card_mib is not None and own_mib > found.card_mib:
        return (
            f"does not fit: the profile's gpu_memory is {size(own_mib)}, "
            f"{size(own_mib - found.card_mib)} more than it has"
        )
    if found.fault is not None:
        return f"does not start: {found.fault}"
    if found.need_mib is None:
        return f"unknown, for this is missing: {', '.join(found.missing)}"
    if found.card_mib is None:
        name = card["class"] or "any class"
        return f"needs {size(found.need_mib)} per card; no card of {name} has reported its memory"
    spare = found.card_mib - found.need_mib
    if found.fits and spare < 0:
        return f"starts with a part of the model on the card: all of it needs {size(-spare)} more"
    if found.fits:
        return f"fits: needs {size(found.need_mib)} per card, {size(spare)} are left"
    if spare < 0:
        return (
            f"does not fit: needs {size(found.need_mib)} per card, {size(-spare)} more than it has"
        )
    return "does not fit: the cache is too small for one sequence"


def _told(value: Any) -> Any:
    """The answer without unknowns."""
    if isinstance(value, dict):
        return {name: _told(part) for name, part in value.items() if part is not None}
    return [_told(part) for part in value] if isinstance(value, list | tuple) else value
