"""All settings of a controller: `llmgw.toml`, then LLMGW_* variables, then flags; later ones win.

The only module of the controller's processes that looks at the environment. Secrets come from
files or the environment, never from flags, which every user of the machine can read.
"""

from __future__ import annotations

import ipaddress
import os
import shutil
import tempfile
import tomllib
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, field_validator

from controller import files
from controller.allowances import Allowances
from controller.catalog.faults import explain
from controller.catalog.units import Mebibytes, Seconds  # noqa: TC001 - pydantic reads them
from controller.endpoint import endpoint
from sql.settings import URL_VARIABLE, DatabaseSettings, url_from_environment

if TYPE_CHECKING:
    from collections.abc import Iterator

PREFIX = "LLMGW_"
MOST_SECRET = 500
MOST_SOCKET = 107
"""Bytes of a socket's path, says Linux."""
SYSTEM_FILE = Path("/etc/llmgw/llmgw.toml")


class BadConfig(Exception):
    """A setting is wrong; the message names it, says where it came from and what is right."""


class Key(BaseModel):
    """A client key of static mode."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str = Field(min_length=1, description="name in logs and metrics")
    secret: SecretStr = Field(description="what clients send")
    models: tuple[str, ...] | None = Field(None, description="allowed models; absent = every one")
    weight: float = Field(
        1.0, ge=0.01, le=100, description="turns of its requests while those of others wait too"
    )

    @field_validator("secret")
    @classmethod
    def _sendable(cls, value: SecretStr) -> SecretStr:
        secret = value.get_secret_value()
        if not secret or secret != secret.strip() or len(secret.encode()) > MOST_SECRET:
            raise ValueError(
                f"it must have 1 to {MOST_SECRET} bytes and no blanks around: an empty one would "
                "let everybody in, others no client could send"
            )
        return value


class Timeouts(BaseModel):
    """Deadlines of requests."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    connect: Seconds = Field(1.0, gt=0, description="to open a connection to an engine")
    headers: Seconds = Field(
        600.0, gt=0, description="a plain answer's headers come after its last token"
    )
    first_token: Seconds = Field(
        600.0, gt=0, description="from a stream's headers to its first token: queue and prefill"
    )
    idle: Seconds = Field(
        300.0, gt=0, description="between two tokens of a stream, or two pieces of a plain answer"
    )
    total: Seconds = Field(3600.0, gt=0, description="of one request, at each model that is asked")
    wake: Seconds = Field(
        120.0, description="a request waits this long for a model that runs on demand to start"
    )
    queue: Seconds = Field(
        30.0, description="a request waits this long for a place when all replicas are full"
    )
    comment: Seconds = Field(
        15.0,
        description="a stream that waits for its model, or whose engine is silent after its "
        "headers, gets its head and a comment this often; 0: never, so errors keep their status",
    )


class Retries(BaseModel):
    """How often a request is sent again because of what an engine did."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    attempts: int = Field(
        3, ge=1, le=10, description="engines that get one request; each fallback may be one more"
    )
    ratio: float = Field(0.1, ge=0, le=1, description="retries of all requests, per router process")
    floor: int = Field(
        3, ge=0, le=1000, description="retries in 10 s that are always allowed, per router process"
    )


class Replicas(BaseModel):
    """How routers watch replicas, and when they keep requests from one."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    metrics: Seconds = Field(
        2.0, description="each replica in use is asked for its metrics so often; 0: never"
    )
    health: Seconds = Field(
        5.0, description="each fixed replica is asked for its health so often; 0: never"
    )
    failures: int = Field(
        5, ge=1, le=20, description="failures in a row that trip a replica's breaker"
    )
    pause: Seconds = Field(
        1.0, gt=0, description="a tripped replica gets a probe after this, then after twice as long"
    )
    longest_pause: Seconds = Field(30.0, gt=0, description="the most between two probes")


class Limits(BaseModel):
    """What one client can make a router process hold."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    body: Mebibytes = Field(
        32, description="one request's body as sent; images as base64 are normal (MiB)"
    )
    inflated_body: Mebibytes = Field(
        32, description="the same after decompression, which a small body may abuse (MiB)"
    )
    connections: int = Field(
        20_000, ge=1, description="open client connections; more are closed at once"
    )
    waiting: int = Field(
        1000, ge=0, description="requests that wait for models to start; more are refused (503)"
    )
    queue: int = Field(
        1000,
        ge=0,
        description="requests that wait for one model whose replicas are full; more are refused",
    )
    spool: Mebibytes = Field(
        256, ge=16, description="usage rows of one router that wait on disk for Postgres (MiB)"
    )


class Settings(BaseModel):
    """What one controller is told. Everything about the fleet comes from the database."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    role: Literal["all", "control", "router"] = Field("all", description="which processes to run")
    workers: int = Field(1, ge=1, le=64, description="router processes that share the client port")
    listen: str = Field("0.0.0.0:8080", description="host:port for clients")
    admin_listen: str = Field("127.0.0.1:9090", description="host:port for API, pages and metrics")
    admin_token_file: Path | None = Field(None, description="admin tokens, one a line")
    admin_tls_cert: Path | None = Field(None, description="PEM chain for the admin port")
    admin_tls_key: Path | None = Field(None, description="PEM key for the admin port")
    insecure: bool = Field(False, description="allow an admin port off loopback without TLS")
    database: DatabaseSettings | None = Field(
        None, description="how to reach Postgres; absent: static mode, nothing is recorded"
    )
    migrate_url: SecretStr | None = Field(
        None, description="who may upgrade the schema, when the database's own login may not"
    )
    catalog: Path | None = Field(None, description="applied at start and at SIGHUP")
    endpoints: tuple[str, ...] = Field(
        (),
        description="id=URL[=model[,model]][;depth=N][;weight=W]: fixed replicas; without models, "
        "what their /v1/models lists",
    )
    endpoint_keys: dict[str, Path] = Field(
        {},
        description="id of a fixed replica = file that holds the key that its engine wants (as "
        "Authorization: Bearer KEY) and nothing else; the files are read again at SIGHUP",
    )
    keys: tuple[Key, ...] = Field((), description="client keys of static mode")
    aliases: dict[str, str] = Field({}, description="alias = model, for fixed replicas")
    fallbacks: dict[str, tuple[str, ...]] = Field(
        {}, description="model = models that answer instead, in order, for fixed replicas"
    )
    fallback_on: tuple[Literal["unavailable", "timeout", "error", "refusal"], ...] = Field(
        ("unavailable", "timeout", "error"),
        description="why another model may answer; refusal: the engine finds fault with the "
        "request (400, 413, 422), for example a prompt that is too long",
    )
    access_log: str = Field(
        "off",
        description='a JSON line per request to "stdout" or this file; "errors": only those that '
        'failed, to stdout; "off": none',
    )
    access_log_sample: float = Field(
        1.0, ge=0, le=1, description="share of good requests in it; failed ones always are"
    )
    scoring: Literal["balanced", "latency", "cache"] = Field(
        "balanced",
        description="how a replica is chosen, unless a request's X-Llmgw-Profile says otherwise: "
        "by load; by time to first byte too; where its prompt or session is cached",
    )
    tls_cert: Path | None = Field(None, description="PEM chain for the client port")
    tls_key: Path | None = Field(None, description="PEM key for the client port")
    cors: tuple[str, ...] = Field(
        (), description='origins of web pages that may call the client port; "*" = every one'
    )
    revoked_streams: Literal["finish", "end"] = Field(
        "finish", description="what becomes of the running requests of a key that is revoked"
    )
    drain: Seconds = Field(30.0, description="running requests get this long at SIGTERM")
    timeouts: Timeouts = Field(
        default_factory=lambda: Timeouts.model_validate({}), description="deadlines of requests"
    )
    retries: Retries = Field(
        default_factory=lambda: Retries.model_validate({}), description="bounds on sending again"
    )
    limits: Limits = Field(
        default_factory=lambda: Limits.model_validate({}), description="bounds per router process"
    )
    allowances: Allowances = Field(
        default_factory=lambda: Allowances.model_validate({}), description="budgets and limits"
    )
    replicas: Replicas = Field(
        default_factory=lambda: Replicas.model_validate({}), description="watching replicas"
    )
    log_level: Literal["debug", "info", "warning"] = Field(
        "info", description="the quietest lines that are still written"
    )
    runtime_dir: Path | None = Field(None, description="sockets between our processes")
    state_dir: Path | None = Field(
        None, description="what outlives us: usage rows that wait for Postgres [runtime_dir]"
    )

    @field_validator("listen", "admin_listen")
    @classmethod
    def _address(cls, value: str) -> str:
        host_port(value)
        return value

    @field_validator("endpoints")
    @classmethod
    def _endpoints(cls, values: tuple[str, ...]) -> tuple[str, ...]:
        twice = [name for name, n in Counter(endpoint(v).id for v in values).items() if n > 1]
        if twice:
            raise ValueError(f"the id {twice[0]!r} is used twice: give each endpoint its own")
        return values

    @field_validator("keys")
    @classmethod
    def _keys(cls, values: tuple[Key, ...]) -> tuple[Key, ...]:
        owners: dict[str, str] = {}
        for key in values:
            owner = owners.setdefault(key.secret.get_secret_value(), key.id)
            if owner != key.id:
                told = f"{owner!r} and {key.id!r} have the same secret: give each its own"
                raise ValueError(f"{told}, else nobody knows whose a request is")
        return values

    @field_validator("access_log")
    @classmethod
    def _log(cls, value: str) -> str:
        if value not in ("off", "errors", "stdout") and not value.startswith("/"):
            raise ValueError(f'{value!r} is not "off", "errors", "stdout" or a path from /')
        return value

    @field_validator("cors", mode="before")
    @classmethod
    def _cors(cls, value: Any) -> Any:
        return value.split(",") if isinstance(value, str) else value

    @field_validator("cors")
    @classmethod
    def _origins(cls, values: tuple[str, ...]) -> tuple[str, ...]:
        for value in values:
            origin(value)
        return values


def origin(value: str) -> None:
    """ValueError unless `value` is "*" or what a browser sends as Origin."""
    scheme, sign, host = value.partition("://")
    if value != "*" and not (scheme and sign and host and value.isascii() and "/" not in host):
        raise ValueError(f'{value!r} is no origin, as "https://chat.example.org", nor "*"')


def host_port(value: str) -> tuple[str, int]:
    """`host:port`, `:port` or `[v6]:port`; ValueError for anything else."""
    host, colon, port = value.rpartition(":")
    if not (colon and port.isascii() and port.isdigit() and int(port) <= 65535):
        raise ValueError(f'{value!r} is not host:port, as "0.0.0.0:8080" or ":8080"')
    return host.strip("[]") or "0.0.0.0", int(port)  # noqa: S104 - ":8080" means every address


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def load(path: Path | None, flags: dict[str, Any]) -> Settings:
    """Settings from file, environment and flags (None = not given); raises BadConfig."""
    document = _from_file(path)
    if "STATE_DIRECTORY" in os.environ:  # systemd's
        document.setdefault("state_dir", os.environ["STATE_DIRECTORY"].split(":")[0])
    document |= _from_environment()
    document |= {name: value for name, value in flags.items() if value not in (None, ())}
    url = url_from_environment()
    given = document.get("database", {})
    if isinstance(given, str):  # said without it: it may hold a password
        raise BadConfig("database: must be a table with its url in it: [database] url = ...")
    if url is not None and isinstance(given, dict):  # else: refused below, with the reason
        document["database"] = {**given, "url": url}
    try:
        settings = Settings.model_validate(document)
    except ValidationError as error:
        raise BadConfig(explain(error, Settings, document)) from None
    _judge(settings)
    try:
        _judge_files(settings)
    except ValueError as error:
        raise BadConfig(str(error)) from None
    return settings


def _from_file(path: Path | None) -> dict[str, Any]:
    found = path or (SYSTEM_FILE if SYSTEM_FILE.exists() else None)
    if found is None:
        return {}
    try:
        return tomllib.loads(found.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadConfig(f"the configuration {found} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise BadConfig(f"the configuration {found} is no UTF-8: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise BadConfig(f"the configuration {found} is no TOML: {error}") from None


_NOT_SIMPLE = frozenset((
    "database", "endpoints", "endpoint_keys", "keys", "timeouts", "limits", "retries", "aliases",
    "fallbacks", "fallback_on", "replicas",
))  # fmt: skip


def _from_environment() -> dict[str, Any]:
    simple = {
        name for name, field in Settings.model_fields.items()
        if name not in _NOT_SIMPLE
    }  # fmt: skip
    return {
        name: os.environ[PREFIX + name.upper()]
        for name in simple
        if PREFIX + name.upper() in os.environ
    }


def _judge(settings: Settings) -> None:
    """What is right field by field and wrong together."""
    if settings.database is None and not settings.endpoints:
        raise BadConfig(
            "nothing to serve: name a database (LLMGW_DATABASE_URL or [database] url) or "
            "fixed replicas (--endpoint id=URL=model)"
        )
    _judge_url(settings)
    _judge_names(settings)
    host, _ = host_port(settings.admin_listen)
    if settings.role != "router" and not is_loopback(host):
        if settings.admin_token_file is None:
            raise BadConfig(
                f"admin_listen {settings.admin_listen} can be reached from other machines: set "
                "admin_token_file, or listen on 127.0.0.1"
            )
        if settings.admin_tls_cert is None and not settings.insecure:
            raise BadConfig(
                f"admin_listen {settings.admin_listen} would send tokens in clear text: set "
                "admin_tls_cert and admin_tls_key, or insecure = true behind a proxy that does TLS"
            )


def _judge_url(settings: Settings) -> None:
    """Else each try to connect would fail, and processes that wait for a database never end."""
    if settings.database is None:
        return
    url = settings.database.url.get_secret_value()
    if not url.startswith(("postgresql://", "postgres://")):
        raise BadConfig(
            f"database: url: it does not begin with postgresql://; see also {URL_VARIABLE}"
        )


def _judge_names(settings: Settings) -> None:
    """An alias or a fallback that means nothing would be passed over in silence."""
    fixed = [endpoint(text).models for text in settings.endpoints]
    if not all(fixed):
        if not settings.replicas.health:
            text = settings.endpoints[fixed.index(())]
            raise BadConfig(
                f"endpoints: {text!r} names no model, and with replicas.health = 0 nobody asks it: "
                "name its models, as id=URL=model, or let replicas.health be more than 0"
            )
        return  # an endpoint that lists its models itself may have any
    models = {model for found in fixed for model in found}
    known = f"fixed replicas (endpoints) serve {', '.join(sorted(models)) or 'no model'}"
    for alias, model in settings.aliases.items():
        if model not in models:
            raise BadConfig(f"aliases: {alias!r} means {model!r}, but {known}")
        if alias in models:
            raise BadConfig(f"aliases: {alias!r} is a model's own name: choose another")
    for model, others in settings.fallbacks.items():
        if model not in models:
            raise BadConfig(f"fallbacks: {model!r} is no model of ours, {known}")
        for other in others:
            if settings.aliases.get(other, other) == model:
                raise BadConfig(f"fallbacks: {model!r} falls back to itself: name another model")
            if settings.database is None and other not in models | settings.aliases.keys():
                raise BadConfig(f"fallbacks: {model!r} falls back to {other!r}, but {known}")


def _judge_files(settings: Settings) -> None:
    """What the settings name on disk, of those that processes of this role open."""
    if settings.runtime_dir is not None:
        most = MOST_SOCKET - len("/router-63.sock")
        files.judge_folder("runtime_dir", settings.runtime_dir, most)
    if settings.role != "router":
        if settings.admin_token_file is not None:
            files.judge_tokens(settings.admin_token_file)
        cert, key = settings.admin_tls_cert, settings.admin_tls_key
        files.judge_pair("admin_tls_cert", cert, "admin_tls_key", key)
    if settings.role != "control":
        files.judge_pair("tls_cert", settings.tls_cert, "tls_key", settings.tls_key)
        known = {endpoint(text).id for text in settings.endpoints}
        files.judge_endpoint_keys(settings.endpoint_keys, known)
        if settings.access_log.startswith("/"):
            files.judge_log(Path(settings.access_log))


def shown(settings: Settings) -> dict[str, Any]:
    """The effective settings with secrets hidden."""
    document = settings.model_dump(mode="json", exclude_none=True)
    if settings.database is not None:
        document["database"]["url"] = "**********"
    return document


@contextmanager
def runtime_dir(settings: Settings) -> Iterator[Path]:
    """A private folder for sockets: the one that is set (kept), or a new one (removed after)."""
    if settings.runtime_dir is not None:
        settings.runtime_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        yield settings.runtime_dir
        return
    made = Path(tempfile.mkdtemp(prefix="llmgw-"))
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


def child_environment(runtime: Path) -> dict[str, str]:
    """What our own child processes inherit."""
    return {**os.environ, "LLMGW_RUNTIME_DIR": str(runtime)}


LIFELINE = "LLMGW_LIFELINE"


def lifeline() -> int | None:
    """The descriptor that closes when our supervisor dies; None when nobody supervises us."""
    found = os.environ.get(LIFELINE)
    return None if found is None else int(found)
