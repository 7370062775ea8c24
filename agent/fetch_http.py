"""Download one file over HTTP with resume, size check and, where given, a checksum.

Runs in the child process of agent.fetch; blocking by design.
"""

from __future__ import annotations

import errno
import json
import time
import urllib.error
import urllib.request
from http.client import HTTPException
from typing import TYPE_CHECKING, Any

from agent.fetch_verify import (
    BLOCK,
    Checksum,
    FetchError,
    NoRoom,
    drop,
    facts_of,
    finish,
    part_said,
    verify,
    version_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

READ_TIMEOUT_S = 30
TRIES = 5
"""Tries in a row that came no further than an earlier one; any progress starts the count again."""


def fetch_file(
    url: str,
    path: Path,
    checksum: Checksum | None,
    room: Callable[[int | None], None],
    progress: Callable[[int, int | None], None],
    headers: Mapping[str, str] | None = None,
    size: int | None = None,
) -> str:
    """Bring a URL to `path`; how it was verified, as a word of fetch_verify.

    Bytes already in `path.part` are kept when the server still has them. `headers` go to the URL's
    own host only: a redirect to another must not carry a token along. `size` is what somebody else
    said of it. Raises FetchError; `room` is called with the bytes still to come before any is
    written.
    """
    part = path.with_name(path.name + ".part")
    sure = checksum is not None or size is not None
    failures, furthest = 0, _size(part)
    while True:
        try:
            told = _attempt(url, part, room, progress, headers or {}, sure=sure)
            break
        except urllib.error.HTTPError as error:
            if error.code < 500 and error.code not in (408, 429):
                raise FetchError(f"{url} answers {error.code} {error.reason}") from error
            reason: Exception = error
        except (OSError, HTTPException) as error:
            if _no_room(error):  # trying again brings none
                raise
            reason = error
        failures = failures + 1 if _size(part) <= furthest else 1
        furthest = max(furthest, _size(part))
        if failures >= TRIES:
            raise FetchError(f"{url} failed {failures} times without progress: {reason}")
        time.sleep(min(30.0, 0.2 * 2**failures))
    verified = verify(part, told if size is None else size, checksum, url)
    finish(part, path)
    return verified


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _attempt(
    url: str,
    part: Path,
    room: Callable[[int | None], None],
    progress: Callable[[int, int | None], None],
    headers: Mapping[str, str],
    *,
    sure: bool,
) -> int | None:
    """One connection: the rest of the file. The full size, None when the server does not say.

    `sure`: what comes can be compared with something besides the server's word on its size.
    """
    have, validator = _size(part), version_of(part)
    if have and not validator:
        have = 0  # the file may have changed meanwhile: half of each would be worse than waiting
    request = urllib.request.Request(url, headers={"Accept-Encoding": "identity"})  # noqa: S310
    for name, value in headers.items():
        request.add_unredirected_header(name, value)
    if have and validator:
        request.add_header("Range", f"bytes={have}-")
        request.add_header("If-Range", validator)
    try:
        answer = urllib.request.urlopen(request, timeout=READ_TIMEOUT_S)  # noqa: S310
    except urllib.error.HTTPError as error:
        if error.code != 416 or not have:
            raise
        if error.headers.get("Content-Range") == f"bytes */{have}":
            return have  # all of it is here: its agent was killed before it was verified
        drop(part)  # more bytes here than there: start over
        return _attempt(url, part, room, progress, headers, sure=sure)
    with answer:
        _as_asked(answer, part, have, url)
        start, total = _extent(answer)
        if total is None and not answer.chunked and not sure:
            raise FetchError(
                f"{url}: its server tells no size, so nobody could tell whether all of it came: "
                "put #sha256=HEX behind the source, or let the server send Content-Length"
            )
        room(None if total is None else total - start)
        tag = answer.headers.get("ETag") or ""
        valid = tag if tag and not tag.startswith("W/") else answer.headers.get("Last-Modified")
        facts_of(part).write_text(json.dumps(valid))
        try:
            _copy(answer, part, start, total, progress)
        except (NoRoom, OSError) as error:
            # Nobody knows whether it would ever fit, and what stays keeps all others from coming.
            if total is None and _no_room(error):
                drop(part)
            raise
        # An answer in chunks says where it ends, so what came is all there is.
        return _size(part) if total is None and answer.chunked else total


def _no_room(error: Exception) -> bool:
    return isinstance(error, NoRoom) or getattr(error, "errno", None) == errno.ENOSPC


def _extent(answer: Any) -> tuple[int, int | None]:
    """Where in the file an answer begins, and the file's size."""
    start, whole = part_said(answer.headers.get("Content-Range") if answer.status == 206 else None)
    length = answer.headers.get("Content-Length")
    return start or 0, whole or (None if length is None else (start or 0) + int(length))


def _as_asked(answer: Any, part: Path, have: int, url: str) -> None:
    """Raise unless the bytes that come are the file's own and go on where those that are here end.

    Two parts that do not meet have a plausible size and would be served.
    """
    coding = answer.headers.get("Content-Encoding", "identity")
    if coding != "identity":
        drop(part)
        raise FetchError(
            f"{url} comes as {coding}, though the bytes of the file itself were asked for: "
            "let its server send it as it is"
        )
    if answer.status == 206 and part_said(answer.headers.get("Content-Range"))[0] != have:
        drop(part)  # the next try takes it from the beginning, which needs no range
        said = answer.headers.get("Content-Range") or "no Content-Range"
        raise HTTPException(f"asked for what follows byte {have}, its server answers 206 ({said})")


def _copy(
    answer: Any,
    part: Path,
    start: int,
    total: int | None,
    progress: Callable[[int, int | None], None],
) -> None:
    with part.open("r+b" if start else "wb") as file:
        file.seek(start)
        done = start
        # read1: what came is on disk at once, and a killed download resumes after it.
        while block := answer.read1(BLOCK):
            file.write(block)
            file.flush()
            done += len(block)
            progress(done, total)
    if total is not None and done < total:
        raise HTTPException(f"the connection ended after {done} of {total} bytes")
