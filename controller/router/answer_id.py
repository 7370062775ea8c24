"""What an engine calls its answer, as data: cut, cleaned, never a key of ours (case B10). Pure."""

from __future__ import annotations

import re
from typing import Final

SEARCHED_BYTES: Final = 512
LONGEST: Final = 128
_USUAL: Final = b'{"id":"'
_ID: Final = re.compile(rb'"id"\s*:\s*"([^"]{0,128})')


def answer_id(beginning: bytes) -> str | None:
    """The first id in the first bytes of an answer, plain or streamed, as it is written there.

    None when there is none, or an empty one. What is not printable becomes a question mark.
    """
    if beginning[: len(_USUAL)] == _USUAL:
        told = beginning[len(_USUAL) : len(_USUAL) + LONGEST].partition(b'"')[0]
    else:
        found = _ID.search(beginning, 0, SEARCHED_BYTES)
        told = b"" if found is None else found[1]
    if not told:
        return None
    text = told.decode("ascii", "replace")
    return text if text.isprintable() else "".join(c if c.isprintable() else "?" for c in text)
