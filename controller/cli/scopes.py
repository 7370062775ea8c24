"""`scopes`: organisations, teams and users; by path (acme/ml/alice) or id."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from controller.cli.client import part
from controller.cli.words import fallback as fallback_text
from controller.cli.words import fallback_of, pairs, tags_of
from controller.cli.words import weight as weight_text

if TYPE_CHECKING:
    from controller.cli.session import Session

COLUMNS = ("SCOPE", "KIND", "ID", "KEYS", "TAGS", "FALLBACK", "WEIGHT", "CREATED", "BY")
KINDS = click.Choice(["org", "team", "user"])
FALLBACK = (
    "Why another model may answer: some of unavailable,timeout,error,refusal; none; "
    "inherit: as what is above says, or the settings."
)

WEIGHT = (
    "Turns of its requests while those of others wait too: with 2 twice as many as with 1. "
    "Of scopes at the top, 0.01 to 100."
)


@click.group(invoke_without_command=True)
@click.pass_context
def scopes(ctx: click.Context) -> None:
    """Organisations, teams and users; alone it lists them."""
    if ctx.invoked_subcommand is None:
        ctx.invoke(list_scopes)


@scopes.command("list")
@click.option("--kind", type=KINDS, help="Of this kind only.")
@click.option("--below", help="This one (path or id) and all below it.")
@click.option("--deleted", is_flag=True, help="Deleted ones too.")
@click.pass_obj
def list_scopes(
    session: Session, kind: str | None = None, below: str | None = None, deleted: bool = False
) -> None:
    """Every scope, with the keys directly in it."""
    found = session.client.pages("/scopes", kind=kind, below=below, deleted=deleted)
    rows = (
        (s["path"], s["kind"] + (" (deleted)" if "deleted_at" in s else ""), s["id"], s["keys"],
         pairs(s["tags"]), fallback_text(s), weight_text(s), s["created_at"], s["created_by"])
        for s in sorted(found, key=lambda s: s["path"])
    )  # fmt: skip
    empty = "No scopes. Make one with llmgwctl scopes create org NAME."
    session.out.show(found, lambda: session.out.table(COLUMNS, rows) if found else empty)


@scopes.command()
@click.argument("kind", type=KINDS)
@click.argument("path")
@click.option("--tag", "tags", multiple=True, metavar="NAME=VALUE", help="May be repeated.")
@click.option("--fallback", help=f"{FALLBACK} [inherit]")
@click.pass_obj
def create(
    session: Session, kind: str, path: str, tags: tuple[str, ...], fallback: str | None
) -> None:
    """Make an org, team or user: "team acme/ml" is ml in acme, which must be there."""
    parent, _, name = path.rpartition("/")
    body: dict[str, Any] = {"kind": kind, "name": name, "tags": tags_of(tags)}
    if fallback is not None:
        body["fallback"] = fallback_of(fallback)
    made = session.client.post("/scopes", body | ({"parent": parent} if parent else {}))
    session.out.show(made, lambda: f"{made['kind']} {made['path']} is made: scope {made['id']}.")


@scopes.command()
@click.argument("scope")
@click.option("--fallback", help=FALLBACK)
@click.option("--weight", type=float, help=WEIGHT)
@click.pass_obj
def change(session: Session, scope: str, fallback: str | None, weight: float | None) -> None:
    """Change what a scope says for all below it; every router knows it within two seconds."""
    body: dict[str, Any] = {} if weight is None else {"weight": weight}
    if fallback is not None:
        body["fallback"] = fallback_of(fallback)
    if not body:
        raise click.UsageError("say what to change: --fallback or --weight")
    done = session.client.post(f"/scopes/{part(scope)}/change", body)
    session.out.show(done, lambda: f"Scope {done['path']} is changed.")


@scopes.command()
@click.argument("scope")
@click.option("--to", "parent", help="Its new parent (path or id).")
@click.option("--top", is_flag=True, help="To the top level.")
@click.pass_obj
def move(session: Session, scope: str, parent: str | None, top: bool) -> None:
    """Put a scope with all below it elsewhere. Requests that run are billed where they began."""
    if (parent is None) is not top:
        raise click.UsageError("say where: --to PARENT or --top")
    body = {} if parent is None else {"parent": parent}
    done = session.client.post(f"/scopes/{part(scope)}/move", body)
    session.out.show(done, lambda: f"Scope {scope} is {done['path']} now.")


@scopes.command()
@click.argument("scope")
@click.argument("name")
@click.pass_obj
def rename(session: Session, scope: str, name: str) -> None:
    """Give a scope another name, in its history too."""
    done = session.client.post(f"/scopes/{part(scope)}/rename", {"name": name})
    session.out.show(done, lambda: f"Scope {scope} is {done['path']} now.")


@scopes.command()
@click.argument("scope")
@click.pass_obj
def delete(session: Session, scope: str) -> None:
    """Delete a scope with all below it, and revoke their keys. History keeps the names."""
    done = session.client.delete(f"/scopes/{part(scope)}")
    session.out.show(
        done,
        lambda: f"Scope {scope} is deleted: {done['scopes']} in all, {done['keys']} keys revoked.",
    )
