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


def welcome(options: Options, folder: Folder, key: str, served: Progress | None) -> str:
    """For people; scripts find the key in the file api_key of the state directory."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(options.host, options.host)  # noqa: S104
    address = f"http://[{host}]:{options.port}" if ":" in host else f"http://{host}:{options.port}"
    lines = [
        "",
        f"  OpenAI-compatible API  {address}/v1",
        f"  key                    {key}",
        f"  administration         http://127.0.0.1:{options.admin_port}   (llmgwctl status)",
        f"  data and logs          {folder.path}",
        "",
    ]
    if served is None:
        lines.append(
            "No model is served yet. Name one in a file, then: llmgwctl apply -f catalog.toml"
        )
    else:
        message = {"role": "user", "content": QUESTION}
        body = {"model": served.called, "stream": True, "messages": [message]}
        lines += [
            f"curl -N {address}/v1/chat/completions -H 'Authorization: Bearer {key}' \\",
            f"  -H 'Content-Type: application/json' -d {shlex.quote(orjson.dumps(body).decode())}",
        ]
    if not options.check:
        lines += ["", "Ctrl-C stops everything; the next start goes on with the same data."]
    return "\n".join(lines)
