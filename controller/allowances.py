"""Settings of how routers reserve for budgets and limits."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class Allowances(BaseModel):
    """What is reserved of a key's budgets and limits before a request is sent."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    answer_tokens: int = Field(
        2048,
        ge=1,
        le=1_000_000,
        description="for an answer whose request says no max_tokens; a longer one is charged whole",
    )
    unavailable: Literal[503, 429] = Field(
        503,
        description="status when Postgres is away and what is held of a budget or limit has ended",
    )
