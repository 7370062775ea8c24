"""The form of a profile: one way to run a model, with every rule that it can break alone."""

from __future__ import annotations

import hashlib
import json
import re
from typing import Annotated, Any, Final, Literal, Self, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from controller.catalog import arguments
from controller.catalog.faults import nearest
from controller.catalog.units import Mebibytes, Seconds  # noqa: TC001 - pydantic needs it at run time

ENGINES: Final = ("llamacpp", "vllm", "sglang", "command")
ARCHITECTURES: Final = {
    "x86_64": "x86_64",
    "amd64": "x86_64",
    "x86-64": "x86_64",
    "aarch64": "aarch64",
    "arm64": "aarch64",
}
GANG_FIELDS: Final = ("master_port", "hcas")
"""Known to shards of a replica on several nodes only."""
COMMAND_FIELDS: Final = (
    *("port", "host", "model", "gpus", "source_path", "rank", "nodes", "head"),
    *GANG_FIELDS,
)
MOST_GPUS: Final = 64
"""Cards of one node: what an agent may report."""
VERSION: Final = r"^[0-9]+(\.[0-9]+){0,3}$"
ENGINE_VERSION: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9.+!_-]{0,99}")
"""As packages are numbered; what agents would put into a requirement and a folder's name."""
PROFILE_NAME: Final = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$"
_FIELD: Final = re.compile(r"\{([a-z_]+)\}")
_MATTERS: Final = (
    "source",
    "engine",
    "engine_version",
    "args",
    "env",
    "command",
    "gpus",
    "gpu_class",
    "gpu_memory_mib",
    "share",
    "cpus",
    "memory_mib",
    "shards",
)


_MATTERS_SET: Final = ("health_path", "stop_grace_s")
"""These too, where they are set: so fingerprints of old stay where they are not."""


class Strict(BaseModel):
    """A form that refuses fields it does not know, and true where a number belongs."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @field_validator("*", mode="before")
    @classmethod
    def _numbers(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, bool) and info.field_name is not None:
            declared = cls.model_fields[info.field_name].annotation
            kinds = {declared, *get_args(declared)}
            if kinds & {int, float} and bool not in kinds:
                raise ValueError(f"must be a number, not {str(value).lower()}")
        return value


def _word(value: object) -> object:
    # Engine options are words; in TOML people write numbers without quotes.
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return str(value) if number else value


Word = Annotated[str, BeforeValidator(_word), Field(max_length=32_000)]


class Profile(Strict):
    """One way to run a model. The first profile of a model is its first choice."""

    name: str = Field(pattern=PROFILE_NAME)
    engine: str = Field(description=f"one of {', '.join(ENGINES)}")
    engine_version: str | None = None
    args: list[Word] = Field(default_factory=list, description="added to the engine's command line")
    env: dict[str, Word] = Field(default_factory=dict)
    command: list[Word] | None = Field(
        None,
        description="of engine command: argv with {port} {host} {model} {gpus} {source_path}; "
        "for several nodes also {rank} {nodes} {head} {master_port} {hcas}",
    )
    health_path: str | None = Field(None, pattern="^/", description="answers 200 when ready")
    pool: str | None = Field(None, description="pool whose nodes may run it; absent: any node")
    gpu_class: str | None = Field(None, min_length=1)
    gpus: int = Field(0, ge=0, le=MOST_GPUS, description="cards per shard")
    gpu_memory: Mebibytes | None = Field(None, description="per card; with share, what is claimed")
    share: bool = Field(
        False, description="several replicas may share a card; vllm is told its part of it"
    )
    cpus: float | None = Field(None, gt=0, le=10_000)
    memory: Mebibytes | None = Field(None, description="host memory")
    arch: str | None = None
    cpu_flags: list[str] = Field(default_factory=list)
    shards: int = Field(1, ge=1, le=1024, description="nodes per replica")
    fabric: Literal["nvlink-domain", "fabric", "any"] = Field(
        "fabric",
        description="between the nodes of one replica: one NVLink domain; that or one InfiniBand "
        "or RoCE fabric; or these where there are any, else the plain network",
    )
    driver_min: str | None = Field(None, pattern=VERSION, description="oldest GPU driver")
    cuda_min: str | None = Field(None, pattern=VERSION, description="oldest CUDA of the driver")
    exclude_nodes: list[str] = Field(default_factory=list, description="nodes that may not run it")
    spread: Literal["prefer", "node"] = Field(
        "prefer", description="node: never two replicas of the model on one node"
    )
    start_deadline: Seconds | None = Field(None, gt=0)
    stop_grace: Seconds | None = None

    @field_validator("engine")
    @classmethod
    def _known_engine(cls, value: str) -> str:
        if value not in ENGINES:
            raise ValueError(f"there is no engine {value!r}: {nearest(value, ENGINES, 'engine')}")
        return value

    @field_validator("engine_version")
    @classmethod
    def _version(cls, value: str | None) -> str | None:
        if value is not None and not ENGINE_VERSION.fullmatch(value):
            raise ValueError(
                f"{value!r} is no version of an engine: write it as 0.32.0 or 0.32.0+cpu"
            )
        return value

    @field_validator("arch")
    @classmethod
    def _known_arch(cls, value: str | None) -> str | None:
        if value is not None and value not in ARCHITECTURES:
            raise ValueError(f"no node has the architecture {value!r}: write x86_64 or aarch64")
        return ARCHITECTURES[value] if value is not None else None

    @field_validator("env")
    @classmethod
    def _variables(cls, value: dict[str, str]) -> dict[str, str]:
        for name, text in value.items():
            if not name or "=" in name or "\0" in name + text:
                raise ValueError(f"{name!r} cannot be an environment variable: no = and no NUL")
        return value

    @field_validator("args", "command")
    @classmethod
    def _words(cls, value: list[str] | None) -> list[str] | None:
        if any("\0" in word for word in value or []):
            raise ValueError("a NUL character cannot be passed to a program")
        return value

    @model_validator(mode="after")
    def _command(self) -> Self:
        if self.engine == "command" and not self.command:
            raise ValueError('engine command needs a command: ["prog", "--port", "{port}"]')
        if self.engine != "command" and self.command is not None:
            raise ValueError(
                f"command belongs to engine command: the options of {self.engine} go into args"
            )
        for field in (name for word in self.command or [] for name in _FIELD.findall(word)):
            if field not in COMMAND_FIELDS:
                known = ", ".join(COMMAND_FIELDS)
                raise ValueError(f"the command has {{{field}}}, which is none of {known}")
            if field in GANG_FIELDS and self.shards == 1:
                raise ValueError(
                    f"the command has {{{field}}}, which a replica on one node does not have: "
                    "set shards to the number of nodes"
                )
        return self

    @model_validator(mode="after")
    def _nodes(self) -> Self:
        if self.shards > 1 and self.engine == "llamacpp":
            raise ValueError(
                f"llamacpp runs on one node and shards is {self.shards}: set shards to 1, or use "
                "vllm, sglang or command"
            )
        if self.shards > 1 and self.fabric == "nvlink-domain" and self.gpus == 0:
            raise ValueError(
                "fabric nvlink-domain connects cards and the profile wants none: set gpus, or "
                "fabric to fabric or any"
            )
        return self

    @model_validator(mode="after")
    def _cards(self) -> Self:
        if self.gpus == 0 and (self.gpu_class or self.gpu_memory or self.share):
            raise ValueError(
                "it describes cards (gpu_class, gpu_memory or share) and wants none: set gpus"
            )
        if self.share and self.gpu_memory is None:
            raise ValueError("share needs gpu_memory: how much of the card a replica claims")
        if self.share and (why := arguments.greedy(self.engine, self.args)) is not None:
            raise ValueError(why)
        return self

    @model_validator(mode="after")
    def _arguments(self) -> Self:
        if (why := arguments.fault(self.engine, self.args, self.gpus, self.shards)) is not None:
            raise ValueError(why)
        return self

    def document(self, source: str) -> dict[str, Any]:
        """The profile as a row of llmgw_core.profile, without model and position."""
        found = self.model_dump()
        found["gpu_memory_mib"] = found.pop("gpu_memory")
        found["memory_mib"] = found.pop("memory")
        found["start_deadline_s"] = found.pop("start_deadline")
        found["stop_grace_s"] = found.pop("stop_grace")
        return found | {"fingerprint": fingerprint(found | {"source": source})}


def fingerprint(facts: dict[str, Any]) -> str:
    """Short SHA-256 of how an engine is started, judged and stopped.

    Not of where it may be (pool, architecture, excluded nodes, ...), nor of its name, nor of the
    deadline of a start that is over.
    """
    chosen = {name: facts.get(name) for name in _MATTERS}
    chosen |= {name: facts[name] for name in _MATTERS_SET if facts.get(name) is not None}
    if facts.get("shards", 1) > 1:  # one node needs no fabric, and fingerprints of old stay
        chosen["fabric"] = facts.get("fabric")
    return hashlib.sha256(json.dumps(chosen, sort_keys=True).encode()).hexdigest()[:16]
