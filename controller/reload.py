"""SIGHUP: the configuration is read again. What can change while we run does; the rest is named."""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog
import trio

from controller.config import BadConfig, Settings, lifeline
from controller.log import configure

if TYPE_CHECKING:
    from collections.abc import Callable

RELOADED = ("catalog", "log_level", "migrate_url")
"""What a running process takes over. The rest was used to open things."""

log = structlog.get_logger(__name__)


def reloaded(now: Settings, read: Settings) -> tuple[Settings, list[str]]:
    """What is in force after a reload, and the names of changed settings that need a restart."""
    changed = {
        name: getattr(read, name)
        for name in Settings.model_fields
        if getattr(now, name) != getattr(read, name)
    }
    taken = {name: value for name, value in changed.items() if name in RELOADED}
    return now.model_copy(update=taken), [name for name in changed if name not in RELOADED]


async def reread(now: Settings, read: Callable[[], Settings]) -> Settings:
    """What is in force once the configuration was read again; a bad one changes nothing.

    Of several processes the supervisor tells what came of it: all read the same.
    """
    alone = lifeline() is None
    try:
        found = await trio.to_thread.run_sync(read)
    except BadConfig as error:
        if alone:
            log.warning("the configuration was not reloaded", error=str(error))
        return now
    taken, later = reloaded(now, found)
    configure(taken.log_level)
    if later and alone:
        log.warning("settings changed that need a restart", settings=later)
    return taken
