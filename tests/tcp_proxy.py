"""A dumb TCP proxy (PX of CASES.md): passes bytes, or delays, blackholes, holds or resets them.

`mode` may change while it runs: "pass", "delay" (each piece waits `delay_s`), "blackhole" (bytes
are read and dropped, nobody is told), "hold" (not even read), "reset" (open connections get RST).
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from typing import Self


class TcpProxy:
    """Runs in threads between `start` and `stop`, on a port of its own."""

    def __init__(self, target_port: int, mode: str = "pass", delay_s: float = 0.1) -> None:
        self.target_port = target_port
        self.mode = mode
        self.delay_s = delay_s
        self.connections = 0
        self.port = 0
        self._sockets: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._stopping = False
        self._resetting = False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.port = self._listener.getsockname()[1]
        self._run(self._accept)
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping = True
        self.mode = "pass"
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._shut(reset=False)
        for thread in self._threads:
            thread.join(5)
        self._listener.close()

    def reset(self) -> None:
        """RST to both ends of everything open; when it returns, nothing more gets through."""
        self._resetting = True
        with self._lock:
            cut = set(self._sockets)
        self._shut(reset=True)
        deadline = time.monotonic() + 2
        while cut & self._sockets and time.monotonic() < deadline:
            time.sleep(0.001)  # the pumps are threads: an answer on its way could pass one of them

    def _shut(self, *, reset: bool) -> None:
        how = socket.SHUT_RD if reset else socket.SHUT_RDWR
        with self._lock:
            for sock in self._sockets:
                with contextlib.suppress(OSError):
                    if reset:  # the pumps wake up and close, which then sends RST
                        linger = struct.pack("ii", 1, 0)
                        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                    sock.shutdown(how)

    def _run(self, work: object, *args: object) -> None:
        thread = threading.Thread(target=work, args=args, daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while not self._stopping:
            try:
                client = self._listener.accept()[0]
            except OSError:
                return
            self.connections += 1
            try:
                engine = socket.create_connection(("127.0.0.1", self.target_port))
            except OSError:
                client.close()
                continue
            with self._lock:
                self._sockets |= {client, engine}
            left = [2]
            self._run(self._pump, client, engine, left)
            self._run(self._pump, engine, client, left)

    def _pump(self, source: socket.socket, sink: socket.socket, left: list[int]) -> None:
        with contextlib.suppress(OSError):
            while True:
                while self.mode == "hold" and not self._stopping:
                    time.sleep(0.01)
                data = source.recv(65536)
                if not data:
                    break
                if self.mode == "delay":
                    time.sleep(self.delay_s)
                if self.mode != "blackhole":
                    sink.sendall(data)
        if not self._resetting:
            with contextlib.suppress(OSError):
                sink.shutdown(socket.SHUT_WR)
        with self._lock:
            left[0] -= 1
            if left[0] == 0:
                self._sockets -= {source, sink}
                source.close()
                sink.close()
