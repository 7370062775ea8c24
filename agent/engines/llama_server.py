"""llama.cpp's own HTTP server out of the wheel `xllamacpp`, with llama-server's flags.

    python -P agent/engines/llama_server.py -m MODEL.gguf --host 127.0.0.1 --port 8080 --alias NAME

The wheel holds the C++ server (same routes, JSON, SSE and metrics) but no program; this adds only
the command line and the signals. SIGTERM lets running requests end for --drain seconds, then exits
0. Destroying the server object instead would leave a running stream silent for 30 s. Run by
agent.engines.llamacpp as a process of its own; never imported by the agent.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

POLL_S = 0.05


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The flags of llama-server that the wheel can honour."""
    parser = argparse.ArgumentParser(prog="llama-server", allow_abbrev=False)
    parser.add_argument("-m", "--model", required=True, type=Path)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument("-a", "--alias")
    parser.add_argument(
        "-c", "--ctx-size", type=int, default=0, help="tokens in all; each slot gets its share"
    )
    parser.add_argument("-np", "--parallel", type=int, default=1, help="slots")
    parser.add_argument("-t", "--threads", type=int)
    parser.add_argument("-b", "--batch-size", type=int)
    parser.add_argument("-ngl", "--n-gpu-layers", "--gpu-layers", type=int, default=-1)
    parser.add_argument("--metrics", action="store_true")
    parser.add_argument("--api-key")
    parser.add_argument("--embeddings", "--embedding", action="store_true")
    parser.add_argument("--pooling", choices=["none", "mean", "cls", "last"])
    parser.add_argument("--sleep-idle-seconds", type=int, default=-1)
    parser.add_argument("--drain", type=float, default=0, help="seconds for running requests")
    return parser.parse_args(argv)


def busy(a: argparse.Namespace) -> bool:
    """Whether any slot works on a request."""
    name = f"[{a.host}]" if ":" in a.host else a.host
    request = urllib.request.Request(f"http://{name}:{a.port}/slots")
    if a.api_key:
        request.add_header("Authorization", f"Bearer {a.api_key}")
    try:
        with urllib.request.urlopen(request, timeout=2) as answer:  # noqa: S310
            return any(slot["is_processing"] for slot in json.load(answer))
    except OSError:
        return False


def parameters(a: argparse.Namespace) -> Any:
    """The flags as llama.cpp's own structure."""
    import xllamacpp

    p = xllamacpp.CommonParams()
    p.model.path, p.hostnames, p.port = str(a.model), [a.host], a.port
    p.n_ctx, p.n_parallel, p.n_gpu_layers = a.ctx_size, a.parallel, a.n_gpu_layers
    p.endpoint_metrics, p.endpoint_slots, p.embedding = a.metrics, True, a.embeddings
    p.sleep_idle_seconds = a.sleep_idle_seconds
    if a.batch_size:
        p.n_batch = a.batch_size
    if a.threads:
        p.cpuparams.n_threads = p.cpuparams_batch.n_threads = a.threads
    if a.pooling or a.embeddings:  # /v1/embeddings refuses pooling "none"
        kind = f"LLAMA_POOLING_TYPE_{(a.pooling or 'mean').upper()}"
        p.pooling_type = xllamacpp.llama_pooling_type[kind]
    if a.alias:
        p.model_alias = {a.alias}
    if a.api_key:
        p.api_keys = [a.api_key]
    return p


def main() -> None:
    """Serve until SIGTERM or SIGINT."""
    a = arguments()
    if not a.model.is_file():
        sys.exit(f"llama-server: no such model file: {a.model}")
    stop = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, stop)  # before the server's threads, which inherit it
    import xllamacpp

    server = xllamacpp.Server(parameters(a))  # RuntimeError: bad model, port taken
    sys.stdout.write(f"llama-server: listening on {server.listening_address}\n")
    sys.stdout.flush()

    signal.sigwait(stop)
    end = time.monotonic() + a.drain
    while time.monotonic() < end and busy(a):
        if signal.sigtimedwait(stop, POLL_S) is not None:
            break  # a second signal: at once
    os._exit(0)


if __name__ == "__main__":
    main()
