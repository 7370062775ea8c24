"""The command that shows measurements: capacity."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from controller.cli.session import Session

COLUMNS = (
    "MODEL", "PROFILE", "CLASS", "ENGINE", "AT ONCE", "REQ/S", "TOK/S", "TTFT P95", "ITL P95",
    "MEASURED", "BY",
)  # fmt: skip


@click.command()
@click.option("--model", help="Of this model only.")
@click.pass_obj
def capacity(session: Session, model: str | None) -> None:
    """How much one replica serves within its objectives, as last measured."""
    found = session.client.pages("/capacity", model=model)
    rows = (
        (c["model"], c["profile"], c.get("node_class"), c.get("engine"), f"{c['concurrency']:g}",
         _number(c.get("requests_per_s")), _number(c.get("tokens_per_s")),
         _p95(c.get("ttft_ms")), _p95(c.get("itl_ms")), c["measured_at"], c["measured_by"])
        for c in found
    )  # fmt: skip
    empty = (
        "Nothing was measured yet; models scale by the setting concurrency, and replicas get "
        "requests by the setting depth."
    )
    session.out.show(found, lambda: session.out.table(COLUMNS, rows) if found else empty)


def _number(value: float | None) -> str | None:
    return None if value is None else f"{value:.4g}"


def _p95(spread: Any) -> str | None:
    value = spread.get("p95") if isinstance(spread, dict) else None
    return f"{value:.4g} ms" if isinstance(value, int | float) else None
