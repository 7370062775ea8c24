"""Browsers, HEAD and OPTIONS: who may call, and that nobody needs a key to ask."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.router.wire import post_bytes

if TYPE_CHECKING:
    from tests.router.conftest import House
    from tests.router.wire import Answer

PAGE = "https://chat.example.org"
PATH = "/v1/chat/completions"
ALLOW = "access-control-allow-origin"


async def send(house: House, method: str, path: str = PATH, **headers: str) -> Answer:
    lines = [f"{method} {path} HTTP/1.1", "host: t"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    wire = await house.wire()
    await wire.send(("\r\n".join(lines) + "\r\n\r\n").encode())
    answer = await wire.answer(head_only=method == "HEAD")
    await wire.send(b"GET /healthz HTTP/1.1\r\nhost: t\r\n\r\n")  # no stray byte was in between
    assert (await wire.answer()).status == 200
    return answer


async def preflight(house: House, page: str = PAGE, path: str = PATH) -> Answer:
    return await send(
        house, "OPTIONS", path, origin=page, access_control_request_method="POST",
        access_control_request_headers="authorization,x-api-key,x-stainless-os",
    )  # fmt: skip


@pytest.mark.parametrize("cors", ["*", PAGE])
async def test_A37_a_preflight_needs_no_key(house: House, cors: str) -> None:
    await house.start(cors=frozenset((cors,)))
    answer = await preflight(house)
    assert answer.status == 204
    assert answer.headers[ALLOW] == cors
    assert answer.headers["access-control-allow-methods"] == "POST, OPTIONS"
    allowed = answer.headers["access-control-allow-headers"]
    assert allowed == "authorization,x-api-key,x-stainless-os"
    assert "access-control-allow-credentials" not in answer.headers
    assert "content-length" not in answer.headers
    assert answer.headers.get("vary") == (None if cors == "*" else "Origin")
    assert (await preflight(house, path="/v1/models/m")).headers["allow"] == "GET, HEAD, OPTIONS"
    missing = await preflight(house, path="/nothing")
    assert (missing.status, missing.headers[ALLOW]) == (404, cors)


@pytest.mark.parametrize(
    "asked", [{}, {"access_control_request_headers": "a(b)"}], ids=["none", "odd"]
)
async def test_A37_the_usual_headers_are_allowed(house: House, asked: dict[str, str]) -> None:
    await house.start(cors=frozenset("*"))
    answer = await send(
        house, "OPTIONS", origin=PAGE, access_control_request_method="POST", **asked
    )
    allowed = answer.headers["access-control-allow-headers"]
    assert allowed == "authorization, content-type, x-api-key"


async def test_A37_errors_and_answers_may_be_read_by_the_page(house: House) -> None:
    await house.start(cors=frozenset((PAGE,)))
    wire = await house.wire()
    for key, fields, status in (
        ("bad", {}, 401), ("sk-test", {"model": "nope"}, 404), ("sk-test", {}, 200),
        ("sk-test", {"stream": True}, 200), ("sk-test", {"fake": {"status": 500}}, 500),
    ):  # fmt: skip
        document = {"model": "m", "messages": [], **fields}
        await wire.send(post_bytes(PATH, document, key=key, origin=PAGE))
        answer = await wire.answer()
        assert (answer.status, answer.headers[ALLOW]) == (status, PAGE)
    assert "origin" not in house.engines[0].records[-1].headers
    await wire.send(b"GET / HTTP/1.1\r\nhost: t\r\nhost: u\r\norigin: %b\r\n\r\n" % PAGE.encode())
    broken = await wire.answer()
    assert (broken.status, broken.headers[ALLOW]) == (400, PAGE)


@pytest.mark.parametrize("cors", [(), ("https://other.example.org",)])
async def test_A37_other_pages_are_told_nothing(house: House, cors: tuple[str, ...]) -> None:
    how = {"headers": "access-control-allow-origin: *\r\n"}
    house.engine(**how)
    await house.start(cors=frozenset(cors))
    answers = [await preflight(house)]
    wire = await house.wire()
    for stream in (False, True):
        await wire.post(
            PATH, {"model": "m", "messages": [], "stream": stream}, origin=PAGE,
            x_fake=json.dumps(how),
        )  # fmt: skip
        answers.append(await wire.answer())
    assert [answer.status for answer in answers] == [204, 200, 200]
    assert not any(name.startswith("access-control") for a in answers for name in a.headers)


async def test_A37_head_and_options_without_a_page(house: House) -> None:
    await house.start(cors=frozenset("*"))
    options = await send(house, "OPTIONS")
    assert (options.status, options.headers["allow"]) == (204, "POST, OPTIONS")
    assert not any(name.startswith("access-control") for name in options.headers)
    for path, status in (
        ("/healthz", 200), ("/readyz", 200), ("/v1/models", 401), (PATH, 405), ("/nothing", 404),
    ):  # fmt: skip
        head = await send(house, "HEAD", path)
        assert head.status == status
        assert int(head.headers["content-length"]) > 0
    models = await send(house, "HEAD", "/v1/models/m", authorization="Bearer sk-test")
    assert models.status == 200
    assert house.idle()
    assert house.core.snapshot()["refusals"] == [
        ["invalid_api_key", 1], ["method_not_allowed", 1], ["unknown_url", 1],
    ]  # fmt: skip
