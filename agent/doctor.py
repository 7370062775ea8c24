"""The doctor: what a machine is checked for, and how the answer is shown and reported. Pure.

`checks` is called with a `Found` by the command `llmgw-agent doctor` and by the slow reports; the
checks are in agent/checks. Clock and database are checked where they are known, not here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Final

from agent.checks import cards, driver, fabric, host, imex, ports
from agent.checks.verdict import ORDER, Result, Verdict, short, warned

if TYPE_CHECKING:
    from agent.probes.found import Found

LIST: Final[Mapping[str, Callable[[Found], Verdict | None]]] = {
    "driver": driver.driver,
    "gpu count": cards.count,
    "gpu health": cards.health,
    "ecc": cards.ecc,
    "row remaps": cards.remaps,
    "persistence": cards.persistence,
    "throttling": cards.throttling,
    "pcie": cards.pcie,
    "xid log": cards.xid_log,
    "fabric manager": fabric.fabric_manager,
    "nvlink": fabric.nvlink,
    "p2p": fabric.p2p,
    "nvlink domain": fabric.domain,
    "imex": imex.imex,
    "imex channel": imex.channel,
    "infiniband": ports.infiniband,
    "roce": ports.roce,
    "port errors": ports.port_errors,
    "subnet manager": ports.subnet_manager,
    "cpu": host.cpu,
    "cpu limit": host.cpu_limit,
    "memory limit": host.memory_limit,
    "pressure": host.pressure,
    "disk": host.disk,
    "engines": host.engines,
    "engine ports": host.engine_ports,
}
"""Every check by its name, which is stable: it is a key in the database and in alerts."""
MAX_REPORTED: Final = 100
"""As many as agent.report_checks takes."""
_COLOURS: Final[Mapping[Result, str]] = {"fail": "31", "warn": "33", "pass": "32"}


@dataclass(frozen=True, slots=True)
class Check:
    """One check's answer. `remedy` is one sentence with what to run, None on pass."""

    name: str
    result: Result
    evidence: str
    remedy: str | None = None


def checks(found: Found) -> tuple[Check, ...]:
    """All checks that apply to this machine, in the order of LIST. Never raises."""
    whole = _whole(found)
    told = ((name, _ask(name, check, whole)) for name, check in LIST.items())
    return tuple(
        Check(name, verdict.result, verdict.evidence, verdict.remedy)
        for name, verdict in told
        if verdict is not None
    )


def _whole(found: Found) -> Found:
    """The same with what is there by default in place of parts that were not looked at at all."""
    empty: dict[str, Any] = {}
    for part in fields(found):
        if getattr(found, part.name) is None and part.default_factory is not MISSING:
            empty[part.name] = part.default_factory()
        elif getattr(found, part.name) is None and part.default is not MISSING:
            empty[part.name] = part.default
    return replace(found, **empty)


def _ask(name: str, check: Callable[[Found], Verdict | None], found: Found) -> Verdict | None:
    """One check. A fault of its own costs its answer only: the others are wanted all the more."""
    try:
        return check(found)
    except Exception as error:
        what = short(f"the check itself failed ({type(error).__name__}: {error})")
        return warned(what, f"report this as a fault of llmgw, with `llmgw-agent probe` ({name})")


def worst(answers: Iterable[Check]) -> Result:
    """The worst result of all; pass when there is none."""
    results = {check.result for check in answers}
    return next((result for result in ORDER if result in results), "pass")


def to_text(answers: Sequence[Check], colour: bool = False) -> str:
    """For a terminal: worst first, each with its remedy below it, and a line that sums up."""
    width = max((len(check.name) for check in answers), default=0)
    ranked = sorted(answers, key=lambda check: ORDER.index(check.result))
    lines = []
    for check in ranked:
        word = f"\x1b[{_COLOURS[check.result]}m{check.result}\x1b[0m" if colour else check.result
        lines.append(f"{word}  {check.name:<{width}}  {check.evidence}")
        if check.remedy:
            lines.append(f"{'':4}  {'':<{width}}  -> {check.remedy}")
    return "\n".join([*lines, "", _summary(answers)])


def _summary(answers: Sequence[Check]) -> str:
    number = {result: sum(check.result == result for check in answers) for result in ORDER}
    warnings = "warning" if number["warn"] == 1 else "warnings"
    return f"{number['fail']} failed, {number['warn']} {warnings}, {number['pass']} passed"


def to_documents(answers: Sequence[Check]) -> list[dict[str, str]]:
    """For agent.report_checks: one document a check, without a remedy where there is none."""
    return [
        {"name": check.name, "result": check.result, "evidence": check.evidence}
        | ({"remedy": check.remedy} if check.remedy else {})
        for check in answers[:MAX_REPORTED]
    ]
