"""From rows to words: how far the wanted models are, and what keeps those that are not ready."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

GIVE_UP_AFTER = 2
"""Restarts of an engine that never got ready: the third failure is not going to be the last."""
UNPLACED_S = 15.0
"""An agent's facts are there within seconds; a refusal that lasts longer is meant."""


@dataclass(frozen=True, slots=True)
class Progress:
    """One wanted model. Exactly one of ready, trouble and doing says something."""

    name: str
    alias: str | None
    ready: bool
    doing: str
    trouble: str | None
    """Why it will not become ready without help; None while there is hope."""

    @property
    def called(self) -> str:
        """The name to ask for it by: short where there is one."""
        return self.alias or self.name


def failures(rows: Iterable[Mapping[str, Any]]) -> dict[int, int]:
    """How often each replica has failed until now, by its id."""
    return {one["id"]: one["restarts"] for row in rows for one in row["replicas"] or ()}


def judge(
    rows: Iterable[Mapping[str, Any]], waited_s: float, before: Mapping[int, int]
) -> list[Progress]:
    """The state of each wanted model; ``waited_s`` since the agent was started.

    ``before`` has the `failures` of earlier runs: what was mended since gets another chance.
    """
    return [_judge(row, waited_s, before) for row in rows]


def _judge(row: Mapping[str, Any], waited_s: float, before: Mapping[int, int]) -> Progress:
    alias = (row["aliases"] or [None])[0]
    if row["ready_replicas"]:
        return Progress(row["name"], alias, True, "ready", None)
    replicas = row["replicas"] or []
    return Progress(
        row["name"],
        alias,
        False,
        _doing(replicas, row["outcome"]),
        _trouble(row, [one for one in replicas if _failed_now(one, before)], waited_s),
    )


def _failed_now(replica: Mapping[str, Any], before: Mapping[int, int]) -> bool:
    """Whether it failed in this run, and is not about to be replaced by one of a new profile."""
    return not replica["stale"] and replica["restarts"] > before.get(replica["id"], 0)


def _doing(replicas: list[dict[str, Any]], outcome: str | None) -> str:
    if not replicas:
        return outcome or "waiting for a place"
    replica = replicas[0]
    for shard in replica["shards"]:
        if percent := (shard.get("fetch") or {}).get("percent"):
            return f"fetching weights, {percent:.0f} %"
    states = {shard["state"] for shard in replica["shards"]}
    return ", ".join(sorted(states)) if states else str(replica["state"])


def _trouble(row: Mapping[str, Any], replicas: list[dict[str, Any]], waited_s: float) -> str | None:
    failed = next((r for r in replicas if r["error"] and r["restarts"] >= GIVE_UP_AFTER), None)
    if failed is not None:
        log = f"\nThe engine's last words:\n{row['log_tail']}" if row["log_tail"] else ""
        return f"its engine failed {failed['restarts']} times: {failed['error']}{log}"
    if row["placed"] is False and row["reasons"] and waited_s > UNPLACED_S:
        reasons = "\n".join(f"  - {reason}" for reason in row["reasons"])
        return f"there is no place for it:\n{reasons}"
    return None


def sentence(models: Iterable[Progress]) -> str:
    """All that is being waited for, in a line."""
    return "; ".join(
        f"{m.name}: {'in trouble' if m.trouble else m.doing}" for m in models if not m.ready
    )
