"""One rank of a made-up engine over several nodes: all meet at the head, then rank 0 serves.

`python tests/fake_shard.py --rank 0 --nodes 2 --head H --master-port P --host A --port Q`
A head that has met its peers does not notice when one dies and goes on answering, as real ones do
for a while (D14): who watches the other ranks must notice.
"""

from __future__ import annotations

import argparse
import signal
import socket
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.fake_engine import FakeEngine

MEET_S = 60.0
RETRY_S = 0.05


def gather(head: str, port: int, others: int) -> list[socket.socket]:
    """Rank 0: wait until every other rank has come."""
    with socket.create_server((head, port)) as listener:
        listener.settimeout(MEET_S)
        return [listener.accept()[0] for _ in range(others)]


def join(head: str, port: int) -> socket.socket:
    """Another rank: the head may come later."""
    end = time.monotonic() + MEET_S
    while True:
        try:
            return socket.create_connection((head, port), timeout=MEET_S)
        except ConnectionRefusedError:
            if time.monotonic() > end:
                raise
            time.sleep(RETRY_S)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--head", required=True)
    parser.add_argument("--master-port", type=int, required=True)
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    options = parser.parse_args()
    stop = {signal.SIGTERM, signal.SIGINT}
    if options.rank == 0:
        peers = gather(options.head, options.master_port, options.nodes - 1)
        FakeEngine({}, options.port, options.host).start()
    else:
        peers = [join(options.head, options.master_port)]
    print(f"rank {options.rank}: {len(peers)} met at {options.master_port}", flush=True)
    signal.sigwait(stop)


if __name__ == "__main__":
    main()
