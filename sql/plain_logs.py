"""Imported first by long-running processes: structlog without rich.

structlog loads rich when it finds it, for tracebacks that show local variables. Those may hold
keys, and loading costs each process a tenth of a second of its start. Programs for people
(llmgwctl) use rich and do not import this.
"""

from __future__ import annotations

import sys

if "rich" not in sys.modules:
    sys.modules["rich"] = None  # type: ignore[assignment] # makes "import rich" an ImportError
    import structlog.dev

    del sys.modules["rich"]
    assert structlog.dev is not None
