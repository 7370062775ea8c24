"""All settings of the agent: `agent.toml`, then LLMGW_* variables, then flags; later ones win.

Read once at start. The only module of the agent that looks at the environment. Secrets come from
files or the environment, never from flags, which every user of the machine can read.
"""

from __future__ import annotations

import difflib
import os
import re
import socket
import tomllib
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    field_validator,
    model_validator,
)

from agent.probes.inventory import ProbeConfig
from agent.provision_settings import ProvisionSettings
from agent.units import size_bytes
from sql.settings import DatabaseSettings, url_from_environment

SYSTEM_FILE = Path("/etc/llmgw/agent.toml")
SYSTEM_STATE = Path("/var/lib/llmgw-agent")
_HIDDEN = re.compile(r"LLMGW_|PG[A-Z]|NOTIFY_SOCKET$|INVOCATION_ID$|JOURNAL_STREAM$")
_DOWNLOADS = re.compile(r"AWS_(ACCESS_KEY_ID|SECRET_ACCESS_KEY|SESSION_TOKEN)$")


class BadConfig(Exception):
    """A setting is wrong; the message names it, says where it came from and what is right."""


def default_state_dir() -> Path:
    """/var/lib/llmgw-agent for root, else below the user's XDG state directory."""
    if os.geteuid() == 0:
        return SYSTEM_STATE
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state"
    return Path(base) / "llmgw-agent"


class AgentSettings(BaseModel):
    """What one agent is told. Everything else it finds out or gets from the database."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    database: DatabaseSettings = Field(
        description="the login of role llmgw_agent; its rights are the functions in schema agent"
    )
    node: str = Field(
        default_factory=socket.gethostname,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$",
        description="the node's name everywhere; the host's name unless several share it",
    )
    state_dir: Path = Field(
        default_factory=default_state_dir,
        description="secret, assignments, logs; on a local disk, one folder per agent",
    )
    secret_file: Path | None = Field(
        None, description="the node's secret; state_dir/node_secret, made at the first start"
    )
    enrolment_token_file: Path | None = Field(
        None, description="from `llmgwctl node enroll`; needed until the node is known"
    )
    enrolment_token: SecretStr | None = Field(
        None, description="the same by LLMGW_ENROLMENT_TOKEN, for machines without files"
    )
    mgmt_addr: str | None = Field(
        None, description="where routers reach engines; the address towards the database"
    )
    labels: dict[str, str] = Field(
        default_factory=dict,
        description="what pools select nodes by; zone and rack also spread replicas",
    )
    ports: tuple[int, int] = Field(
        (20000, 20999), description="first and last port that engines may be given, as 20000-20999"
    )
    weights_dir: Path | None = Field(
        None, description="where downloads lie; state_dir/weights; may be shared between agents"
    )
    weights_reserve: int = Field(
        1 << 30, ge=0, description="bytes that downloads leave free on that disk, as 1GiB"
    )
    hf_token_file: Path | None = Field(
        None, description="token of the Hugging Face hub for `hf:` sources; instead of HF_TOKEN"
    )
    on_exit: Literal["keep", "stop"] = Field(
        "keep",
        description="what becomes of engines when the agent ends: an upgrade of the agent should "
        "not cost a reload of every model, a demo should leave nothing behind",
    )
    engine_paths: dict[str, str] = Field(
        default_factory=dict,
        description="programs by engine or engine@version, where PATH has none or the wrong one",
    )
    engine_venvs: list[str] = Field(
        default_factory=list, description="virtual environments to look for engines in"
    )
    engine_log_size: int = Field(
        16 << 20, ge=1 << 16, description="bytes of log kept per shard, twice (the current and .1)"
    )
    log_level: Literal["debug", "info", "warning"] = Field("info", description="of the agent's log")

    scan_dirs: list[str] = Field(
        default_factory=list,
        description="directories to look for weights in besides weights_dir, as a cache of the "
        "Hugging Face hub or a filer's folder; they are read only",
    )
    fabrics: dict[str, str] = Field(
        default_factory=dict,
        description='names of fabrics by ports, as "mlx5_*" = "rail-net" or "mlx5_0/1" = "storage"',
    )

    provision: ProvisionSettings = Field(
        default_factory=partial(ProvisionSettings.model_validate, {}),
        description="engines that the agent may install; LLMGW_PROVISION=vllm,llamacpp names them",
    )

    @field_validator("weights_reserve", "engine_log_size", mode="before")
    @classmethod
    def _size(cls, value: Any) -> Any:
        return size_bytes(value) if isinstance(value, str) else value

    @field_validator("ports", mode="before")
    @classmethod
    def _range(cls, value: Any) -> Any:
        return tuple(value.split("-")) if isinstance(value, str) else value

    @field_validator("labels", "engine_paths", "fabrics", mode="before")
    @classmethod
    def _pairs(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        pairs = [item.partition("=") for item in value.split(",") if item.strip()]
        return {name.strip(): rest.strip() for name, _, rest in pairs}

    @field_validator("engine_venvs", "scan_dirs", mode="before")
    @classmethod
    def _list(cls, value: Any) -> Any:
        return value.split(":") if isinstance(value, str) else value

    @model_validator(mode="after")
    def _ports_in_order(self) -> AgentSettings:
        first, last = self.ports
        if not 0 < first <= last < 65536:
            raise ValueError(f"ports {first}-{last} is not a range of TCP ports")
        return self

    @property
    def secret_path(self) -> Path:
        """Where the node's secret lies."""
        return self.secret_file or self.state_dir / "node_secret"

    @property
    def weights_path(self) -> Path:
        """Where downloads lie."""
        return self.weights_dir or self.state_dir / "weights"

    @property
    def engines_path(self) -> Path:
        """Where the environments lie that the agent builds."""
        return self.state_dir.resolve() / "engines"

    @property
    def scan_paths(self) -> list[str]:
        """Directories that are looked through for weights."""
        return [str(self.weights_path.resolve()), *self.scan_dirs]

    def token(self) -> str | None:
        """The enrolment token, or None; raises BadConfig when its file cannot be read."""
        if self.enrolment_token is not None:
            return self.enrolment_token.get_secret_value().strip() or None
        if self.enrolment_token_file is None:
            return None
        try:
            return self.enrolment_token_file.read_text().strip() or None
        except FileNotFoundError:
            return None  # removed after the first start, which is good
        except OSError as error:
            raise BadConfig(f"enrolment_token_file cannot be read: {error}") from error

    def probe_config(self) -> ProbeConfig:
        """What the probes need of it."""
        homes = {str(Path(p).parent.parent) for p in self.engine_paths.values()}
        return ProbeConfig(
            mgmt_addr=self.mgmt_addr,
            labels=self.labels,
            ports=self.ports,
            weights=self.scan_paths,
            engine_venvs=[*self.engine_venvs, *sorted(homes)],
            fabrics=self.fabrics,
            environments=str(self.engines_path),
            provisions=self.provision.engines,
        )


def plain_probe_config() -> ProbeConfig:
    """For a machine without settings: what `probe` and `doctor` look at before an agent runs."""
    return ProbeConfig(weights=[str(default_state_dir() / "weights")])


def engine_environment() -> dict[str, str]:
    """The agent's environment without its secrets, which engines and their logs must not see.

    Credentials of object stores are for downloads only.
    """
    found = fetch_environment()
    return {name: value for name, value in found.items() if not _DOWNLOADS.match(name)}


def fetch_environment() -> dict[str, str]:
    """What downloads get of the agent's environment: proxies, HF_*, AWS_*."""
    return {name: value for name, value in os.environ.items() if not _HIDDEN.match(name)}


def load(path: Path | None = None, flags: dict[str, Any] | None = None) -> AgentSettings:
    """Settings from file, environment and flags; raises BadConfig."""
    found = _from_file(path)
    names = set(AgentSettings.model_fields) - {"database"}
    for name in names:
        value = os.environ.get(f"LLMGW_{name.upper()}")
        if value is not None and name == "provision":
            found[name] = {**found.get(name, {}), "engines": value}
        elif value is not None:
            found[name] = value
    if url := url_from_environment():
        found["database"] = {**found.get("database", {}), "url": url}
    found |= {name: value for name, value in (flags or {}).items() if value is not None}
    if "database" not in found:
        raise BadConfig(
            "no database: set LLMGW_DATABASE_URL, or [database] url in "
            f"{path or SYSTEM_FILE}, to postgresql://llmgw_agent...@host/database"
        )
    try:
        return AgentSettings.model_validate(found)
    except ValidationError as error:
        raise BadConfig(_words(error)) from error


def _from_file(path: Path | None) -> dict[str, Any]:
    if path is None and not SYSTEM_FILE.is_file():
        return {}
    try:
        return tomllib.loads((path or SYSTEM_FILE).read_text())
    except OSError as error:
        raise BadConfig(f"the settings file cannot be read: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise BadConfig(f"{path or SYSTEM_FILE} is not TOML: {error}") from error


_PARTS: Final[dict[str, type[BaseModel]]] = {
    "database": DatabaseSettings,
    "provision": ProvisionSettings,
}


def _words(error: ValidationError) -> str:
    """Each fault in a line; an unknown key gets the nearest right one. Values are not shown."""
    lines = []
    for fault in error.errors(include_input=False, include_url=False):
        name = ".".join(str(part) for part in fault["loc"])
        if fault["type"] == "extra_forbidden":
            known = _PARTS.get(str(fault["loc"][0]), AgentSettings)
            near = difflib.get_close_matches(str(fault["loc"][-1]), known.model_fields, 1, 0.5)
            hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(known.model_fields)}"
            lines.append(f"unknown setting {name}; {hint}")
        else:
            lines.append(f"setting {name or 'file'}: {fault['msg']}")
    return "; ".join(lines)
