"""Answers of real engines out of the collection of captures, as bodies that can be sent again."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
_BLOCK = re.compile(
    rb"(?m)^> (GET|POST) (\S+)[^\n]*\n(?:> ([^\n]*)\n)?(?:<[^\n]*\n)?HTTP/1.1 (\d+)"
)


ROOT = Path(os.environ.get("LLMGW_CAPTURES", REPOSITORY.parent / "shared" / "captures"))


def engines_folder() -> Path:
    """Folder of the captures; the test is skipped where it is not at hand."""
    if not ROOT.is_dir():
        pytest.skip(f"no captures at {ROOT}; set LLMGW_CAPTURES to replay them")
    return ROOT / "engines"


@dataclass
class Captured:
    """One answer: where it is from, what was asked, what came."""

    name: str
    path: str
    asked: bytes
    status: int
    kind: str
    body: bytes

    @property
    def streamed(self) -> bool:
        return self.kind.startswith("text/event-stream")

    @property
    def whole(self) -> bool:
        """Whether nobody shortened it by hand ("... 128 numbers") for the collection."""
        return self.streamed or b" numbers]" not in self.body


def raw_answers(name: str) -> list[Captured]:
    """The answers in a capture of raw HTTP (`*.txt`)."""
    text = (engines_folder() / name).read_bytes()
    found = list(_BLOCK.finditer(text))
    ends = [match.start() for match in found[1:]] + [len(text)]
    answers = []
    for number, (match, end) in enumerate(zip(found, ends, strict=True)):
        block = text[match.start(4) : end]
        head, _, body = block.partition(b"\n\n")
        headers = dict(re.findall(r"(?m)^([\w-]+): *(.*)$", head.decode().lower()))
        if "chunked" in headers.get("transfer-encoding", ""):
            body = _unchunked(body)
        elif "content-length" in headers:
            body = body[: int(headers["content-length"])].partition(b"\n\n# ")[0]
        kind = headers.get("content-type", "")
        answers.append(
            Captured(
                f"{name}#{number}", match[2].decode(), match[3] or b"", int(match[4]), kind, body
            )
        )
    return answers


def _unchunked(text: bytes) -> bytes:
    body = b""
    while True:
        size, _, text = text.partition(b"\n")
        length = int(size or b"0", 16)
        if not length:
            return body
        body, text = body + text[:length], text[length:].lstrip(b"\n")


def events(name: str, *, named: bool = False, done: bool = True) -> Captured:
    """A stream out of the data of its events (`*.chunks.txt`); `named`: with `event:` lines."""
    body = b""
    for line in (engines_folder() / name).read_bytes().splitlines():
        if named:
            body += b"event: " + json.loads(line)["type"].encode() + b"\n"
        body += b"data: " + line + b"\n\n"
    body += b"data: [DONE]\n\n" if done else b""
    return Captured(name, "", b"", 200, "text/event-stream", body)
