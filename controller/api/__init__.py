"""The admin API: shows and changes the cluster over HTTP, from the SQL views that psql shows.

`routes.py` is the one table of verbs and paths; server, OpenAPI and tests are made from it.
"""

from __future__ import annotations

from controller.api.server import make_app

__all__ = ["make_app"]
