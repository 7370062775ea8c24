"""Figures of one period, and how they are printed."""

from __future__ import annotations

from contextlib import asynccontextmanager
from time import process_time
from typing import TYPE_CHECKING, Any

import trio

from ops.benchmarks import postgres, processes

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import AsyncIterator

GOALS = "goals: Postgres under 15 % of one core with 200 nodes; agent under 60 MiB and 1 % CPU"


@asynccontextmanager
async def period(
    into: dict[str, dict[str, Any]],
    name: str,
    meter: postgres.Meter,
    controller: int,
    calls: Counter[str],
) -> AsyncIterator[None]:
    """Measure the length of a block: Postgres, the controller's process, and this one (agents)."""
    before, calls_before = await trio.to_thread.run_sync(meter.read), dict(calls)
    control, own = processes.spent_s(processes.tree(controller)), process_time()
    yield
    after = await trio.to_thread.run_sync(meter.read)
    found = postgres.between(before, after)
    seconds = after.at - before.at
    spent = processes.spent_s(processes.tree(controller)) - control
    found["controller_cpu_percent"] = round(100 * spent / seconds, 2)
    found["agents_cpu_percent"] = round(100 * (process_time() - own) / seconds, 2)
    found["calls_per_s"] = {
        kind: round((number - calls_before.get(kind, 0)) / seconds, 2)
        for kind, number in sorted(calls.items())
        if number != calls_before.get(kind, 0)
    }
    into[name] = found


def heading(command: str, machine: dict[str, Any]) -> None:
    """Print what was asked, and of which machine the figures are."""
    print(f"$ {command}")
    print(f"machine: {machine['cores']} cores, {machine['cpu']}; load {machine['load_before']}")


def show(result: dict[str, Any]) -> None:
    """Print a table of everything."""
    heading(result["command"], result["machine"])
    print(GOALS)
    if "fleet" in result:
        _show_fleet(result["fleet"])
    if "agent" in result:
        _show_agent(result["agent"])


def _show_fleet(phases: dict[str, dict[str, Any]]) -> None:
    print("\nfleet           Postgres  agents'  controller's  transactions  syncs     WAL  others'")
    print("                CPU %     backends backends      /s            /s      kB/s  CPU %")
    for name, found in phases.items():
        shares = found["cpu_percent_by_process"]
        print(
            f"{name:15} {found['cpu_percent']:8.2f}  {shares.get('agents', 0):8.2f} "
            f"{shares.get('llmgw', 0):9.2f}  {found['transactions_per_s']:12.1f}"
            f"  {found['calls_per_s'].get('sync', 0):7.1f}"
            f" {found['wal_bytes_per_s'] / 1000:8.1f}"
            f"  agents {found['agents_cpu_percent']}, controller {found['controller_cpu_percent']}"
        )
    whole = phases.get("everything", {})
    print("\nreports a second:", whole.get("calls_per_s"))
    print("CPU % by process:", whole.get("cpu_percent_by_process"))
    for name, table in whole.get("tables", {}).items():
        print(f"  {name:12} {table}")


def _show_agent(found: dict[str, Any]) -> None:
    print(f"\nagent {found['cpu_percent']} % CPU over {found['seconds']} s")
    for one in found["processes"]:
        print(f"  {one['rss_mib']:7.1f} MiB  {one['cpu_percent']:6.2f} %  {one['command']}")
