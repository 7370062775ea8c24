"""The admin port of the control process: the API, health and metrics on hypercorn."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import structlog
import trio
from hypercorn.config import Config as HypercornConfig
from hypercorn.trio import serve as hypercorn_serve
from quart import Response

from controller import health
from controller.api.server import make_app
from controller.config import host_port
from controller.metrics import page

if TYPE_CHECKING:
    from quart_trio import QuartTrio

    from controller.context import ControlContext

APP_END_S = 2
"""hypercorn waits this long at the end even for a connection on which nobody asks anything."""

log = structlog.get_logger()


async def serve(context: ControlContext, stop: trio.Event) -> None:
    """The admin port, until ``stop`` and the end of what it still answers."""
    app = make_app(context)
    _add_pages(app, context)
    config = HypercornConfig()
    host, port = host_port(context.config.admin_listen)
    config.bind = [f"[{host}]:{port}" if ":" in host else f"{host}:{port}"]
    config.graceful_timeout = config.shutdown_timeout = APP_END_S
    config.accesslog = config.errorlog = None
    if context.config.admin_tls_cert is not None:
        config.certfile = str(context.config.admin_tls_cert)
        config.keyfile = str(context.config.admin_tls_key)
    async with trio.open_nursery() as nursery:
        await nursery.start(partial(hypercorn_serve, app, config, shutdown_trigger=stop.wait))
        log.info("admin port serves", address=context.config.admin_listen)


def _add_pages(app: QuartTrio, context: ControlContext) -> None:
    """What machines ask: health, readiness, metrics."""

    @app.get("/healthz")
    async def healthz() -> Response:
        return Response("ok\n", content_type="text/plain")

    @app.get("/readyz")
    async def readyz() -> Response:
        reasons = await health.reasons(context)
        body = "".join(f"{reason}\n" for reason in reasons) or "ready\n"
        return Response(body, 503 if reasons else 200, content_type="text/plain; charset=utf-8")

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(await page.render(context), content_type="text/plain; version=0.0.4")
