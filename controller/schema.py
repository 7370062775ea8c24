"""Whether the database has this program's schema; upgrades it where that is allowed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog
import trio

from sql import queries
from sql.revisions import head, revisions

if TYPE_CHECKING:
    from pydantic import SecretStr

    from sql.pool import Pool

log = structlog.get_logger()


async def check(pool: Pool, migrate_url: SecretStr | None) -> str:
    """ "ok", or what is wrong and what to do. Upgrades first when a login for that is given.

    Raises sql.errors when the database is away.
    """
    found = await _revision(pool)
    if found == head():
        return "ok"
    if found is not None and found not in revisions():
        log.warning("the schema is newer than this program; going on", schema=found, program=head())
        return "ok"
    if migrate_url is None:
        have = "is empty" if found is None else f"has schema {found}"
        return f"the database {have}, this program needs {head()}: run llmgwctl db upgrade"
    return await _upgrade(migrate_url.get_secret_value())


async def _revision(pool: Pool) -> str | None:
    if not await pool.fetchval(queries("control")["has_schema"]):
        return None
    revision: str | None = await pool.fetchval(queries("control")["revision"])
    return revision


async def _upgrade(url: str) -> str:
    from sql import migrate  # alembic takes half a second to import, rarely needed

    try:
        revision = await trio.to_thread.run_sync(migrate.upgrade, url)
    except Exception as error:
        log.exception("the upgrade failed")
        return f"the schema could not be upgraded: {error}"
    log.info("schema upgraded", revision=revision)
    return "ok"
