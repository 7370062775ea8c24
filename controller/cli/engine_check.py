"""`engine-check URL`: whether a server speaks the OpenAI API as our router needs it.

Talks to the engine itself, not to the admin API. Every check is made, whatever the others say.
"""

from __future__ import annotations

import http.client
import time
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

import click
import orjson

from controller.cli.output import lines

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from controller.cli.session import Session

COLUMNS: Final = ("CHECK", "RESULT", "TIME", "DETAIL")
MOST_BYTES: Final = 4 * 1024 * 1024
MOST_LINES: Final = 20_000


class Wrong(Exception):
    """What the engine did is not what a router can use; the message says how."""


@dataclass(frozen=True, slots=True)
class Engine:
    """The server under test. ``timeout_s`` bounds each wait for it."""

    url: str
    timeout_s: float
    model: str

    def _open(
        self, verb: str, path: str, body: dict[str, Any] | None
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        url = urlsplit(self.url)
        kind = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
        connection = kind(url.hostname or "", url.port, timeout=self.timeout_s)
        try:
            raw = None if body is None else orjson.dumps(body)
            head = {} if body is None else {"Content-Type": "application/json"}
            connection.request(verb, url.path.rstrip("/") + path, raw, head)
            return connection, connection.getresponse()
        except BaseException:
            connection.close()
            raise

    def ask(self, verb: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, Any]:
        """Status and document; a text that is no JSON comes as bytes."""
        connection, answer = self._open(verb, path, body)
        with closing(connection):
            raw = answer.read(MOST_BYTES)
        try:
            return answer.status, orjson.loads(raw)
        except orjson.JSONDecodeError:
            return answer.status, raw

    def events(self, body: dict[str, Any]) -> Iterator[str]:
        """The data of each event of a streamed chat."""
        connection, answer = self._open("POST", "/v1/chat/completions", body)
        with closing(connection):
            if answer.status != 200:
                raise Wrong(f"status {answer.status}: {answer.read(300)!r}")
            deadline = time.monotonic() + self.timeout_s
            for _ in range(MOST_LINES):
                line = answer.readline(MOST_BYTES)
                if not line:
                    return
                if line.startswith(b"data:"):
                    yield line[5:].strip().decode(errors="replace")
                if time.monotonic() > deadline:
                    raise Wrong(f"eight tokens took over {self.timeout_s:g} s")

    def chat(self, **more: Any) -> dict[str, Any]:
        """A small chat request."""
        hello = [{"role": "user", "content": "Say hello."}]
        return {"model": self.model, "messages": hello, "max_tokens": 8} | more


def health(engine: Engine) -> str:
    """A health path; a profile of engine command may name another one."""
    status, _ = engine.ask("GET", "/health")
    if status != 200:
        raise Wrong(f"GET /health answers {status}: name the right health_path in the profile")
    return "GET /health answers 200"


def chat(engine: Engine) -> str:
    """A plain answer with its token counts."""
    status, found = engine.ask("POST", "/v1/chat/completions", engine.chat())
    try:
        text, used = found["choices"][0]["message"]["content"], found["usage"]
        return f"{used['prompt_tokens']} + {used['completion_tokens']} tokens: {str(text)[:60]!r}"
    except (LookupError, TypeError):
        raise Wrong(f"status {status}, no answer with usage: {str(found)[:200]}") from None


def stream(engine: Engine) -> str:
    """A streamed answer that says when it ends."""
    began, first, count, reason, last = time.monotonic(), None, 0, None, ""
    for last in engine.events(engine.chat(stream=True)):
        if last == "[DONE]":
            break
        choice = (_event(last).get("choices") or [{}])[0]
        if choice.get("delta", {}).get("content"):
            count += 1
            first = first or time.monotonic() - began
        reason = choice.get("finish_reason") or reason
    if last != "[DONE]":
        raise Wrong("the stream ended without data: [DONE], so a cut looks like an end")
    if reason is None:
        raise Wrong("no event has a finish_reason")
    return f"{count} events, first after {first or 0:.2f} s, finish_reason {reason}"


def stream_usage(engine: Engine) -> str:
    """Token counts of a stream, which usage accounting needs."""
    body = engine.chat(stream=True, stream_options={"include_usage": True})
    for data in engine.events(body):
        used = None if data == "[DONE]" else _event(data).get("usage")
        if used:
            return f"{used.get('prompt_tokens')} + {used.get('completion_tokens')} tokens"
    raise Wrong("stream_options include_usage brought no usage: streams cannot be accounted")


def refusal(engine: Engine) -> str:
    """A wrong request is the client's fault and must look so."""
    status, found = engine.ask("POST", "/v1/chat/completions", {"model": engine.model})
    if not 400 <= status < 500:
        raise Wrong(f"a request without messages answers {status}, not 4xx: {str(found)[:100]}")
    return f"a request without messages answers {status}"


CHECKS: Final[dict[str, Callable[[Engine], str]]] = {
    "health": health,
    "chat": chat,
    "stream": stream,
    "stream usage": stream_usage,
    "refusal": refusal,
}


def _event(data: str) -> dict[str, Any]:
    try:
        found = orjson.loads(data)
    except orjson.JSONDecodeError:
        raise Wrong(f"an event is not JSON: {data[:100]!r}") from None
    if not isinstance(found, dict) or "error" in found:
        raise Wrong(f"an event is an error: {data[:200]}")
    return found


def _first_model(engine: Engine) -> str:
    status, found = engine.ask("GET", "/v1/models")
    try:
        return str(found["data"][0]["id"])
    except (LookupError, TypeError):
        raise Wrong(f"GET /v1/models answers {status} and names no model") from None


def _checked(name: str, call: Callable[[], str]) -> dict[str, Any]:
    began, ok = time.monotonic(), True
    try:
        detail = call()
    except (Wrong, OSError, http.client.HTTPException) as error:
        ok, detail = False, str(error) or type(error).__name__
    return {"check": name, "ok": ok, "seconds": time.monotonic() - began, "detail": detail}


def _all(url: str, timeout_s: float, model: str | None) -> tuple[list[dict[str, Any]], str]:
    """Every check, and the model that was asked; only the first one when none has a name."""
    named = model or ""

    def name_model() -> str:
        nonlocal named
        first = _first_model(Engine(url, timeout_s, ""))
        named = named or first
        return f"the first is {first}"

    found = [_checked("models", name_model)]
    engine = Engine(url, timeout_s, named)
    if named:
        found += [_checked(name, partial(check, engine)) for name, check in CHECKS.items()]
    return found, named


@click.command("engine-check")
@click.argument("url")
@click.option("--model", help="Ask for this one. [the first that it lists]")
@click.pass_obj
def engine_check(session: Session, url: str, model: str | None) -> None:
    """Check that the server at URL speaks the OpenAI API as the router needs it."""
    address = url if "://" in url else f"http://{url}"
    if urlsplit(address).scheme not in ("http", "https") or not urlsplit(address).hostname:
        raise click.BadParameter(f"{url!r} is no http address", param_hint="URL")
    found, named = _all(address.removesuffix("/v1"), session.timeout_s, model)
    good = all(row["ok"] for row in found)
    rows = (
        (r["check"], "ok" if r["ok"] else "failed", f"{r['seconds']:.2f} s", r["detail"])
        for r in found
    )
    end = (
        f"{url} can be used." if good else f"{url} fails {sum(not r['ok'] for r in found)} checks."
    )
    document = {"url": url, "ok": good, "checks": found} | ({"model": named} if named else {})
    session.out.show(document, lambda: lines(session.out.table(COLUMNS, rows), end))
    if not good:
        raise SystemExit(1)
