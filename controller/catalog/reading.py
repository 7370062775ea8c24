"""From text to a checked `Catalog`: TOML or JSON, told apart by content."""

from __future__ import annotations

import tomllib
from typing import TYPE_CHECKING, Any

import orjson
from pydantic import ValidationError

from controller.catalog.definition import Catalog
from controller.catalog.faults import CatalogError, explain

if TYPE_CHECKING:
    from pathlib import Path

MOST_BYTES = 4 * 1024 * 1024


def document_of(text: str, name: str) -> dict[str, Any]:
    """The document in a TOML or JSON text; CatalogError says where it is broken."""
    try:
        found = orjson.loads(text) if text.lstrip().startswith("{") else tomllib.loads(text)
    except orjson.JSONDecodeError as error:
        raise CatalogError(f"{name} is not JSON: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise CatalogError(f"{name} is not TOML: {error}") from None
    if not isinstance(found, dict):
        raise CatalogError(f"{name} is a JSON {type(found).__name__}, not an object")
    if not found:  # a file cut to nothing must not take every model away
        raise CatalogError(
            f"{name} is empty: to declare that there are no models, write models = []"
        )
    return found


def parse(document: dict[str, Any], name: str) -> Catalog:
    """The catalog in a document; CatalogError names each fault."""
    try:
        return Catalog.model_validate(document)
    except ValidationError as error:
        raise CatalogError(f"{name}: {explain(error, Catalog, document)}") from None


def read_text(path: Path) -> str:
    """A file's text; CatalogError when it cannot be read. Blocks: call it in a thread."""
    try:
        with path.open("rb") as file:
            raw = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise CatalogError(f"catalog file {path} cannot be read: {error.strerror}") from None
    if len(raw) > MOST_BYTES:
        raise CatalogError(f"catalog file {path} is over {MOST_BYTES // 2**20} MiB: split it")
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise CatalogError(
            f"catalog file {path} is not UTF-8: {error.reason} at byte {error.start}"
        ) from None


def read_file(path: Path) -> Catalog:
    """The catalog in a file. Blocks: call it in a thread."""
    return parse(document_of(read_text(path), str(path)), str(path))
