"""The commands of `llmgwctl`, its global options, and how it ends: 0, 1, 2, 124 or 130."""

from __future__ import annotations

import importlib
import io
import sys
from contextlib import nullcontext, redirect_stdout
from typing import Final, NoReturn

import click

from controller import __version__
from controller.cli import failures
from controller.cli.failures import Failure
from controller.cli.output import Output, leave_stdout, note
from controller.cli.session import DEFAULT_SERVER, Session

COMMANDS: Final = {
    "status": "fleet:status",
    "controllers": "fleet:controllers",
    "nodes": "fleet:nodes",
    "node": "node:node",
    "gpu": "devices:gpu",
    "doctor": "devices:doctor",
    "events": "devices:events",
    "cordon": "node:cordon",
    "uncordon": "node:uncordon",
    "drain": "node:drain",
    "models": "models:models",
    "model": "models:model",
    "scale": "models:scale",
    "apply": "models:apply",
    "capacity": "capacity:capacity",
    "replicas": "placement:replicas",
    "explain-placement": "placement:explain_placement",
    "what-if": "what_if:what_if",
    "replace": "replace:replace",
    "fit": "fit:fit",
    "decisions": "placement:decisions",
    "weights": "weights:weights",
    "fabrics": "fabrics:fabrics",
    "topology": "fabrics:topology",
    "nvlink": "devices:nvlink",
    "logs": "logs:logs",
    "scopes": "scopes:scopes",
    "keys": "keys:keys",
    "budgets": "budgets:budgets",
    "limits": "limits:limits",
    "users": "users:users",
    "audit": "audit:audit",
    "usage": "usage:usage",
    "engine-check": "engine_check:engine_check",
    "db": "database:db",
    "up": "up:up",
}
"""Command -> file and object; imported when used, so that each command starts fast."""
_GLOBAL_FLAGS: Final = frozenset({"--json"})
_GLOBAL_VALUES: Final = frozenset({"--server", "--token", "--request-timeout"})


class Commands(click.Group):
    """Imports a command's file when the command is named."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """In the order of the table."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command, or None when there is none of that name."""
        if cmd_name not in COMMANDS:
            return None
        module, _, name = COMMANDS[cmd_name].partition(":")
        found: click.Command = getattr(importlib.import_module(f"controller.cli.{module}"), name)
        return found


@click.group(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Global options may stand anywhere. Exit codes: 0 done, 1 refused or failed, 2 usage, "
    "124 timeout, 130 interrupt.",
)
@click.option(
    "--server",
    envvar="LLMGW_SERVER",
    default=DEFAULT_SERVER,
    show_default=True,
    help="Admin port of a controller [LLMGW_SERVER].",
)
@click.option("--token", envvar="LLMGW_TOKEN", help="Admin token, rather by LLMGW_TOKEN.")
@click.option("--json", "json_mode", is_flag=True, help="Exactly one JSON document on stdout.")
@click.option(
    "--request-timeout",
    type=click.FloatRange(min=0.1),
    default=30.0,
    show_default=True,
    help="Seconds for one request.",
)
@click.version_option(__version__, message="llmgwctl %(version)s")
@click.pass_obj
def llmgwctl(
    session: Session, server: str, token: str | None, json_mode: bool, request_timeout: float
) -> None:
    """Show and change an llmgw cluster."""
    del json_mode  # read before click, so that its own errors are JSON too
    session.server, session.token, session.timeout_s = server, token, request_timeout


def hoisted(arguments: list[str]) -> list[str]:
    """Global options moved to the front, wherever they stood; all after ``--`` stays."""
    front: list[str] = []
    rest: list[str] = []
    words = iter(arguments)
    for word in words:
        if word == "--":
            rest += [word, *words]
        elif word in _GLOBAL_FLAGS or ("=" in word and word.partition("=")[0] in _GLOBAL_VALUES):
            front.append(word)
        elif word in _GLOBAL_VALUES:
            front += [word, *([value] if (value := next(words, None)) is not None else [])]
        else:
            rest.append(word)
    return front + rest


def run(arguments: list[str]) -> int:
    """One command; answers the exit code and never raises."""
    arguments = hoisted(arguments)
    head = arguments[: arguments.index("--")] if "--" in arguments else arguments
    out = Output(json_mode="--json" in head)
    try:
        return _invoke(arguments, out)
    except click.UsageError as error:
        return _failed(out, _usage(error), failures.USAGE)
    except (click.Abort, KeyboardInterrupt):
        return _failed(out, "interrupted", failures.INTERRUPTED)
    except click.ClickException as error:
        return _failed(out, error.format_message(), error.exit_code)
    except Failure as error:
        return _failed(out, str(error), error.code)
    except BrokenPipeError:
        leave_stdout()
        return failures.FAILED
    except SystemExit as error:  # from `up`, which ends in its own words
        return error.code if isinstance(error.code, int) else int(error.code is not None)


def _invoke(arguments: list[str], out: Output) -> int:
    # In JSON mode nothing but the document may reach stdout, click's help included.
    aside = io.StringIO()
    with redirect_stdout(aside) if out.json_mode else nullcontext():
        done = llmgwctl.main(
            arguments, prog_name="llmgwctl", standalone_mode=False, obj=Session(out)
        )
    if aside.getvalue() and not out.emitted:
        out.show({"text": aside.getvalue()}, str)
    elif aside.getvalue():
        note(aside.getvalue())
    return done if isinstance(done, int) else 0


def _usage(error: click.UsageError) -> str:
    said = error.format_message()
    path = error.ctx.command_path if error.ctx is not None else "llmgwctl"
    return said if "\n" in said else f"{said} (see {path} --help)"


def _failed(out: Output, message: str, code: int) -> int:
    note(f"llmgwctl: {message}")
    if out.json_mode and not out.emitted:
        try:
            out.show({"error": message}, str)
        except (Failure, BrokenPipeError):
            leave_stdout()
    elif "stdout" in message:
        leave_stdout()
    return code


def main() -> NoReturn:
    """The console script."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without our characters is no failure
    raise SystemExit(run(sys.argv[1:]))
