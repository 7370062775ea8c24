"""The admin API as a Quart app on Trio: checks a request, calls its handler, answers in JSON.

Made by the control process (`controller/control.py`) and served by hypercorn.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Protocol

import orjson
import structlog
import trio
from pydantic import BaseModel, ValidationError
from quart import Response, g, request
from quart_trio import QuartTrio
from werkzeug.exceptions import HTTPException

from controller.api import openapi, users
from controller.api.access import UNNAMED, Access, AdminSettings, access_of
from controller.api.bodies import NoQuery
from controller.api.call import Call, Route
from controller.api.errors import ApiError, later, no_store, translate
from controller.api.maps import Maps
from controller.api.paging import NEXT_HEADER, Cursors, Page
from controller.api.routes import PREFIX, ROUTES
from controller.catalog.faults import explain, nearest
from sql import queries
from sql.errors import DatabaseError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from sql.pool import Pool

BODY_BYTES = 4 * 1024 * 1024
DROPPED_BYTES = 64 * 1024 * 1024
"""A body over the cap is dropped up to here: a client that still writes reads no answer."""
BODY_S = 10.0
SCHEMA_OK = "ok"
_LOGINS = frozenset({f"{PREFIX}/login"})
"""Who has no token or session yet may ask for one."""
_FREE = frozenset({"/healthz", "/readyz"})
"""What load balancers ask, which have no token. Says nothing about the cluster's content."""

log = structlog.get_logger("controller.api")


class Context(Protocol):
    """What the API needs of the control process (`controller/context.py`)."""

    @property
    def pool(self) -> Pool | None:
        """None in static mode without Postgres."""
        ...

    @property
    def schema(self) -> str:
        """``ok``, or what is wrong with the database's schema."""
        ...

    @property
    def config(self) -> AdminSettings:
        """The controller's settings."""
        ...


class Api:
    """The state behind one app: who may use it, the pool, the cursors' secret, fabrics' maps."""

    def __init__(self, context: Context, access: Access) -> None:
        self._context = context
        self._access = access
        self._cursors: Cursors | None = None
        self._maps = Maps()

    async def _pool_and_cursors(self) -> tuple[Pool, Cursors]:
        pool = self._context.pool
        if pool is None:
            raise no_store()
        if self._cursors is None:
            self._cursors = Cursors(await pool.fetchval(queries("admin")["cursor_secret"]))
        return pool, self._cursors

    def _explained(self, error: DatabaseError) -> Exception:
        """What we do not know of Postgres may come from a schema that is not ours."""
        known = translate(error)
        schema = self._context.schema
        if known is None and schema != SCHEMA_OK:
            return later(f"the database cannot be used by this controller: {schema}")
        return known or error

    async def actor(self) -> str:
        """Who sends the present request; ApiError when they may not. Raises sql.errors."""
        session = users.session_of(request.headers.get("Authorization"))
        if request.path in _LOGINS:
            self._access.own_site(request.headers, request.scheme)
            return UNNAMED
        if session is None or self._context.pool is None:
            return self._access.actor(request.headers, request.scheme)
        self._access.own_site(request.headers, request.scheme)
        return await users.admin_of(self._context.pool, session)

    async def answer(self, route: Route, path: dict[str, str]) -> Response:
        """Runs one route within its deadline."""
        with trio.move_on_after(route.deadline_s):
            query = _checked_query(route)
            body = await _checked_body(route) if route.body is not None else None
            if any("\0" in value for value in path.values()):
                raise ApiError(404, "a name with a NUL character names nothing")
            try:
                pool, cursors = await self._pool_and_cursors()
                session = users.session_of(request.headers.get("Authorization"))
                asked = request.method, request.remote_addr, session
                call = Call(pool, cursors, self._maps, g.actor, path, query, body, *asked)
                found = await route.handler(call)
            except DatabaseError as error:
                raise self._explained(error) from error
            return found if isinstance(found, Response) else _json(found)
        raise ApiError(
            504, f"{route.verb} {route.path} took over {route.deadline_s:.0f} s and was given up"
        )


def make_app(context: Context) -> QuartTrio:
    """The admin app. Reads the token file; raises OSError or ValueError when that is no good."""
    app = QuartTrio("controller.api", static_folder=None)
    app.config["MAX_CONTENT_LENGTH"] = DROPPED_BYTES
    api = Api(context, access_of(context.config))

    @app.before_request
    async def allowed() -> None:
        if request.path not in _FREE and request.method != "OPTIONS":
            g.actor = await api.actor()

    for route in ROUTES:
        app.add_url_rule(
            PREFIX + _rule(route.path), f"{route.verb} {route.path}", _view(api, route),
            methods=[route.verb],
        )  # fmt: skip

    @app.get(f"{PREFIX}/openapi.json")
    async def described() -> Response:
        return _json(openapi.document())

    app.register_error_handler(Exception, failed)
    return app


def _rule(path: str) -> str:
    # Model names hold slashes (org/name), and so do keys of fabrics; ids of other things do not.
    slashes = "{name}" in path or path.startswith("/fabrics/")
    return re.sub(r"\{(\w+)\}", lambda m: f"<{'path:' if slashes else ''}{m[1]}>", path)


def _view(api: Api, route: Route) -> Callable[..., Awaitable[Response]]:
    async def view(**path: str) -> Response:
        return await api.answer(route, path)

    return view


async def failed(error: Exception) -> Response:
    """Every failure as JSON, without a trace of the inside."""
    known = _unrouted(error) if isinstance(error, HTTPException) else translate(error)
    if known is None:
        log.error("admin request failed", path=request.path, verb=request.method, exc_info=error)
        known = ApiError(
            500,
            f"{request.method} {request.path} failed by a fault of the controller's own "
            f"({type(error).__name__}): its log has the details",
        )
    answer = _json({"error": known.message}, known.status)
    answer.headers.update(known.headers)
    return answer


def _unrouted(error: HTTPException) -> ApiError:
    status = error.code or 500
    if status == 404:
        paths = sorted({PREFIX + route.path for route in ROUTES})
        right = nearest(request.path, paths, "path")
        if not right.startswith("did you"):
            right = f"{PREFIX}/openapi.json lists what there is"
        return ApiError(404, f"there is nothing at {request.path}: {right}")
    if status == 405:
        verbs = ", ".join(sorted(getattr(error, "valid_methods", None) or []))
        message = f"{request.path} does not take {request.method}, only {verbs}"
        return ApiError(405, message, {"Allow": verbs})
    if status == 413:
        return _too_big()
    return ApiError(status, f"{request.method} {request.path}: {error.description}")


def _checked_query(route: Route) -> BaseModel:
    form = route.query or NoQuery
    given = request.args.to_dict(flat=False)
    twice = next((name for name, values in given.items() if len(values) > 1), None)
    if twice is not None:
        raise ApiError(400, f"the parameter {twice} is there {len(given[twice])} times: once only")
    return _checked(form, {name: values[0] for name, values in given.items()})


async def _body() -> bytes:
    """The whole body; ApiError 413 when it is too big, 408 when it does not come."""
    parts, size = [], 0
    with trio.move_on_after(BODY_S) as waiting:
        async for part in request.body:
            size += len(part)
            if size <= BODY_BYTES:
                parts.append(part)
    if waiting.cancelled_caught:
        raise ApiError(408, f"the body did not arrive within {BODY_S:.0f} s: send it again")
    if size > BODY_BYTES:
        raise _too_big()
    return b"".join(parts)


def _too_big() -> ApiError:
    return ApiError(413, f"the body is over {BODY_BYTES // 2**20} MiB: split it")


async def _checked_body(route: Route) -> BaseModel:
    if request.mimetype != "application/json":
        raise ApiError(
            415, f"{route.verb} {route.path} takes JSON: send Content-Type: application/json"
        )
    try:
        given = orjson.loads(await _body())
    except orjson.JSONDecodeError as error:
        raise ApiError(400, f"the body is not JSON: {error}") from None
    if not isinstance(given, dict):
        raise ApiError(400, f"the body is a JSON {type(given).__name__}, not an object")
    assert route.body is not None
    return _checked(route.body, given)


def _checked(form: type[BaseModel], given: dict[str, Any]) -> BaseModel:
    if "\\u0000" in orjson.dumps(given).decode():
        raise ApiError(400, "a text holds a NUL character, which nothing here can keep")
    try:
        return form.model_validate(given)
    except ValidationError as error:
        raise ApiError(400, explain(error, form, given)) from None


def _json(document: Any, status: int = 200) -> Response:
    raw = orjson.dumps(document, option=orjson.OPT_APPEND_NEWLINE)
    answer = Response(raw, status, content_type="application/json")
    answer.headers["Cache-Control"] = "no-store"
    if isinstance(document, Page) and document.next is not None:
        answer.headers[NEXT_HEADER] = document.next
    return answer
