"""`X-Llmgw-Explain: 1`: headers that tell how an answer came about. Pure."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from controller.router.attempts import Attempts

_UNSAFE: Final = re.compile(rb"[\x00-\x1f\x7f]")


def headers(attempts: Attempts) -> tuple[tuple[bytes, bytes], ...]:
    """Header lines about a request that was, or could not be, sent to an engine.

    `x-llmgw-fallback-on`: for which reasons another model may answer, and who said so; that is
    `previous` when nobody else has the answer that the request goes on from.
    `x-llmgw-fallback` is there when another model answers: which, why, and who allowed it.
    `x-llmgw-breaker` is there when the replica's was not closed as it was sent there: it is a
    probe, or nobody is better. What the answer made of it is another matter.
    A head that goes out while the request waits tells nothing that is not known before its end.
    """
    reasons = ",".join(sorted(attempts.may_fall_back)) or "none"
    allowed = b"x-llmgw-fallback-on", _value(f"{reasons}; by={attempts.fallback_by}")
    if attempts.waits is not None:
        return (allowed,)
    told: list[tuple[bytes, bytes]] = [
        (b"x-llmgw-model", _value(attempts.serving)),
        (b"x-llmgw-attempts", b"%d" % attempts.count),
        (b"x-llmgw-queue-ms", b"%d" % round(attempts.queued_s * 1000)),
    ]
    if attempts.target is not None:
        told.append((b"x-llmgw-replica", _value(attempts.target.pool.key)))
    if attempts.phase is not None:
        told.append((b"x-llmgw-breaker", _value(attempts.phase.value)))
    told.append(allowed)
    if attempts.fallback is not None:
        value = f"{attempts.serving}; on={attempts.fallback}; by={attempts.fallback_by}"
        told.append((b"x-llmgw-fallback", _value(value)))
    return tuple(told)


def _value(text: str) -> bytes:
    return _UNSAFE.sub(b"?", text.encode())
