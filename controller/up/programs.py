"""The command lines of controller and agent, and what must be true before they start."""

from __future__ import annotations

import errno
import hashlib
import re
import secrets
import socket
import string
from typing import TYPE_CHECKING

from controller.up import CannotStart, Options, children
from sql import queries
from sql.settings import URL_VARIABLE

if TYPE_CHECKING:
    from controller.up.children import Child
    from controller.up.database import Database
    from controller.up.folder import Folder
    from sql.pool import Pool

ENROLMENT_S = 600.0
ACTOR = "llmgwctl up"
KEY_FILE = "api_key"
_ID_LETTERS = string.ascii_lowercase + string.digits


def check_ports(options: Options) -> None:
    """Both ports are free; CannotStart says which is not, and how to choose another."""
    if options.port == options.admin_port:
        raise CannotStart(f"--port and --admin-port are both {options.port}: give two")
    wanted = (
        (options.host, options.port, "--port"),
        ("127.0.0.1", options.admin_port, "--admin-port"),
    )
    for host, port, flag in wanted:
        try:
            with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((host, port))
                probe.listen(1)  # a listener with SO_REUSEPORT lets others bind, but not listen
        except OSError as error:
            taken = error.errno == errno.EADDRINUSE
            why = "is taken by another program" if taken else f"cannot be used: {error.strerror}"
            raise CannotStart(
                f"port {port} on {host} {why}; choose another, as {flag} {port + 1}"
            ) from None


def node_name() -> str:
    """This host's name, in the letters that nodes have."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname()).strip("-._")[:100] or "this-node"


async def start_controller(folder: Folder, options: Options, database: Database) -> Child:
    """Router, admin API and tick in one."""
    host = f"[{options.host}]" if ":" in options.host else options.host
    arguments = [
        "controller",
        "--role",
        "all",
        "--workers",
        "1",
        "--listen",
        f"{host}:{options.port}",
    ]
    arguments += ["--admin-listen", f"127.0.0.1:{options.admin_port}"]
    state = {"LLMGW_STATE_DIR": str(folder.path / "controller")}
    return await children.start(
        folder, "controller", arguments, {URL_VARIABLE: database.controller_url, **state}
    )


async def start_agent(folder: Folder, options: Options, database: Database, pool: Pool) -> Child:
    """The agent of this node, with a token that lets it enrol should it be unknown."""
    node, token = node_name(), secrets.token_urlsafe(32)
    digest = hashlib.sha256(token.encode()).digest()
    await pool.fetchval(queries("admin")["node_enroll"], ACTOR, node, digest, 1, ENROLMENT_S)
    token_file = folder.keep_secret("enrolment_token", token)
    arguments = ["agent", "--node", node, "--state-dir", str(folder.path / "agent")]
    arguments += ["--enrolment-token-file", str(token_file), "--on-exit", "stop"]
    arguments += ["--mgmt-addr", "127.0.0.1", "--ports", options.engine_ports]
    return await children.start(folder, "agent", arguments, {URL_VARIABLE: database.agent_url})


async def api_key(folder: Folder, pool: Pool) -> str:
    """The installation's key, made once and kept, so that each run prints the same."""
    kept = folder.read_secret(KEY_FILE)
    if kept is not None:
        number = kept.split("-")[1]
        if await pool.fetchval(queries("up")["key_active"], number):
            return kept
    number = "".join(secrets.choice(_ID_LETTERS) for _ in range(12))
    key = f"sk-{number}-{secrets.token_urlsafe(32)}"
    digest = hashlib.sha256(key.encode()).digest()
    # For every model, without an end, in no scope, from anywhere, without tags or fallbacks.
    about = number, digest, "llmgwctl up", *[None] * 6
    await pool.fetchval(queries("tenancy")["key_create"], ACTOR, *about)
    folder.keep_secret(KEY_FILE, key)
    return key
