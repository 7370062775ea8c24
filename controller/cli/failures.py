"""How a command ends other than well. Exit codes: 1 refused or failed, 2 usage, 124, 130."""

from __future__ import annotations

from typing import Final

FAILED: Final = 1
USAGE: Final = 2
TIMEOUT: Final = 124
INTERRUPTED: Final = 130


class Failure(Exception):
    """Refused or failed; the message is for people."""

    code = FAILED


class TimedOut(Failure):
    """No answer, or not done, in the time allowed."""

    code = TIMEOUT
