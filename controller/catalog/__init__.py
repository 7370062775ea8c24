"""The catalog: which models and pools there should be, read from TOML or JSON, checked, applied.

`definition.py` and `profile.py` hold the form, `faults.py` says what is wrong with a document,
`checks.py` compares it with what else is there, `apply.py` writes it. Called by the admin API, on
SIGHUP and by `llmgwctl up`.
"""

from __future__ import annotations

from controller.catalog.apply import Change, apply, apply_file
from controller.catalog.definition import Catalog, Model, Pool
from controller.catalog.faults import CatalogError
from controller.catalog.profile import Profile, fingerprint
from controller.catalog.reading import parse, read_file

__all__ = [
    "Catalog",
    "CatalogError",
    "Change",
    "Model",
    "Pool",
    "Profile",
    "apply",
    "apply_file",
    "fingerprint",
    "parse",
    "read_file",
]
