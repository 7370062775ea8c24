"""`keys`: list, create and revoke clients' keys."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from controller.cli.client import part
from controller.cli.node import Duration
from controller.cli.output import note
from controller.cli.words import joined

if TYPE_CHECKING:
    from controller.cli.session import Session

COLUMNS = ("KEY", "NAME", "MODELS", "STATE", "CREATED", "EXPIRES", "BY")


@click.group(invoke_without_command=True)
@click.pass_context
def keys(ctx: click.Context) -> None:
    """Keys of clients; alone it lists them."""
    if ctx.invoked_subcommand is None:
        ctx.invoke(list_keys)


@keys.command("list")
@click.pass_obj
def list_keys(session: Session) -> None:
    """Every key, without its secret."""
    found = session.client.pages("/keys")
    rows = (
        (k["id"], k["name"], joined(k["models"]) if "models" in k else "all", k["state"],
         k["created_at"], k.get("expires_at", "never"), k["created_by"])
        for k in found
    )  # fmt: skip
    empty = "No keys. Make one with llmgwctl keys create NAME."
    session.out.show(found, lambda: session.out.table(COLUMNS, rows) if found else empty)


@keys.command()
@click.argument("name")
@click.option("--models", help="Names or aliases, with commas between. [every model]")
@click.option("--expires", type=Duration(), help='From now, as "90d". [never]')
@click.pass_obj
def create(session: Session, name: str, models: str | None, expires: float | None) -> None:
    """Make a key. It is shown this once; only its hash is kept."""
    allowed = [m.strip() for m in models.split(",") if m.strip()] if models is not None else None
    body = {"name": name, "models": allowed, "expires": expires}
    given = {field: value for field, value in body.items() if value is not None}
    made = session.client.post("/keys", given)
    until = f"until {made['expires_at']}" if "expires_at" in made else "without end"
    note(f"Key {made['id']} of {name}, {until}. It is shown this once:")
    session.out.show(made, lambda: str(made["key"]))


@keys.command()
@click.argument("id_", metavar="ID")
@click.pass_obj
def revoke(session: Session, id_: str) -> None:
    """Refuse a key everywhere within two seconds."""
    done = session.client.delete(f"/keys/{part(id_)}")
    session.out.show(done, lambda: f"Key {id_} is revoked.")
