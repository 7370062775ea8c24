"""The form of a catalog: pools and models, with every rule that one object can break alone.

Profiles are in `profile.py`; rules between objects (names taken, missing fallbacks) in `checks.py`.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from typing import Any, Final, Self
from urllib.parse import urlsplit

import orjson
from pydantic import Field, field_validator, model_validator

from controller.catalog.profile import Profile, Strict
from controller.catalog.units import Seconds  # noqa: TC001 - pydantic needs it at run time

UNSEEN: Final = ("Cc", "Cf", "Cs")
"""Kinds of characters that show nothing, or turn the direction of a line."""
JOINER: Final = "\u200d"
"""Puts emoji together, and is seen by that."""
POOL_NAME: Final = r"[a-z0-9][a-z0-9._-]{0,62}"
SOURCES: Final = (
    "hf:org/repo[@revision][/file], s3:bucket/key-or-prefix[#sha256=HEX], file:/path or "
    "https://host/file[#sha256=HEX]"
)
MOST_MICROS: Final = 10**12
"""Per million tokens: one unit of the currency for each token."""
_HF: Final = re.compile(r"[\w.-]+/[\w.-]+(@[\w.-]+)?(/.+)?")
_S3: Final = re.compile(
    r"[A-Za-z0-9][A-Za-z0-9._-]{1,254}(/([^#/]+(/[^#/]+)*/?)?)?(#sha256=[0-9a-fA-F]{64})?"
)
_DOTS: Final = re.compile(r"(^|/)\.\.?(/|$)")


def served_name(value: str) -> str:
    """A name that clients may ask for: any script, but nothing that URLs or terminals trip over."""
    if not 1 <= len(value) <= 200:
        raise ValueError("a name has 1 to 200 characters")
    odd = (c for c in value if c.isspace() or (unicodedata.category(c) in UNSEEN and c != JOINER))
    if (character := next(odd, None)) is not None:
        raise ValueError(
            f"the name {value!r} has {character!r}: use no spaces, control or invisible characters"
        )
    if not unicodedata.is_normalized("NFC", value):
        raise ValueError(
            f"the name {value!r} has letters put together of parts, so that another name looks the "
            f"same: write {unicodedata.normalize('NFC', value)!r} (Unicode NFC)"
        )
    if any(part in ("", ".", "..") for part in value.split("/")):
        raise ValueError(f"the name {value!r} has an empty or dot part, which URLs drop")
    return value


def _once(names: list[str], what: str) -> None:
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"the {what} {twice} is there twice: drop one")


class Pool(Strict):
    """A label selector: a node belongs when each label has one of its values."""

    labels: dict[str, list[str]] = Field(
        default_factory=dict, description="label -> accepted value or values"
    )

    @field_validator("labels", mode="before")
    @classmethod
    def _lists(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {k: [v] if isinstance(v, str) else v for k, v in value.items()}

    @field_validator("labels")
    @classmethod
    def _possible(cls, value: dict[str, list[str]]) -> dict[str, list[str]]:
        for label, accepted in value.items():
            if not accepted:
                raise ValueError(f"{label} accepts no value, so no node could ever belong: drop it")
        return {label: sorted(set(accepted)) for label, accepted in value.items()}


class Prices(Strict):
    """What tokens cost, in micros of the currency per million tokens. Absent is unpriced, not 0."""

    prompt: int | None = Field(None, ge=0, le=MOST_MICROS)
    cached: int | None = Field(None, ge=0, le=MOST_MICROS, description="absent: as prompt")
    completion: int | None = Field(None, ge=0, le=MOST_MICROS)

    @field_validator("*", mode="before")
    @classmethod
    def _micros(cls, value: Any) -> Any:
        if isinstance(value, float) and 0 <= value < MOST_MICROS:
            raise ValueError(
                f"{value!r} is not in micros: {value:g} per million tokens is {round(value * 1e6)}"
            )
        whole = value is None or (isinstance(value, int) and not isinstance(value, bool))
        if not whole:
            raise ValueError(f"{value!r} is no whole number of micros per million tokens")
        return value

    @model_validator(mode="after")
    def _some(self) -> Self:
        if (self.prompt, self.cached, self.completion) == (None, None, None):
            raise ValueError("prices names none of prompt, cached, completion: drop it or name one")
        if self.cached is not None and self.prompt is None:
            raise ValueError("a price for cached tokens needs one for prompt tokens: add prompt")
        return self


class Model(Strict):
    """A model that clients may ask for, and how to run it."""

    name: str
    description: str | None = None
    aliases: list[str] = Field(default_factory=list)
    source: str = Field(description=SOURCES)
    min_replicas: int = Field(1, ge=0, le=10_000, description="0: on demand")
    max_replicas: int | None = Field(
        None, ge=1, le=10_000, description="absent: as min_replicas, at least 1"
    )
    idle_timeout: Seconds | None = Field(None, gt=0)
    priority: int = Field(
        0, ge=-1000, le=1000, description="of models that compete for cards the higher goes first"
    )
    fallbacks: list[str] = Field(
        default_factory=list,
        description="models that answer instead, in order; a request tries each at most once",
    )
    prices: Prices | None = Field(None, description="of its tokens; absent: unpriced")
    profiles: list[Profile] = Field(description="ways to run it, first choice first")

    @field_validator("name")
    @classmethod
    def _name(cls, value: str) -> str:
        return served_name(value)

    @field_validator("aliases")
    @classmethod
    def _aliases(cls, value: list[str]) -> list[str]:
        return sorted(served_name(alias) for alias in value)

    @field_validator("source")
    @classmethod
    def _source(cls, value: str) -> str:
        scheme, _, rest = value.partition(":")
        if scheme == "s3":
            rest = rest.removeprefix("//")
            value = f"s3:{rest}"  # both ways to write it are one source
        fits = (
            (scheme == "s3" and _S3.fullmatch(rest) is not None and not _DOTS.search(rest))
            or (scheme == "hf" and _HF.fullmatch(rest) is not None and ".." not in rest)
            or (scheme == "file" and urlsplit(value).path.startswith("/"))
            or (scheme in ("https", "http") and bool(urlsplit(value).hostname))
        )
        if not fits or "\0" in value:
            raise ValueError(f"{value!r} is none of {SOURCES}")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.max_replicas is not None and self.max_replicas < self.min_replicas:
            raise ValueError(
                f"min_replicas {self.min_replicas} is over max_replicas {self.max_replicas}: "
                "raise the latter or lower the former"
            )
        if not self.profiles:
            raise ValueError("it has no profiles: add one that says how to run it")
        _once([p.name for p in self.profiles], "profile")
        _once(self.aliases, "alias")
        _once(self.fallbacks, "fallback")
        if self.name in self.aliases:
            raise ValueError(f"its alias {self.name} is its own name: drop the alias")
        if self.name in self.fallbacks:
            raise ValueError("it is its own fallback: name another model")
        return self

    def document(self) -> dict[str, Any]:
        """The model as llmgw_core.model_put takes it."""
        return {
            "name": self.name,
            "description": self.description,
            "source": self.source,
            "min_replicas": self.min_replicas,
            "max_replicas": self.max_replicas or max(self.min_replicas, 1),
            "idle_timeout_s": self.idle_timeout,
            "priority": self.priority,
            "aliases": self.aliases,
            "fallbacks": self.fallbacks,
            "prices": self.prices.model_dump() if self.prices is not None else None,
            "profiles": [profile.document(self.source) for profile in self.profiles],
        }


class Catalog(Strict):
    """What one file or one call declares."""

    pools: dict[str, Pool] = Field(default_factory=dict)
    models: list[Model] = Field(default_factory=list)

    @property
    def digest(self) -> str:
        """Short SHA-256 of what is written: not of its order, comments or form (TOML or JSON).

        Fields that are not written do not count, so that versions of llmgw which know more of them
        agree on a file.
        """
        models = sorted(self.models, key=lambda model: model.name)
        written = {
            "pools": {
                name: pool.model_dump(exclude_unset=True) for name, pool in self.pools.items()
            },
            "models": [model.model_dump(exclude_unset=True) for model in models],
        }
        text = orjson.dumps(written, option=orjson.OPT_SORT_KEYS)
        return hashlib.sha256(text).hexdigest()[:16]

    @field_validator("pools")
    @classmethod
    def _pool_names(cls, value: dict[str, Pool]) -> dict[str, Pool]:
        for name in value:
            if not re.fullmatch(POOL_NAME, name):
                raise ValueError(
                    f"{name!r} is no pool name: up to 63 of a-z 0-9 . _ -, a letter or digit first"
                )
        return value
