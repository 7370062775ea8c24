"""A multipart/form-data body: where the few fields lie that we read. Pure.

An upload is passed over by searching for the next boundary, never copied. The number of parts and
what is read of each are bounded. The form is RFC 7578; anything that two parsers could read in
two ways is refused.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from controller.router.errors import ApiError, invalid

MOST_PARTS = 64
MOST_HEAD_BYTES = 4096
MOST_VALUE_BYTES = 1024
_LINE = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+:[^\r\n\0]*")
_PARAM = re.compile(
    rb';[ \t]*([!#$&+.^_`|~0-9A-Za-z*-]+)=(?:"((?:[^"\\]|\\[^\\]|\\\\(?!"))*)"|([^\s;,"]+))[ \t]*'
)
_DISPOSITION = b"content-disposition:"
_MOST_BOUNDARY_BYTES = 70
_CHARSETS = frozenset((b"utf-8", b"us-ascii", b"iso-8859-1"))
"""The same names in all of these; in others (utf-7, cp037) engines read `model` where we do not."""


class Field(NamedTuple):
    """A short field: its value lies at `start` to `end` of the body."""

    value: str
    start: int
    end: int


def is_form(content_type: bytes) -> bool:
    return content_type[:19].lower() == b"multipart/form-data"


def find_fields(
    body: bytes, content_type: bytes, wanted: frozenset[bytes]
) -> dict[bytes, Field] | ApiError:
    """The `wanted` fields of a form; files are none, and one that comes twice is an error."""
    params = _params(content_type, b"multipart/form-data") or {}
    boundary = params.get(b"boundary", b"")
    if params.get(b"charset", b"utf-8").lower() not in _CHARSETS:
        return _bad("its charset is not utf-8")
    if not 0 < len(boundary) <= _MOST_BOUNDARY_BYTES:
        return _bad("its Content-Type names no boundary")
    mark = b"--" + boundary
    start = 0 if body.startswith(mark) else body.find(b"\r\n" + mark) + 2
    if start == 1:
        return _bad("its first boundary is missing")
    fields: dict[bytes, Field] = {}
    at = start + len(mark)
    for _ in range(MOST_PARTS + 1):
        if body[at : at + 2] == b"--":
            return fields
        content = body.find(b"\r\n\r\n", at, at + MOST_HEAD_BYTES) + 4
        end = body.find(b"\r\n" + mark, content)
        if body[at : at + 2] != b"\r\n" or content == 3 or end < 0:
            return _bad("a part has no complete head, or is not closed by the boundary")
        empty = content == at + 4  # compiled, a slice may not end before it begins
        told = _read_head(b"" if empty else body[at + 2 : content - 4])
        if told is None:
            return _bad("the head of a part could be read in two ways")
        name, is_file = told
        if name in wanted:
            if is_file:
                return _bad(f"the field '{name.decode()}' is a file")
            if name in fields:
                return _bad(f"the field '{name.decode()}' comes twice")
            field = _field(body, content, end)
            if field is None:
                return _bad(f"the field '{name.decode()}' is too long or not UTF-8")
            fields[name] = field
        at = end + 2 + len(mark)
    return _bad(f"it has more than {MOST_PARTS} parts")


def _read_head(head: bytes) -> tuple[bytes, bool] | None:
    """The name of a part, and whether it is a file; None where parsers differ on that.

    Some see a field where others see a file, or none: with two names, escapes, another word than
    form-data. An engine must not find there a model that we did not.
    """
    told = []
    for line in head.split(b"\r\n"):
        if _LINE.fullmatch(line) is None:
            return None
        if line[: len(_DISPOSITION)].lower() == _DISPOSITION:
            told.append(line[len(_DISPOSITION) :])
    params = _params(told[0], b"form-data") if len(told) == 1 else None
    if params is None or b"name" not in params:
        return None
    return params[b"name"], any(word.startswith(b"filename") for word in params)


def _params(value: bytes, kind: bytes) -> dict[bytes, bytes] | None:
    """The parameters of a header that says `kind`; None where parsers differ on them."""
    value = value.removesuffix(b";")
    at = len(value.partition(b";")[0])
    if value[:at].strip(b" \t").lower() != kind:
        return None
    params: dict[bytes, bytes] = {}
    while at < len(value):
        found = _PARAM.match(value, at)
        if found is None:
            return None
        word, text = found[1].lower(), found[2] or found[3] or b""
        odd = b"*" in word or b"\\" in text
        if word in params or (odd and not word.startswith(b"filename")):
            return None
        params[word] = text
        at = found.end()
    return params


def _field(body: bytes, start: int, end: int) -> Field | None:
    if end - start > MOST_VALUE_BYTES:
        return None
    try:
        return Field(body[start:end].decode(), start, end)
    except UnicodeDecodeError:
        return None


def _bad(why: str) -> ApiError:
    return invalid("invalid_form", f"The request body is not a valid form: {why}.")
