"""The clock that the router measures by: seconds that go on while the machine runs."""

from __future__ import annotations

import time
from typing import Final

monotonic: Final = time.monotonic
"""Bound once: a request looks at it ten times, and finding it in its module takes as long as it."""
