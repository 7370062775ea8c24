"""Log lines: JSON for machines, coloured on a terminal. Ids (request, replica, term) are fields."""

from __future__ import annotations

import logging
import sys

import structlog


def configure(level: str, **ids: object) -> None:
    """Set up structlog for this process; ``ids`` are in every line."""
    terminal = sys.stderr.isatty()
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
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    structlog.contextvars.bind_contextvars(**ids)
