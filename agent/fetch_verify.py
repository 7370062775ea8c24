"""What came is what was meant: sizes and checksums of one downloaded file (case D25).

Runs in the child process of agent.fetch, several files at a time.
Called by fetch_http and fetch_s3.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path

BLOCK = 1 << 20
_RANGE = re.compile(r"bytes (\d+)-\d+/(?:(\d+)|\*)")


class FetchError(Exception):
    """The download failed for good; the message says which, why and what to do."""


class NoRoom(FetchError):
    """The disk filled meanwhile. Bytes of a download whose size nobody tells go, others stay."""


@dataclass(frozen=True, slots=True)
class Checksum:
    """What a file's bytes must come to. `kind` is sha256, md5 or git (the id of a git blob)."""

    kind: str
    value: str


@dataclass(frozen=True, slots=True)
class Brought:
    """What a download brought: how each file was verified, and the one file where it is only one.

    The words are sha256, md5, git and size.
    """

    files: dict[str, str]
    single: str | None = None


def digest(path: Path, kind: str) -> str:
    """The checksum of a file's bytes as hex digits."""
    with path.open("rb") as file:
        if kind != "git":
            return hashlib.file_digest(file, kind).hexdigest()
        sha1 = hashlib.sha1(b"blob %d\0" % path.stat().st_size, usedforsecurity=False)
        while block := file.read(BLOCK):
            sha1.update(block)
        return sha1.hexdigest()


def verify(part: Path, total: int | None, checksum: Checksum | None, what: str) -> str:
    """How the file was found good; FetchError, and the file is gone, when it is not."""
    size = part.stat().st_size
    if total is not None and size != total:
        drop(part)
        raise FetchError(f"{what}: {size} bytes came and {total} were announced")
    if checksum is None:
        assert total is not None, f"{what}: nothing to compare with"
        return "size"
    found = digest(part, checksum.kind)
    if found != checksum.value:
        drop(part)  # never served, and never taken for a good beginning
        raise FetchError(
            f"{what}: its {checksum.kind} is {found} and {checksum.value} was expected; removed"
        )
    return checksum.kind


def part_said(content_range: str | None) -> tuple[int | None, int | None]:
    """First byte and whole size that a Content-Range speaks of; None for what it does not say."""
    found = _RANGE.fullmatch(content_range or "")
    if found is None:
        return None, None
    return int(found[1]), int(found[2]) if found[2] else None


def facts_of(part: Path) -> Path:
    """Where the mark of the version lies that an unfinished file belongs to."""
    return part.with_name(part.name + ".json")


def version_of(part: Path) -> str | None:
    """The mark (an ETag or a time) of the version that `part` is the beginning of."""
    try:
        found = json.loads(facts_of(part).read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, str) else None


def drop(part: Path) -> None:
    """Forget an unfinished file."""
    part.unlink(missing_ok=True)
    facts_of(part).unlink(missing_ok=True)


def finish(part: Path, path: Path) -> None:
    """Give a verified file its name."""
    part.replace(path)
    facts_of(part).unlink(missing_ok=True)
