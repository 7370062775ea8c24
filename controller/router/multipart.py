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
_BOUNDARY = re.compile(rb'(?i);\s*boundary=(?:"([^"]{1,70})"|([^\s;,"]{1,70}))\s*(?:;|$)')
_DISPOSITION = re.compile(rb"(?im)^content-disposition:[ \t]*form-data[ \t]*(;.*)$")
_NAME = re.compile(rb'(?i);\s*name=(?:"([^"]*)"|([^\s;"]+))')
_FILE = re.compile(rb"(?i);\s*filename\*?=")


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
    found = _BOUNDARY.search(content_type)
    if found is None:
        return _bad("its Content-Type names no boundary")
    mark = b"--" + (found[1] or found[2])
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
        name = _name_of(body[at:content])
        if name in wanted:
            if name in fields:
                return _bad(f"the field '{name.decode()}' comes twice")
            field = _field(body, content, end)
            if field is None:
                return _bad(f"the field '{name.decode()}' is too long or not UTF-8")
            fields[name] = field
        at = end + 2 + len(mark)
    return _bad(f"it has more than {MOST_PARTS} parts")


def _name_of(head: bytes) -> bytes:
    told = _DISPOSITION.search(head.replace(b"\r\n", b"\n"))
    if told is None or _FILE.search(told[1]):
        return b""
    name = _NAME.search(told[1])
    return b"" if name is None else name[1] or name[2] or b""


def _field(body: bytes, start: int, end: int) -> Field | None:
    if end - start > MOST_VALUE_BYTES:
        return None
    try:
        return Field(body[start:end].decode(), start, end)
    except UnicodeDecodeError:
        return None


def _bad(why: str) -> ApiError:
    return invalid("invalid_form", f"The request body is not a valid form: {why}.")
