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
_SHA256 = re.compile(r"sha256=([0-9a-fA-F]{64})")


class BadSource(ValueError):
    """A source that nobody can fetch; the message says which and what forms there are."""


@dataclass(frozen=True, slots=True)
class Source:
    """One place of weights. `kind` is file, http or hf."""

    text: str
    kind: str
    path: Path | None = None
    url: str | None = None
    sha256: str | None = None
    repo: str | None = None
    revision: str | None = None
    file: str | None = None

    def folder(self, weights_dir: Path) -> Path:
        """Its own folder below the weights directory: readable, and never shared by two sources."""
        mark = hashlib.sha256(self.text.encode()).hexdigest()[:12]
        name = self.repo or Path(unquote(urlsplit(self.url or "").path)).name or "weights"
        return weights_dir / self.kind / f"{re.sub(r'[^A-Za-z0-9.-]+', '--', name)[:80]}-{mark}"

    @property
    def file_name(self) -> str:
        """The name of a single downloaded file."""
        return Path(unquote(urlsplit(self.url or "").path)).name or "weights"


def parse_source(text: str) -> Source:
    """Read file:/path, https://..[#sha256=HEX] or hf:org/repo[@rev][/file]; raises BadSource."""
    scheme = urlsplit(text).scheme
    if scheme == "file":
        path = Path(unquote(urlsplit(text).path))
        if not path.is_absolute():
            raise BadSource(f"source {text} needs an absolute path, as file:/models/a.gguf")
        return Source(text, "file", path=path)
    if scheme in ("http", "https"):
        url, _, fragment = text.partition("#")
        found = _SHA256.fullmatch(fragment)
        if fragment and not found:
            raise BadSource(f"source {text}: after # only sha256=<64 hex digits> is understood")
        return Source(text, "http", url=url, sha256=found[1].lower() if found else None)
    if scheme == "hf":
        match = _HF.fullmatch(text.removeprefix("hf:"))
        if match is None or ".." in text:
            raise BadSource(f"source {text} is not hf:org/repo[@revision][/file]")
        return Source(text, "hf", repo=match["repo"], revision=match["rev"], file=match["file"])
    raise BadSource(
        f"source {text} is none of file:/path, https://host/file[#sha256=HEX] "
        "and hf:org/repo[@revision][/file]"
    )


def read_note(folder: Path) -> dict[str, object]:
    """What is written of a source's folder; empty when nothing is or it is damaged."""
    try:
        note = json.loads((folder / NOTE).read_bytes())
    except (OSError, ValueError):
        return {}
    return note if isinstance(note, dict) else {}
