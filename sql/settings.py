"""How to reach Postgres. Included by controller/config.py and agent/config.py."""

from __future__ import annotations

import os

from pydantic import BaseModel, ConfigDict, Field, SecretStr

URL_VARIABLE = "LLMGW_DATABASE_URL"


class DatabaseSettings(BaseModel):
    """One connection target and its bounds."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    url: SecretStr = Field(
        description="postgresql://user:password@host:port/database; TLS by ?sslmode=verify-full"
    )
    pool_size: int = Field(4, ge=1, le=50, description="connections; one more is used for LISTEN")
    command_timeout_s: float = Field(
        4.0,
        gt=0,
        description="no statement may take longer: the lease lasts 15 s and is renewed every 5 s",
    )
    connect_timeout_s: float = Field(4.0, gt=0, description="to open a connection")
    prepared_statements: bool = Field(
        True, description="false behind a transaction-mode pooler that does not know them"
    )


def url_from_environment() -> str | None:
    """The URL in LLMGW_DATABASE_URL, or None. Never from argv, which everybody can read."""
    return os.environ.get(URL_VARIABLE)
