"""An engine that misbehaves as its flags say: exits, forks into other sessions, ignores SIGTERM.

    python odd_engine.py --port P --model NAME [--exit-after S | --exit-when-told]
        [--code N] [--fork] [--deaf] [--mute]

Without flags it is a good one: /health 200, /v1/models names NAME. A file `unhealthy` in its
working directory makes /health answer 503, a file `metrics` is /metrics, a file `leave` tells it to
exit. Standard library only.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


def arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser()
    p.add_argument("--host", default="127.0.0.1")
    p.add_argument("--port", type=int, required=True)
    p.add_argument("--model", default="m")
    p.add_argument("--exit-after", type=float)
    p.add_argument("--exit-when-told", action="store_true", help="once there is a file `leave`")
    p.add_argument("--code", type=int, default=0)
    p.add_argument("--fork", action="store_true", help="a child in its own session that stays")
    p.add_argument("--deaf", action="store_true", help="ignore SIGTERM")
    p.add_argument("--mute", action="store_true", help="never open the port")
    return p.parse_args()


class Handler(BaseHTTPRequestHandler):
    model = ""

    def do_GET(self) -> None:
        status, body = 404, {}
        if self.path == "/health":
            status = 503 if Path("unhealthy").exists() else 200
        elif self.path == "/v1/models":
            status, body = 200, {"data": [{"id": self.model, "aliases": []}]}
        raw = json.dumps(body).encode()
        if self.path == "/metrics" and Path("metrics").exists():
            status, raw = 200, Path("metrics").read_bytes()
        self.send_response(status)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, *_: object) -> None:
        pass


def leave(a: argparse.Namespace) -> None:
    time.sleep(a.exit_after or 0)
    while a.exit_when_told and not Path("leave").exists():
        time.sleep(0.02)
    print(f"last words before code {a.code}", flush=True)
    os._exit(a.code)


def main() -> None:
    a = arguments()
    if a.deaf:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if a.fork:
        child = [sys.executable, "-c", "import time, signal; signal.signal(15, 1); time.sleep(600)"]
        print("child", subprocess.Popen(child, start_new_session=True).pid, flush=True)
    if a.exit_after is not None or a.exit_when_told:
        threading.Thread(target=leave, args=[a], daemon=True).start()
    print("odd engine runs", flush=True)
    if a.mute:
        signal.pause()
    Handler.model = a.model
    ThreadingHTTPServer((a.host, a.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
