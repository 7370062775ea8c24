"""What one router process is told at start: where to listen, its limits, its deadlines.

Plain frozen values; `controller/config.py` reads files and environment and builds them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal

if TYPE_CHECKING:
    from pathlib import Path

from controller.router.breaker import BreakerRules

MIB: Final = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on what a client or an engine can make us hold, in bytes or counts."""

    header_bytes: int = 64 * 1024
    header_count: int = 128
    body_bytes: int = 32 * MIB  # images as base64 are normal (case A31)
    inflated_bytes: int = 32 * MIB
    event_bytes: int = 4 * MIB  # one SSE event; engines never come near it
    rewrite_bytes: int = 32 * MIB  # a plain answer whose model name is restored is held whole
    pause_above_bytes: int = 256 * 1024  # pending for one client: stop reading its engine
    resume_below_bytes: int = 64 * 1024
    connections: int = 20_000
    idle_upstreams: int = 512  # kept open per replica
    usage_rows: int = 100_000  # waiting for Postgres in memory
    spool_bytes: int = 256 * MIB  # waiting for Postgres on disk: 600,000 rows
    waiting: int = 1000  # requests that wait for a model that is being started
    waiting_bytes: int = 256 * MIB  # their bodies
    queue: int = 1000  # requests that wait for one model whose replicas are full
    queue_bytes: int = 256 * MIB  # bodies of those of all models
    answer_tokens: int = 2048  # reserved of budgets and limits for an answer without max_tokens


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Deadlines in seconds; granularity is one sweep (0.1 s)."""

    connect_s: float = 1.0
    headers_s: float = 600.0  # plain answers send headers only when all tokens are made
    first_token_s: float = 600.0  # from a stream's head to its first event: queue and prefill
    idle_s: float = 300.0  # between two tokens of a stream, or two pieces of a plain answer
    total_s: float = 3600.0
    handshake_s: float = 10.0  # of TLS, from the connection to its end
    client_read_s: float = 60.0  # from the first byte of a request to its last, renewed by bytes
    client_idle_s: float = 75.0  # keep-alive between requests
    client_write_s: float = 60.0  # a client that reads nothing while bytes wait for it
    linger_s: float = 5.0  # after an early answer: from one piece that is dropped to the next
    upstream_idle_s: float = 30.0  # below the keep-alive of common engines where possible
    refresh_s: float = 2.0
    peek_s: float = 0.4  # a replica that drains gets nothing new after a second (case C13)
    flush_s: float = 1.0
    drain_s: float = 30.0
    wake_s: float = 120.0  # a request waits so long for a model that runs on demand
    queue_s: float = 30.0  # a request waits so long for a place at a replica
    comment_s: float = 15.0  # a stream that is silent says so; proxies cut silence after a minute


@dataclass(frozen=True, slots=True)
class Retries:
    """How often a request may be sent again because of what an engine did."""

    attempts: int = 3  # engines that get one request, of the model asked for
    ratio: float = 0.1  # retries of all requests: the fleet's total stays under 1.2 of what came
    floor: int = 3  # retries in 10 s that are always allowed


FALLBACK_ON: Final = frozenset(("unavailable", "timeout", "error"))
"""Reasons to ask another model (`fallbacks.py`), unless the settings or the request differ."""


@dataclass(frozen=True, slots=True)
class Watching:
    """How often replicas are asked about themselves, in seconds; 0 = never."""

    metrics_s: float = 2.0  # each replica in use, by each process
    health_s: float = 5.0  # each static endpoint, by each process


@dataclass(frozen=True, slots=True)
class StaticEndpoint:
    """`--endpoint id=URL=model[,model]`: a replica that nobody placed."""

    id: str
    url: str
    models: tuple[str, ...]  # empty: whatever its /v1/models says
    depth: int | None = None  # this process sends it so many at once; None: no bound
    weight: float = 1.0
    key_file: Path | None = None  # holds the key that its engine wants
    engine_key: bytes = field(default=b"", repr=False)  # what was read there


@dataclass(frozen=True, slots=True)
class StaticKey:
    """A key from the configuration file; `secret` is the clear text that clients send."""

    id: str
    secret: str
    models: tuple[str, ...] | None = None  # None = every model
    weight: float = 1.0  # turns in a queue while others wait too


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """Everything one router process needs besides the database."""

    id: str | None = None  # this process's life in llmgw_core.controller; None = a new one
    host: str = "0.0.0.0"  # noqa: S104 (the client port is public by purpose)
    port: int = 8080
    worker: int = 0  # index among the processes that share the port
    backlog: int = 4096
    spool: Path | None = None  # folder for rows that wait for Postgres; None: in memory only
    stats_socket: str | None = None  # path of the unix-domain socket that tells our counters
    endpoints: tuple[StaticEndpoint, ...] = ()
    keys: tuple[StaticKey, ...] = ()
    aliases: tuple[tuple[str, str], ...] = ()  # (alias, model) of static mode
    fallbacks: tuple[tuple[str, tuple[str, ...]], ...] = ()  # of static mode: model, others
    fallback_on: frozenset[str] = FALLBACK_ON
    revoked_streams: Literal["finish", "end"] = "finish"  # what a revoked key is running
    cors: frozenset[str] = frozenset()  # origins of web pages that may call us; "*" = every one
    access_log: str | None = None  # "stdout" or the path of a file
    access_log_sample: float = 1.0  # share of the requests that are told; failed ones always are
    tls_cert: Path | None = None  # PEM; with `tls_key` the client port speaks TLS
    tls_key: Path | None = None
    handle_signals: bool = True  # SIGTERM and SIGINT drain and return, SIGHUP reads files again
    seed: int | None = None  # choosing replicas; None = from the system
    limits: Limits = field(default_factory=Limits)
    timeouts: Timeouts = field(default_factory=Timeouts)
    retries: Retries = field(default_factory=Retries)
    watching: Watching = field(default_factory=Watching)
    scoring: str = "balanced"  # the profile of requests that name none
    without_database: int = 503  # status when nobody can say what is left of a budget or limit
    breaker: BreakerRules = field(default_factory=BreakerRules)
