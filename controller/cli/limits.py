"""`limits`: what scopes and keys may ask for on all routers together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from controller.cli.budgets import place, placed
from controller.cli.client import part

if TYPE_CHECKING:
    from controller.cli.session import Session

COLUMNS = ("LIMIT", "ON", "MODEL", "REQUESTS/MIN", "TOKENS/MIN", "PARALLEL")
_NUMBERS = (
    ("requests", "requests_per_min"),
    ("tokens", "tokens_per_min"),
    ("in_parallel", "parallel"),
)


@click.group(invoke_without_command=True)
@click.pass_context
def limits(ctx: click.Context) -> None:
    """What scopes and keys may ask for; alone it lists them."""
    if ctx.invoked_subcommand is None:
        ctx.invoke(list_limits)


@limits.command("list")
@placed
@click.pass_obj
def list_limits(session: Session, scope: str | None = None, key: str | None = None) -> None:
    """Every limit: given out in this minute, or running, of what is allowed."""
    found = session.client.pages("/limits", scope=scope, key=key)
    rows = (
        (one["id"], place(one), one.get("model", "all"), *(_of(one, *pair) for pair in _NUMBERS))
        for one in found
    )
    empty = "No limits. Set one with llmgwctl limits set --scope PATH --requests 600."
    session.out.show(found, lambda: session.out.table(COLUMNS, rows) if found else empty)


def _of(limit: dict[str, Any], used: str, most: str) -> str:
    return f"{limit[used]}/{limit[most]}" if most in limit else "-"


@limits.command("set")
@placed
@click.option("--model", help="Of this model (name or alias) only. [all together]")
@click.option("--requests", "requests_per_min", type=int, help="In a minute. [no bound]")
@click.option("--tokens", "tokens_per_min", type=int, help="In a minute. [no bound]")
@click.option("--parallel", type=int, help="Requests at the same time. [no bound]")
@click.pass_obj
def put(session: Session, /, **fields: Any) -> None:
    """Set a limit, or replace that of the same model: what is not given has no bound."""
    body = {name: value for name, value in fields.items() if value is not None}
    made = session.client.post("/limits", body)
    what = ", ".join(f"{made[most]} {most.replace('_per_min', '/min')}" for _, most in _NUMBERS
                     if most in made)  # fmt: skip
    of = f" of {made['model']}" if "model" in made else ""
    session.out.show(made, lambda: f"Limit {made['id']} of {place(made)}: {what}{of}.")


@limits.command()
@click.argument("limit")
@click.pass_obj
def remove(session: Session, limit: str) -> None:
    """Remove a limit by its id: it holds no more."""
    done = session.client.delete(f"/limits/{part(limit)}")
    session.out.show(done, lambda: f"Limit {limit} is removed.")
