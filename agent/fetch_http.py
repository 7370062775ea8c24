"""Download one file over HTTP with resume, size check and, where given, a checksum.

Runs in the child process of agent.fetch; blocking by design.
"""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from http.client import HTTPException
from typing import TYPE_CHECKING, Any

from agent.fetch_verify import BLOCK, Checksum, FetchError, facts_of, finish, verify, version_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

READ_TIMEOUT_S = 30
TRIES = 5
"""Tries in a row that brought no byte; any progress starts the count again."""


def fetch_file(
    url: str,
    path: Path,
    checksum: Checksum | None,
    room: Callable[[int | None], None],
    progress: Callable[[int, int | None], None],
    headers: Mapping[str, str] | None = None,
) -> str:
    """Bring a URL to `path`; how it was verified, as a word of fetch_verify.

    Bytes already in `path.part` are kept when the server still has them. `headers` go to the URL's
    own host only: a redirect to another must not carry a token along. Raises FetchError; `room` is
    called with the bytes still to come before any is written.
    """
    part = path.with_name(path.name + ".part")
    failures = 0
    while True:
        before = _size(part)
        try:
            total = _attempt(url, part, room, progress, headers or {})
            break
        except urllib.error.HTTPError as error:
            if error.code < 500 and error.code not in (408, 429):
                raise FetchError(f"{url} answers {error.code} {error.reason}") from error
            reason: Exception = error
        except (OSError, HTTPException) as error:
            if getattr(error, "errno", None) == 28:  # ENOSPC: trying again brings no space
                raise
            reason = error
        failures = failures + 1 if _size(part) <= before else 1
        if failures >= TRIES:
            raise FetchError(f"{url} failed {failures} times without progress: {reason}")
        time.sleep(min(30.0, 0.2 * 2**failures))
    verified = verify(part, total, checksum, url)
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
) -> int | None:
    """One connection: the rest of the file. The full size, None when the server does not say."""
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
        if error.code != 416:
            raise
        part.unlink()  # more bytes here than there: start over
        return _attempt(url, part, room, progress, headers)
    with answer:
        start = have if answer.status == 206 else 0
        length = answer.headers.get("Content-Length")
        total = None if length is None else start + int(length)
        room(None if length is None else int(length))
        tag = answer.headers.get("ETag") or ""
        valid = tag if tag and not tag.startswith("W/") else answer.headers.get("Last-Modified")
        facts_of(part).write_text(json.dumps(valid))
        _copy(answer, part, start, total, progress)
    return total


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
