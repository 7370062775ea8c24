"""The client port described for machines: GET /openapi.json (OpenAPI 3.1). Pure.

Made of the routes themselves, so none is forgotten. It says what this router reads and promises;
every other field of a body is the engine's and passes untouched.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import orjson

from controller import __version__
from controller.router.dialect import MESSAGES
from controller.router.routes import Kind, paths

if TYPE_CHECKING:
    from controller.router.routes import Route

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
ANYTHING: Schema = {}
LIST: Schema = {"type": "array", "items": ANYTHING}
FIELDS: dict[str, dict[str, Schema]] = {
    "chat.completions": {"messages": LIST},
    "completions": {"prompt": ANYTHING},
    "embeddings": {"input": ANYTHING},
    "responses": {"input": ANYTHING},
    "messages": {"messages": LIST, "max_tokens": {"type": "integer"}},
    "messages.count_tokens": {"messages": LIST},
    "rerank": {"query": ANYTHING, "documents": LIST},
    "score": {},
    "audio.transcriptions": {"file": {"type": "string", "format": "binary"}},
    "audio.translations": {"file": {"type": "string", "format": "binary"}},
    "audio.speech": {"input": TEXT},
    "images.generations": {"prompt": TEXT},
    "tokenize": {},
    "detokenize": {},
}
"""What each endpoint's body usually has beside the model; the engine is the judge of it."""
SUMMARIES = {
    Kind.INFER: "Answered by an engine that serves the model",
    Kind.MODELS: "Models and aliases that this key may use",
    Kind.MODEL: "One of them",
    Kind.HEALTH: "Whether this process lives",
    Kind.READY: "Whether a load balancer should send requests here",
    Kind.OPENAPI: "This document",
}
ERROR: Schema = {
    "type": "object",
    "required": ["error"],
    "properties": {"error": {
        "type": "object",
        "required": ["message", "type", "param", "code"],
        "properties": {
            "message": TEXT,
            "type": TEXT,
            "param": {"type": ["string", "null"]},
            "code": {"type": ["string", "integer", "null"]},
        },
    }},
}  # fmt: skip
ANTHROPIC_ERROR: Schema = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": TEXT, "message": TEXT},
        },
    },
}


@cache
def document() -> bytes:
    """The description as JSON, the same bytes for every asker."""
    described: dict[str, Any] = {}
    for path, route in paths():
        for method in sorted(route.methods - {b"HEAD"}):
            place = described.setdefault(path, {})
            place[method.decode().lower()] = _operation(path, route)
    return orjson.dumps({
        "openapi": "3.1.0",
        "info": {"title": "llmgw client API", "version": __version__},
        "paths": described,
        "components": {
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
            "schemas": {"Error": ERROR, "AnthropicError": ANTHROPIC_ERROR},
        },
    })  # fmt: skip


def _operation(path: str, route: Route) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": path.strip("/").replace("/", "_").replace("{", "").replace("}", ""),
        "summary": SUMMARIES[route.kind],
        "responses": _responses(route),
        "security": [{"bearer": []}, {"x-api-key": []}] if route.needs_key else [],
    }
    if route.kind is Kind.INFER:
        operation["requestBody"] = {"required": True, "content": _bodies(route)}
    if route.kind is Kind.MODEL:
        where = {"name": "model", "in": "path", "required": True, "schema": TEXT}
        operation["parameters"] = [where]
    return operation


def _bodies(route: Route) -> dict[str, Any]:
    fields = {"model": {"type": "string", "minLength": 1}, **FIELDS[route.name]}
    if route.writes or route.form:
        fields["stream"] = {"type": "boolean"}
    schema = {"type": "object", "required": ["model"], "properties": fields}
    kind = "multipart/form-data" if route.form else "application/json"
    return {kind: {"schema": schema}}


def _responses(route: Route) -> dict[str, Any]:
    error = "AnthropicError" if route.dialect is MESSAGES else "Error"
    told = {"application/json": {"schema": {"$ref": f"#/components/schemas/{error}"}}}
    refused = {"description": "What is wrong, and what to do", "content": told}
    kind = "*/*" if route.kind is Kind.INFER else "application/json"
    answers: dict[str, Any] = {"200": {"description": "The answer", "content": {kind: {}}}}
    if route.kind is Kind.READY:
        reasons = {"application/json": {"schema": {"type": "object"}}}
        answers["503"] = {"description": "Not ready, and why", "content": reasons}
    if route.needs_key:
        answers |= {"4XX": refused, "5XX": refused}
    return answers
