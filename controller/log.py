"""Log lines: JSON for machines, coloured on a terminal. Ids (request, replica, term) are fields."""

from __future__ import annotations

import logging
import sys

import structlog

from sql.plain_logs import write_line


class Stderr:
    """Writes each event to stderr."""

    def msg(self, message: str) -> None:
        """One event, one line."""
        write_line(sys.stderr, message)

    debug = info = warning = error = critical = msg


def configure(level: str, **ids: object) -> None:
    """Set up structlog for this process; ``ids`` are in every line."""
    terminal, stderr = sys.stderr.isatty(), Stderr()
    # Tracebacks without local variables, which may hold keys.
    renderer: structlog.typing.Processor = structlog.processors.JSONRenderer()
    if terminal:
        plain = structlog.dev.plain_traceback
        renderer = structlog.dev.ConsoleRenderer(exception_formatter=plain)
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            *([] if terminal else [structlog.processors.format_exc_info]),
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=lambda *_: stderr,
    )
    structlog.contextvars.bind_contextvars(**ids)
