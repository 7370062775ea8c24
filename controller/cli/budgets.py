"""`budgets`: what scopes and keys may spend in a period."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from controller.cli.client import part

if TYPE_CHECKING:
    from controller.cli.session import Session

F = TypeVar("F", bound=Callable[..., Any])
COLUMNS = ("BUDGET", "ON", "PERIOD", "ZONE", "MICROS", "SPENT", "RESERVED", "USED", "FREES")
EVENTS = ("AT", "BUDGET", "ON", "PERIOD", "PASSED", "SPENT", "MICROS")


def placed(command: F) -> F:
    """Options that say on what a budget or limit sits."""
    command = click.option("--key", help="On this key (its id).")(command)
    return click.option("--scope", help="On this scope (path or id) and all below it.")(command)


def place(bound: dict[str, Any]) -> str:
    """On what it sits, for a table."""
    if bound["level"] != "key":
        return f"{bound['level']} {bound['scope']}"
    return f"key {bound['key']} ({bound['key_name']})"


@click.group(invoke_without_command=True)
@click.pass_context
def budgets(ctx: click.Context) -> None:
    """What scopes and keys may spend; alone it lists them."""
    if ctx.invoked_subcommand is None:
        ctx.invoke(list_budgets)


@budgets.command("list")
@placed
@click.pass_obj
def list_budgets(session: Session, scope: str | None = None, key: str | None = None) -> None:
    """Every budget with what is spent and reserved in its present period, in micros."""
    found = session.client.pages("/budgets", scope=scope, key=key)
    rows = (
        (b["id"], place(b), b["period"], b.get("zone", "-"), b["micros"], round(b["spent"]),
         round(b["reserved"]), f"{100 * b['fraction']:.1f}%", b.get("frees_at", "-"))
        for b in found
    )  # fmt: skip
    empty = "No budgets. Set one with llmgwctl budgets set --scope PATH --micros N --period month."
    session.out.show(found, lambda: session.out.table(COLUMNS, rows) if found else empty)


@budgets.command("set")
@placed
@click.option("--micros", type=int, required=True, help="Millionths of the currency.")
@click.option(
    "--period", required=True,
    help="day, week or month, from midnight in the zone; or 24h, 7d or 30d, rolling.",
)  # fmt: skip
@click.option("--zone", help='Of day, week or month, as "Europe/Berlin". [UTC]')
@click.option("--warn", multiple=True, type=float, help="Fraction; may be repeated. [0.8, 1]")
@click.pass_obj
def put(session: Session, /, warn: tuple[float, ...], **fields: Any) -> None:
    """Set a budget, or change that of the same period, which keeps what is spent."""
    body = {name: value for name, value in fields.items() if value is not None}
    made = session.client.post("/budgets", body | ({"warn": list(warn)} if warn else {}))
    session.out.show(
        made,
        lambda: (
            f"Budget {made['id']} of {place(made)}: {made['micros']} micros per {made['period']}, "
            f"{made['spent']:.0f} spent."
        ),
    )


@budgets.command()
@click.argument("budget")
@click.pass_obj
def remove(session: Session, budget: str) -> None:
    """Remove a budget by its id: it bounds nothing more."""
    done = session.client.delete(f"/budgets/{part(budget)}")
    session.out.show(done, lambda: f"Budget {budget} is removed.")


@budgets.command()
@click.option("--budget", type=int, help="Of this one only.")
@click.pass_obj
def events(session: Session, budget: int | None) -> None:
    """Budgets that passed a threshold, newest first."""
    found = session.client.pages("/budget-events", budget=budget)
    rows = (
        (e["at"], e["budget"], f"key {e['key']}" if "key" in e else f"scope {e['scope_id']}",
         e["period"], f"{100 * e['threshold']:g}%", e["spent"], e["micros"])
        for e in found
    )  # fmt: skip
    empty = "No budget has passed a threshold."
    session.out.show(found, lambda: session.out.table(EVENTS, rows) if found else empty)
