"""The OpenAPI 3.1 document of the admin API, made from the route table."""

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING, Any, Final, get_args, get_origin

from pydantic.json_schema import models_json_schema

from controller import __version__
from controller.api.paging import NEXT_HEADER, PageQuery
from controller.api.routes import PREFIX, ROUTES
from controller.api.views import Answer

if TYPE_CHECKING:
    from pydantic import BaseModel

    from controller.api.call import Route

_PATH: Final = re.compile(r"\{(\w+)\}")
_REF: Final = "#/components/schemas/{model}"


class Error(Answer):
    """What went wrong, with which object, why, and what next."""

    error: str


@cache
def document() -> dict[str, Any]:
    """The whole document."""
    forms = {Error} | {form for route in ROUTES for form in _forms(route)}
    ordered = sorted(forms, key=lambda form: form.__name__)
    modes: list[Any] = [
        (form, "serialization" if issubclass(form, Answer) else "validation") for form in ordered
    ]
    refs, definitions = models_json_schema(modes, ref_template=_REF)
    schemas: dict[Any, Any] = {key[0]: schema for key, schema in refs.items()}
    paths: dict[str, dict[str, Any]] = {}
    for route in ROUTES:
        paths.setdefault(PREFIX + route.path, {})[route.verb.lower()] = _operation(route, schemas)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "llmgw admin API",
            "version": __version__,
            "description": "An absent field is unknown; a zero was measured.",
        },
        "paths": paths,
        "components": {
            "schemas": definitions.get("$defs", {}),
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"token": []}],
    }


def _forms(route: Route) -> list[type[BaseModel]]:
    answer = get_args(route.answer)[0] if get_origin(route.answer) is list else route.answer
    return [form for form in (answer, route.body) if form is not None]


def _operation(route: Route, schemas: dict[Any, Any]) -> dict[str, Any]:
    error = {"application/json": {"schema": schemas[Error]}}
    found: dict[str, Any] = {
        "summary": route.summary,
        "operationId": f"{route.handler.__module__.rpartition('.')[2]}_{route.handler.__name__}",
        "parameters": _parameters(route),
        "responses": {
            "200": _success(route, schemas),
            "default": {"description": "Refused or failed", "content": error},
        },
    }
    if route.body is not None:
        content = {"application/json": {"schema": schemas[route.body]}}
        found["requestBody"] = {"required": True, "content": content}
    return found


def _success(route: Route, schemas: dict[Any, Any]) -> dict[str, Any]:
    if route.answer is None:
        text = {"schema": {"type": "string"}}
        return {
            "description": route.summary,
            "content": {"text/plain": text, "text/event-stream": text},
        }
    schema = schemas[_forms(route)[0]]
    if get_origin(route.answer) is list:
        schema = {"type": "array", "items": schema}
    content = {"application/json": {"schema": schema}}
    found: dict[str, Any] = {"description": route.summary, "content": content}
    if route.query is not None and issubclass(route.query, PageQuery):
        said = "cursor of the next page; absent on the last"
        header = {"description": said, "schema": {"type": "string"}}
        found["headers"] = {NEXT_HEADER: header}
    return found


def _parameters(route: Route) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in _PATH.findall(route.path)
    ]
    if route.query is None:
        return found
    schema = route.query.model_json_schema()
    required = schema.get("required", [])
    for name, field in schema["properties"].items():
        found.append({"name": name, "in": "query", "required": name in required, "schema": field})
    return found
