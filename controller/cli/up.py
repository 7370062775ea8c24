"""`llmgwctl up`: the options of an installation on this machine; controller/up does the work."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from controller.cli.failures import Failure

if TYPE_CHECKING:
    from controller.cli.session import Session


@click.command()
@click.option(
    "--state-dir",
    type=click.Path(path_type=Path, file_okay=False),
    help="Data, logs and secrets [/var/lib/llmgw for root, else ~/.local/share/llmgw].",
)
@click.option(
    "--database-url",
    envvar="LLMGW_DATABASE_URL",
    help="A Postgres to use instead of an own one; with a password, rather by LLMGW_DATABASE_URL.",
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Where clients may connect.")
@click.option("--port", default=8080, show_default=True, help="Clients' port.")
@click.option("--admin-port", default=9090, show_default=True, help="Administration, on loopback.")
@click.option("--engine-ports", default="20000-20999", show_default=True, help="For engines.")
@click.option(
    "--catalog",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="A catalog (TOML) of your own models instead of the demo.",
)
@click.option("--no-demo", "demo", flag_value=False, default=True, type=bool, help="Serve no demo.")
@click.option("--check", is_flag=True, help="Once a model has answered, stop in order and exit.")
@click.option("--wait", "wait_s", default=1800.0, show_default=True, help="Seconds until ready.")
@click.option(
    "--answer",
    "answer_s",
    type=click.FloatRange(min=0, min_open=True),
    default=60.0,
    show_default=True,
    help="Seconds for a first token, then.",
)
@click.pass_obj
def up(
    session: Session,
    state_dir: Path | None,
    database_url: str | None,
    host: str,
    port: int,
    admin_port: int,
    engine_ports: str,
    catalog: Path | None,
    demo: bool,
    check: bool,
    wait_s: float,
    answer_s: float,
) -> None:
    """Run everything on this machine: Postgres, controller, agent and a model; Ctrl-C stops it.

    Meant for a first look, for development and for a single machine. Data stays in the state
    directory, and the next start goes on with it.
    """
    import trio

    from controller.up import CannotStart, Options
    from controller.up.folder import default_state_dir
    from controller.up.run import run

    status, problems = 1, list[str]()
    try:
        options = Options(
            state_dir=state_dir or default_state_dir(),
            database_url=database_url,
            host=host,
            port=port,
            admin_port=admin_port,
            engine_ports=engine_ports,
            catalog=catalog,
            demo=demo,
            check=check,
            wait_s=wait_s,
            answer_s=answer_s,
        )
        status = trio.run(run, options, lambda doc, text: session.out.show(doc, lambda: text))
    except* (CannotStart, Failure) as group:
        problems = [str(error) for error in _leaves(group)]
    if problems:
        raise Failure("\n".join(problems))
    raise SystemExit(status)


def _leaves(group: BaseExceptionGroup[Exception]) -> list[Exception]:
    found: list[Exception] = []
    for error in group.exceptions:
        found += _leaves(error) if isinstance(error, BaseExceptionGroup) else [error]
    return found
