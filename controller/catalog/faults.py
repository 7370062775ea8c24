"""What is wrong with a document, in words: object, field, why, and the nearest right name.

Turns pydantic's errors into one line for the catalog, request bodies and query parameters alike.
"""

from __future__ import annotations

import difflib
import types
from typing import TYPE_CHECKING, Any, Final, Union, get_args, get_origin

from pydantic import BaseModel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pydantic import ValidationError
    from pydantic_core import ErrorDetails

MOST: Final = 5
_SINGULAR: Final = {"models": "model", "profiles": "profile", "pools": "pool", "aliases": "alias"}


class CatalogError(ValueError):
    """A definition that cannot stand; the message names object, fault and next step."""


def explain(error: ValidationError, form: type[BaseModel], document: Any) -> str:
    """One sentence per fault, at most five, then how many more there are."""
    found = error.errors(include_url=False)
    lines = list(dict.fromkeys(_line(fault, form, document) for fault in found))
    more = [f"and {len(lines) - MOST} more"] if len(lines) > MOST else []
    return "; ".join(lines[:MOST] + more)


def nearest(name: str, names: Sequence[str], what: str = "field") -> str:
    """`did you mean 'args'? ` or the list of right names."""
    close = difflib.get_close_matches(name, names, 1, 0.6)
    if close:
        return f"did you mean {close[0]!r}?"
    return f"the {what}s are {', '.join(names)}" if names else f"it takes no {what}s"


def _line(fault: ErrorDetails, form: type[BaseModel], document: Any) -> str:
    where = fault["loc"]
    message = _message(fault, form)
    last = where[-1] if where else None
    unnamed = fault["type"] in ("extra_forbidden", "missing")
    objects = _objects(where[:-1] if unnamed or isinstance(last, str) else where, document)
    if not unnamed and isinstance(last, str) and last != "[key]":
        message = f"{last}: {message}"
    return f"{objects}: {message}" if objects else message


def _message(fault: ErrorDetails, form: type[BaseModel]) -> str:
    last = str(fault["loc"][-1]) if fault["loc"] else ""
    if fault["type"] == "extra_forbidden":
        owner = _form_at(form, fault["loc"][:-1])
        return f"unknown field {last!r}, {nearest(last, list(owner.model_fields) if owner else [])}"
    if fault["type"] == "missing":
        return f"the field {last!r} is missing"
    if fault["type"] == "value_error":
        return str(fault.get("ctx", {}).get("error", fault["msg"]))
    given = fault.get("input")
    # "Input should be less than 64", "String should match pattern ..."
    subject, should, message = fault["msg"].partition(" should ")
    plain = given is None or isinstance(given, str | int | float | bool)
    said = f"must {message}" if should else f"is wrong: {subject}"
    return said + (f", not {str(given)[:100]!r}" if plain else "")


def _objects(where: Sequence[int | str], document: Any) -> str:
    """`model tiny, profile cpu` for ("models", 0, "profiles", 1)."""
    parts: list[str] = []
    here, kind = document, ""
    for step in where:
        try:
            here = here[step]
        except (KeyError, IndexError, TypeError):
            here = None
        if isinstance(step, int):
            name = here.get("name") if isinstance(here, dict) else None
            named = name if isinstance(name, str) else f"number {step + 1}"
            if kind in _SINGULAR:
                parts.append(f"{_SINGULAR[kind]} {named}")
            else:
                parts[-1:] = [f"{kind} {named}"]
        elif kind == "pools":
            parts.append(f"pool {step}")
            kind = ""
            continue
        elif step not in _SINGULAR:
            parts.append(step)
        kind = step if isinstance(step, str) else ""
    name = document.get("name") if isinstance(document, dict) else None
    if isinstance(name, str) and name:
        parts.insert(0, name)
    return ", ".join(parts)


def _form_at(form: type[BaseModel] | None, where: Sequence[int | str]) -> type[BaseModel] | None:
    """The form that the path leads to, through lists, dicts and options."""
    for step in where:
        if form is None:
            return None
        field = form.model_fields.get(str(step))
        if field is not None:
            form = _form_in(field.annotation)
    return form


def _form_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) in (list, dict, tuple, Union, types.UnionType):
        return next((found for part in get_args(annotation) if (found := _form_in(part))), None)
    return None
