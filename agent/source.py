"""Where weights come from and where they lie: a source's words as a value and a folder."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

NOTE = "source.json"
"""Written beside the weights of a source: what they are and whether they are complete."""
_HF = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<rev>[\w.-]+))?(?:/(?P<file>.+))?")
_S3 = re.compile(r"s3:(?://)?(?P<bucket>[A-Za-z0-9][A-Za-z0-9._-]{1,254})(?:/(?P<key>[^#]*))?")
_SHA256 = re.compile(r"sha256=([0-9a-fA-F]{64})")
FORMS = (
    "file:/path, https://host/file[#sha256=HEX], hf:org/repo[@revision][/file] "
    "and s3:bucket/key-or-prefix[#sha256=HEX]"
)


class BadSource(ValueError):
    """A source that nobody can fetch; the message says which and what forms there are."""


@dataclass(frozen=True, slots=True)
class Source:
    """One place of weights. `kind` is file, http, hf or s3."""

    text: str
    kind: str
    path: Path | None = None
    url: str | None = None
    sha256: str | None = None
    repo: str | None = None
    revision: str | None = None
    file: str | None = None
    bucket: str | None = None
    key: str | None = None

    @property
    def name(self) -> str:
        """What it is called, for people and folders."""
        return self.repo or "/".join(filter(None, (self.bucket, self.key))) or self.file_name

    @property
    def single(self) -> str | None:
        """The one file that it names; None for a folder, or where only its server knows."""
        return self.file_name if self.kind == "http" else self.file

    def folder(self, weights_dir: Path) -> Path:
        """Its own folder below the weights directory: readable, and never shared by two sources."""
        mark = hashlib.sha256(self.text.encode()).hexdigest()[:12]
        name = re.sub(r"[^A-Za-z0-9.-]+", "--", self.name)[:80]
        return weights_dir / self.kind / f"{name}-{mark}"

    @property
    def file_name(self) -> str:
        """The name of a single downloaded file."""
        return Path(unquote(urlsplit(self.url or "").path)).name or "weights"


def parse_source(text: str) -> Source:
    """Read a source in one of FORMS; raises BadSource."""
    scheme = urlsplit(text).scheme
    if scheme == "file":
        path = Path(unquote(urlsplit(text).path))
        if not path.is_absolute():
            raise BadSource(f"source {text} needs an absolute path, as file:/models/a.gguf")
        return Source(text, "file", path=path)
    if scheme in ("http", "https"):
        return Source(text, "http", url=text.partition("#")[0], sha256=_sha256(text))
    if scheme == "hf":
        match = _HF.fullmatch(text.removeprefix("hf:"))
        if match is None or ".." in text:
            raise BadSource(f"source {text} is not hf:org/repo[@revision][/file]")
        return Source(text, "hf", repo=match["repo"], revision=match["rev"], file=match["file"])
    if scheme == "s3":
        match = _S3.fullmatch(text.partition("#")[0])
        parts = (match["key"] or "").removesuffix("/").split("/") if match else []
        if match is None or any(p in ("", ".", "..") for p in parts if match["key"]):
            raise BadSource(f"source {text} is not s3:bucket/key-or-prefix[#sha256=HEX]")
        bucket, key = match["bucket"], match["key"] or None
        return Source(text, "s3", sha256=_sha256(text), bucket=bucket, key=key)
    raise BadSource(f"source {text} is none of {FORMS}")


def _sha256(text: str) -> str | None:
    fragment = text.partition("#")[2]
    found = _SHA256.fullmatch(fragment)
    if fragment and not found:
        raise BadSource(f"source {text}: after # only sha256=<64 hex digits> is understood")
    return found[1].lower() if found else None


def read_note(folder: Path) -> dict[str, object]:
    """What is written of a source's folder; empty when nothing is or it is damaged."""
    try:
        note = json.loads((folder / NOTE).read_bytes())
    except (OSError, ValueError):
        return {}
    return note if isinstance(note, dict) else {}


def complete_path(source: Source, folder: Path) -> Path | None:
    """The file or folder to load when all of it is here as it was verified; else None.

    Looks at the size of each file: one that was cut at rest is no more complete (case D25).
    """
    note = read_note(folder)
    if not note.get("complete"):
        return None
    files = note.get("files")  # absent in notes of version 0.1
    for name, facts in files.items() if isinstance(files, dict) else ():
        path = folder / name
        if not path.is_file() or path.stat().st_size != facts["bytes"]:
            return None
    single = source.single or note.get("file")
    path = folder / single if isinstance(single, str) else folder
    return path if path.exists() else None
