"""An engine's own error answer, kept whole until it is decided who gets it. Pure.

Another replica may take the request over; else the client gets these very bytes.
"""

from __future__ import annotations

import math
from typing import Final

from controller.router.errors import BUSY_S
from controller.router.relay import Head
from controller.router.verdict import BUSY, judge

HELD_BYTES: Final = 65_536
"""An error is a few hundred bytes; what is longer is passed on as it comes."""
LONGEST_S: Final = 86_400


class Held:
    """Head and body of one answer."""

    __slots__ = ("_head", "body")

    def __init__(self, head: Head) -> None:
        self._head = head
        self.body = b""

    @property
    def status(self) -> int:
        return self._head.status

    def feed(self, data: bytes) -> bool:
        """Whether it may still be held: it is not over the bound."""
        self.body += data
        return len(self.body) <= HELD_BYTES

    @property
    def retry_after_s(self) -> int | None:
        """What a busy engine says, in whole seconds; None for nothing, a date or nonsense."""
        for name, value in self._head.headers:
            if name == b"retry-after":
                return _seconds(value)
        return None

    @property
    def head(self) -> Head:
        """The head for the client: a busy answer always says in whole seconds when to come back
        (case A34: SDKs wait badly without, and not all read dates or fractions)."""
        if judge(self.status, self.body) is not BUSY:
            return self._head
        headers = [pair for pair in self._head.headers if pair[0] != b"retry-after"]
        headers.append((b"retry-after", b"%d" % (self.retry_after_s or BUSY_S)))
        head = self._head
        return Head(head.status, headers, head.length, head.kind, head.coding)


def _seconds(value: bytes) -> int | None:
    try:
        seconds = float(value)
    except ValueError:
        return None
    return max(1, math.ceil(seconds)) if 0 <= seconds <= LONGEST_S else None
