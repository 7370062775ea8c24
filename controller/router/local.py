"""Answers that need no engine: the model lists, and health for load balancers."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import orjson

from controller.router import openapi
from controller.router.errors import ApiError, model_not_found
from controller.router.routes import Kind, Route, is_anthropics

if TYPE_CHECKING:
    from controller.router.auth import Key
    from controller.router.core import Core
    from controller.router.http1 import Request
    from controller.router.table import Model


def answer_locally(
    core: Core, route: Route, key: Key | None, request: Request
) -> tuple[int, Any] | ApiError:
    """HTTP status and JSON document of a route that is not for an engine."""
    if route.kind is Kind.HEALTH:
        return 200, {"status": "ok"}
    if route.kind is Kind.READY:
        reasons = core.ready_reasons()
        return (503, {"status": "not ready", "reasons": reasons}) if reasons else (200, _READY)
    if route.kind is Kind.OPENAPI:
        return 200, orjson.Fragment(openapi.document())
    assert key is not None
    anthropic = is_anthropics(request)
    entry = _anthropic_entry if anthropic else _entry
    if route.kind is Kind.MODELS:
        names = sorted(core.fleet.names.items())
        shown = [entry(name, model) for name, model in names if key.allows(model)]
        return 200, _page(shown) if anthropic else {"object": "list", "data": shown}
    model = core.fleet.names.get(route.argument)
    if model is None or not key.allows(model):
        return model_not_found(route.argument)
    return 200, entry(route.argument, model)


_READY = {"status": "ready"}


def _entry(name: str, model: Model) -> dict[str, Any]:
    """With `created` always: strict clients of OpenAI's API read no entry without it."""
    created = model.created or 0
    entry: dict[str, Any] = {
        "id": name, "object": "model", "created": created, "owned_by": "llmgw",
    }  # fmt: skip
    if name != model.name:
        entry["parent"] = model.name  # an alias
    return entry


def _anthropic_entry(name: str, model: Model) -> dict[str, Any]:
    """As in docs.claude.com/en/api/models-list; the epoch stands for an unknown time there."""
    created = datetime.fromtimestamp(model.created or 0, UTC).isoformat().replace("+00:00", "Z")
    return {"type": "model", "id": name, "display_name": name, "created_at": created}


def _page(entries: list[dict[str, Any]]) -> dict[str, Any]:
    first, last = (entries[0]["id"], entries[-1]["id"]) if entries else (None, None)
    return {"data": entries, "has_more": False, "first_id": first, "last_id": last}


def encode(document: Any) -> bytes:
    return orjson.dumps(document)
