"""`keys`: list, create, rotate, move and revoke clients' keys."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from controller.cli.client import part
from controller.cli.node import Duration
from controller.cli.output import note
from controller.cli.scopes import FALLBACK
from controller.cli.words import fallback as fallback_text
from controller.cli.words import fallback_of, joined, tags_of

if TYPE_CHECKING:
    from controller.cli.session import Session

COLUMNS = (
    "KEY",
    "NAME",
    "SCOPE",
    "MODELS",
    "FALLBACK",
    "STATE",
    "CREATED",
    "EXPIRES",
    "USED",
    "BY",
)


@click.group(invoke_without_command=True)
@click.pass_context
def keys(ctx: click.Context) -> None:
    """Keys of clients; alone it lists them."""
    if ctx.invoked_subcommand is None:
        ctx.invoke(list_keys)


@keys.command("list")
@click.option("--scope", help="In this scope (path or id) and below.")
@click.option("--state", type=click.Choice(["active", "expired", "revoked"]))
@click.pass_obj
def list_keys(session: Session, scope: str | None = None, state: str | None = None) -> None:
    """Every key, without its secret."""
    found = session.client.pages("/keys", scope=scope, state=state)
    rows = (
        (k["id"], k["name"], k.get("scope"), joined(k["models"]) if "models" in k else "all",
         fallback_text(k), k["state"], k["created_at"], k.get("expires_at", "never"),
         k.get("used_at"), k["created_by"])
        for k in found
    )  # fmt: skip
    empty = "No keys. Make one with llmgwctl keys create NAME."
    session.out.show(found, lambda: session.out.table(COLUMNS, rows) if found else empty)


@keys.command()
@click.argument("name")
@click.option("--scope", help="Whose it is (path or id): its usage, budgets and limits. [nobody's]")
@click.option("--models", help="Names or aliases, with commas between. [every model]")
@click.option("--ips", help="Networks it may be used from, with commas between. [any]")
@click.option("--expires", type=Duration(), help='From now, as "90d". [never]')
@click.option("--tag", "tags", multiple=True, metavar="NAME=VALUE", help="For its usage rows.")
@click.option("--fallback", help=f"{FALLBACK} [inherit]")
@click.pass_obj
def create(
    session: Session, name: str, scope: str | None, models: str | None, ips: str | None,
    expires: float | None, tags: tuple[str, ...], fallback: str | None,
) -> None:  # fmt: skip
    """Make a key. It is shown this once; only its hash is kept."""
    lists = {"models": _words(models), "ips": _words(ips)}
    body: dict[str, Any] = {"name": name, "scope": scope, "expires": expires, **lists}
    if fallback is not None:
        body["fallback"] = fallback_of(fallback)
    given = {field: value for field, value in body.items() if value is not None}
    made = session.client.post("/keys", given | {"tags": tags_of(tags)})
    until = f"until {made['expires_at']}" if "expires_at" in made else "without end"
    note(f"Key {made['id']} of {name}, {until}. It is shown this once:")
    session.out.show(made, lambda: str(made["key"]))


@keys.command()
@click.argument("id_", metavar="ID")
@click.option("--grace", type=Duration(), default="1h", show_default=True,
              help="So long the secret before is good too; 0s: it ends now.")  # fmt: skip
@click.pass_obj
def rotate(session: Session, id_: str, grace: float) -> None:
    """Give a key a new secret, shown this once. After the grace only the new one is good."""
    made = session.client.post(f"/keys/{part(id_)}/rotate", {"grace": grace})
    note(f"Key {id_} has a new secret; the one before is good until {made['old_until']}:")
    session.out.show(made, lambda: str(made["key"]))


@keys.command()
@click.argument("id_", metavar="ID")
@click.option("--name", help="Another name.")
@click.option("--models", help='Names or aliases, with commas between; "any": every model.')
@click.option("--ips", help='Networks, with commas between; "any": from anywhere.')
@click.option("--expires", help='From now, as "90d"; "never".')
@click.option("--tag", "tags", multiple=True, metavar="NAME=VALUE", help="All tags anew.")
@click.option("--fallback", help=FALLBACK)
@click.pass_obj
def change(
    session: Session, id_: str, name: str | None, models: str | None, ips: str | None,
    expires: str | None, tags: tuple[str, ...], fallback: str | None,
) -> None:  # fmt: skip
    """Change what is named of a key; every router knows it within two seconds."""
    body: dict[str, Any] = {}
    if name is not None:
        body["name"] = name
    for field, text in (("models", models), ("ips", ips)):
        if text is not None:
            body[field] = None if text == "any" else _words(text)
    if expires is not None:
        body["expires"] = None if expires == "never" else expires
    if tags:
        body["tags"] = tags_of(tags)
    if fallback is not None:
        body["fallback"] = fallback_of(fallback)
    if not body:
        raise click.UsageError(
            "say what to change: --name, --models, --ips, --expires, --tag or --fallback"
        )
    done = session.client.post(f"/keys/{part(id_)}/change", body)
    session.out.show(done, lambda: f"Key {id_} is changed.")


@keys.command()
@click.argument("id_", metavar="ID")
@click.option("--to", "scope", help="Its new scope (path or id).")
@click.option("--out", is_flag=True, help="Out of all scopes.")
@click.pass_obj
def move(session: Session, id_: str, scope: str | None, out: bool) -> None:
    """Put a key into another scope. Requests that run are billed where they began."""
    if (scope is None) is not out:
        raise click.UsageError("say where: --to SCOPE or --out")
    body = {} if scope is None else {"scope": scope}
    done = session.client.post(f"/keys/{part(id_)}/move", body)
    session.out.show(done, lambda: f"Key {id_} is in {scope or 'no scope'} now.")


@keys.command()
@click.argument("id_", metavar="ID")
@click.pass_obj
def revoke(session: Session, id_: str) -> None:
    """Refuse a key everywhere within two seconds."""
    done = session.client.delete(f"/keys/{part(id_)}")
    session.out.show(done, lambda: f"Key {id_} is revoked.")


def _words(text: str | None) -> list[str] | None:
    return None if text is None else [word.strip() for word in text.split(",") if word.strip()]
