"""`usage`: what was used, by whom, for how much; single requests as a table, CSV or JSON."""

from __future__ import annotations

import csv
import tempfile
from itertools import chain
from typing import IO, TYPE_CHECKING, Any

import click
import orjson

from controller.cli.words import joined

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from controller.cli.session import Session

COLUMNS = (
    "NAME", "KEYS", "REQUESTS", "PROMPT", "CACHED", "COMPLETION", "COST", "ERRORS", "LAST",
    "BUDGET", "USED",
)  # fmt: skip
ROW_COLUMNS = (
    "AT", "KEY", "SCOPE", "MODEL", "ENDPOINT", "STATUS", "PROMPT", "COMPLETION", "COST", "MS",
    "FLAGS",
)  # fmt: skip
CSV_FIELDS = (
    "at", "id", "key", "org", "team", "user", "model_asked", "model", "replica", "endpoint",
    "status", "http_status", "error_code", "stream", "prompt_tokens", "cached_tokens",
    "completion_tokens", "reasoning_tokens", "cost_micros", "ttft_ms", "queue_ms", "total_ms",
    "attempts", "flags", "request_id", "upstream_id",
)  # fmt: skip
PAGE_ROWS = 5000


class Moment(click.ParamType):  # type: ignore[type-arg]
    """An option such as ``24h`` or ``2026-11-30T08:00Z``; its text in Python."""

    name = "moment"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Usage error with the right forms."""
        from controller.catalog.moments import moment

        try:
            moment(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)
        return str(value)


def _span(command: Any) -> Any:
    """The options of a span, the same for all reports."""
    for option in (
        click.option("--within", help="Of this scope (id or path) only."),
        click.option("--until", type=Moment(), help='So long ago, or a time. [now]'),
        click.option(
            "--since", type=Moment(), default="24h", show_default=True,
            help='So long ago, or a time such as 2026-11-30T08:00Z.',
        ),
    ):  # fmt: skip
        command = option(command)
    return command


@click.group(invoke_without_command=True)
@click.option(
    "--by", type=click.Choice(["org", "team", "user", "key", "model"]), default="team",
    show_default=True,
)  # fmt: skip
@_span
@click.option("--top", type=click.IntRange(1, 5000), help="The dearest so many. [all]")
@click.pass_context
def usage(
    ctx: click.Context, by: str, since: str, until: str | None, within: str | None, top: int | None
) -> None:
    """What was used by each org, team, user, key or model, dearest first."""
    if ctx.invoked_subcommand is not None:
        return
    session: Session = ctx.obj
    asked: dict[str, Any] = {"by": by, "since": since, "until": until, "within": within}
    if top is None:
        found = session.client.pages("/usage", **asked)
        found.sort(key=lambda row: (-row["cost_micros"], -row["requests"], row["id"]))
    else:
        found = session.client.get("/usage", top=top, **asked)
    empty = "Nothing was used."
    session.out.show(
        found, lambda: session.out.table(COLUMNS, map(_sum, found)) if found else empty
    )


def _sum(row: dict[str, Any]) -> tuple[object, ...]:
    fraction = row.get("fraction")
    budget = f"{money(row['budget_micros'])}/{row['budget_period']}" if "fraction" in row else None
    return (
        row["name"], row["keys"], row["requests"], row["prompt_tokens"], row["cached_tokens"],
        row["completion_tokens"], cost(row), row["errors"], row.get("last_at"), budget,
        None if fraction is None else f"{100 * fraction:.1f} %",
    )  # fmt: skip


def cost(row: dict[str, Any]) -> str | None:
    """What is known of a sum's cost, and how many requests are not in it."""
    unpriced = row.get("unpriced", 0)
    if unpriced == row["requests"]:
        return None
    return money(row["cost_micros"]) + (f" + {unpriced} unpriced" if unpriced else "")


def money(micros: float) -> str:
    """Micros in units of the currency, with all digits that they have and at least two."""
    whole, _, digits = f"{micros / 1e6:.12f}".partition(".")
    return f"{whole}.{digits.rstrip('0').ljust(2, '0')}"


@usage.command()
@_span
@click.option("--key", help="Of this key only.")
@click.option("--model", help="Served by this model only.")
@click.option("--oldest", is_flag=True, help="Oldest first.")
@click.option("--limit", type=click.IntRange(1), help="So many at most. [50 in a table, else all]")
@click.option("--csv", "as_csv", is_flag=True, help="Comma-separated values with a heading.")
@click.pass_obj
def rows(
    session: Session, since: str, until: str | None, within: str | None, key: str | None,
    model: str | None, limit: int | None, *, oldest: bool, as_csv: bool,
) -> None:  # fmt: skip
    """Single requests: a table, --csv, or --json. Exports come page by page."""
    asked: dict[str, Any] = {"since": since, "until": until, "within": within, "key": key}
    asked |= {"model": model, "order": "oldest" if oldest else "newest"}
    export = as_csv or session.out.json_mode
    pages = _pages(session, asked, limit if limit or export else 50)
    if export:
        with tempfile.TemporaryFile("w+", newline="") as whole:
            (_write_json if session.out.json_mode else _write_csv)(whole, pages)
            _give(session, whole)
    else:
        found = list(chain.from_iterable(pages))
        empty = "No requests."
        session.out.show(
            found, lambda: session.out.table(ROW_COLUMNS, map(_row, found)) if found else empty
        )


def _pages(session: Session, asked: dict[str, Any], limit: int | None) -> Iterator[list[Any]]:
    left = limit
    pages = session.client.each_page(
        "/usage/rows", limit=min(PAGE_ROWS, limit or PAGE_ROWS), **asked
    )
    for page in pages:
        yield page if left is None else page[:left]
        left = None if left is None else left - len(page)
        if left is not None and left <= 0:
            return


def _row(row: dict[str, Any]) -> tuple[object, ...]:
    scope = "/".join(row[kind] for kind in ("org", "team", "user") if kind in row)
    micros = row.get("cost_micros")
    return (
        row["at"], row.get("key"), scope, row.get("model", row.get("model_asked")),
        row["endpoint"], row["status"], row.get("prompt_tokens"), row.get("completion_tokens"),
        None if micros is None else money(micros), row.get("total_ms"),
        joined(row["flags"]) if row["flags"] else None,
    )  # fmt: skip


def _give(session: Session, whole: IO[str]) -> None:
    """Only what came to its end is written: no half answer (G01), and no whole one in memory."""
    whole.seek(0)
    session.out.emitted = True
    while piece := whole.read(1 << 20):
        session.out.write(piece)


def _write_csv(file: IO[str], pages: Iterable[list[Any]]) -> None:
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(CSV_FIELDS)
    for page in pages:
        writer.writerows([_cell(row.get(field)) for field in CSV_FIELDS] for row in page)


def _cell(value: object) -> object:
    """Unknown is empty; lists are words with spaces between."""
    if isinstance(value, bool):
        return str(value).lower()
    return " ".join(value) if isinstance(value, list) else value


def _write_json(file: IO[str], pages: Iterable[list[Any]]) -> None:
    opening = "["
    for page in pages:
        if page:
            file.write(opening + "\n" + ",\n".join(orjson.dumps(row).decode() for row in page))
            opening = ","
    file.write("[]\n" if opening == "[" else "\n]\n")
