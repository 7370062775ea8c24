"""`users`: who may log in to the pages. Passwords come from the terminal or stdin, never a flag."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from controller.cli.client import part
from controller.cli.output import note

if TYPE_CHECKING:
    from controller.cli.session import Session

COLUMNS = ("USER", "ADMIN", "SCOPE", "SESSIONS", "SEEN", "CREATED", "BY")


@click.group(invoke_without_command=True)
@click.pass_context
def users(ctx: click.Context) -> None:
    """Who may log in to the pages; alone it lists them."""
    if ctx.invoked_subcommand is None:
        ctx.invoke(list_users)


@users.command("list")
@click.pass_obj
def list_users(session: Session) -> None:
    """Every user, and how many sessions are open."""
    found = session.client.pages("/users")
    rows = (
        (u["name"], "yes" if u["admin"] else "no", u.get("scope"), u["sessions"], u.get("seen_at"),
         u["created_at"], u["created_by"])
        for u in found
    )  # fmt: skip
    empty = "No users. Make one with llmgwctl users create NAME --admin."
    session.out.show(found, lambda: session.out.table(COLUMNS, rows) if found else empty)


@users.command()
@click.argument("name")
@click.option("--admin", is_flag=True, help="May change the fleet.")
@click.option("--scope", help="Whose keys and usage they see (path or id).")
@click.pass_obj
def create(session: Session, name: str, admin: bool, scope: str | None) -> None:
    """Let somebody log in."""
    body: dict[str, Any] = {"name": name, "admin": admin, "password": _new_password(name)}
    made = session.client.post("/users", body | ({} if scope is None else {"scope": scope}))
    session.out.show(made, lambda: f"User {name} can log in.")


@users.command()
@click.argument("name")
@click.pass_obj
def password(session: Session, name: str) -> None:
    """Give a user another password; every session of theirs ends."""
    body = {"password": _new_password(name)}
    done = session.client.post(f"/users/{part(name)}/password", body)
    session.out.show(done, lambda: f"User {name} has another password; all sessions ended.")


@users.command()
@click.argument("name")
@click.pass_obj
def remove(session: Session, name: str) -> None:
    """Let somebody log in no more; every session of theirs ends."""
    done = session.client.delete(f"/users/{part(name)}")
    session.out.show(done, lambda: f"User {name} is removed.")


@users.command()
@click.argument("name")
@click.pass_obj
def login(session: Session, name: str) -> None:
    """Get a session's token, which LLMGW_TOKEN may hold in place of an admin token."""
    body = {"name": name, "password": _password(f"Password of {name}")}
    done = session.client.post("/login", body)
    note(f"{name} is logged in until {done['expires_at']}. The token is shown this once:")
    session.out.show(done, lambda: str(done["token"]))


def _new_password(name: str) -> str:
    return _password(f"New password of {name}", twice=True)


def _password(prompt: str, *, twice: bool = False) -> str:
    """From the terminal without echo, else the first line of stdin."""
    if sys.stdin.isatty():
        given: str = click.prompt(prompt, hide_input=True, confirmation_prompt=twice, err=True)
        return given
    line = sys.stdin.readline().rstrip("\r\n")
    if not line:
        raise click.UsageError("no password: type it on a terminal, or send it on stdin")
    return line
