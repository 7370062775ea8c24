"""What every command is given: where to write and whom to ask."""

from __future__ import annotations

import getpass
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from controller.cli.client import Client, server_url

if TYPE_CHECKING:
    from controller.cli.output import Output

DEFAULT_SERVER = "127.0.0.1:9090"


@dataclass(slots=True)
class Session:
    """The global options of one run."""

    out: Output
    server: str = DEFAULT_SERVER
    token: str | None = None
    timeout_s: float = 30.0

    @property
    def client(self) -> Client:
        """The admin API; a usage error when --server names none."""
        try:
            server = server_url(self.server)
        except ValueError as error:
            raise click.BadParameter(str(error), param_hint="--server") from None
        return Client(server, self.token, _user(), self.timeout_s)

    def no_json(self, why: str) -> None:
        """A usage error for commands whose output is no document."""
        if self.out.json_mode:
            raise click.UsageError(f"--json prints one document, {why}")


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a user without a name, as in some containers
        return "unnamed"
