"""What `up` prints when all runs: where it is, the key, and a command to try."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

import orjson

from controller.up.ask import QUESTION

if TYPE_CHECKING:
    from controller.up import Options
    from controller.up.folder import Folder
    from controller.up.readiness import Progress


def address(options: Options) -> str:
    """Where clients on this machine reach the API."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(options.host, options.host)  # noqa: S104
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{options.port}/v1"


def document(
    options: Options, folder: Folder, key: str, served: Progress | None
) -> dict[str, str | None]:
    """The same for scripts, as `--json` prints it."""
    return {
        "address": address(options),
        "key": key,
        "admin": f"127.0.0.1:{options.admin_port}",
        "state_dir": str(folder.path),
        "model": served.called if served else None,
    }


def welcome(options: Options, folder: Folder, key: str, served: Progress | None) -> str:
    """For people; scripts find the key in the file api_key of the state directory."""
    at = address(options)
    admin = f"127.0.0.1:{options.admin_port}"
    ctl = "llmgwctl" if options.admin_port == 9090 else f"llmgwctl --server {admin}"
    lines = [
        "",
        f"  OpenAI-compatible API  {at}",
        f"  key                    {key}",
        f"  administration         http://{admin}   ({ctl} status)",
        f"  data and logs          {folder.path}",
        "",
    ]
    if served is None:
        lines.append(
            f"No model is served yet. Name one in a file, then: {ctl} apply -f catalog.toml"
        )
    else:
        message = {"role": "user", "content": QUESTION}
        body = {"model": served.called, "stream": True, "messages": [message]}
        lines += [
            f"curl -N {at}/chat/completions -H 'Authorization: Bearer {key}' \\",
            f"  -H 'Content-Type: application/json' -d {shlex.quote(orjson.dumps(body).decode())}",
        ]
    if not options.check:
        lines += ["", "Ctrl-C stops everything; the next start goes on with the same data."]
    return "\n".join(lines)
