"""Forms with an upload: their fields are found, the file is never touched, doubt is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.router.body import Asked, read_form, rewritten
from controller.router.errors import ApiError
from controller.router.multipart import MOST_PARTS, find_fields
from tests.router.wire import PATIENCE_S

if TYPE_CHECKING:
    from tests.router.conftest import House
    from tests.router.wire import Answer

KIND = b"multipart/form-data; boundary=XX"
SOUND = bytes(range(256)) * 500 + b"\r\n--XY\r\n" + b'"model": "x"'


def part(name: str, value: bytes, more: str = "") -> bytes:
    return f'--XX\r\nContent-Disposition: form-data; name="{name}"{more}\r\n\r\n'.encode() + (
        value + b"\r\n"
    )


def form(*parts: bytes) -> bytes:
    return b"".join(parts) + b"--XX--\r\n"


FILE = part("file", SOUND, '; filename="a.wav"')


async def upload(
    house: House, body: bytes, kind: bytes = KIND, path: str = "transcriptions"
) -> Answer:
    wire = await house.wire()
    head = f"POST /v1/audio/{path} HTTP/1.1\r\nhost: t\r\nauthorization: Bearer sk-test\r\n"
    await wire.send(
        head.encode() + b"content-type: %b\r\ncontent-length: %d\r\n\r\n" % (kind, len(body)) + body
    )
    return await wire.answer()


@pytest.mark.parametrize("path", ["transcriptions", "translations"])
async def test_an_upload_passes_byte_for_byte(house: House, path: str) -> None:
    house.engine(
        raw='{"text": "hi", "usage": {"type": "tokens", "input_tokens": 9, "output_tokens": 2}}'
    )
    await house.start()
    for body in (form(part("model", b"m"), FILE), form(FILE, part("model", b"m"), part("n", b""))):
        answer = await upload(house, body, path=path)
        assert (answer.status, answer.json["text"]) == (200, "hi")
        assert house.engines[0].records[-1].body == body
        assert house.engines[0].records[-1].headers["content-type"] == KIND.decode()
    row = await house.row()
    assert (row["endpoint"], row["prompt_tokens"], row["completion_tokens"]) == (
        f"audio.{path}", 9, 2,
    )  # fmt: skip


async def test_an_alias_is_swapped_in_a_form(house: House) -> None:
    await house.start()
    body = form(FILE, part("model", b"short"), part("stream", b"false"))
    assert (await upload(house, body)).status == 200
    expected = form(FILE, part("model", b"m"), part("stream", b"false"))
    assert house.engines[0].records[0].body == expected


async def test_a_form_of_a_real_client(house: House) -> None:
    await house.start()
    async with httpx.AsyncClient(
        headers={"authorization": "Bearer sk-test"}, timeout=PATIENCE_S
    ) as client:
        url = f"http://127.0.0.1:{house.port}/v1/audio/transcriptions"
        files = {"file": ("ä.wav", SOUND, "audio/wav")}
        fields = {"model": "m", "stream": "true"}
        assert (await client.post(url, data=fields, files=files)).status_code == 200
    assert (await house.row())["stream"]


BAD: list[tuple[bytes, bytes, str]] = [
    (form(part("model", b"m")), b"multipart/form-data", "boundary"),
    (b"", KIND, "first boundary"), (b"rubbish", KIND, "first boundary"),
    (part("model", b"m"), KIND, "not closed"), (b"--XX\r\n", KIND, "not closed"),
    (form(part("model", b"m"), part("model", b"m")), KIND, "comes twice"),
    (form(part("model", b"m"), part("stream", b"1"), part("stream", b"0")), KIND, "comes twice"),
    (form(part("model", b"\xff")), KIND, "UTF-8"), (form(part("model", b"m" * 2000)), KIND, "long"),
    (form(*[part("a", b"")] * (MOST_PARTS + 1)), KIND, "parts"),
    (b"--XX\r\n\r\nm\r\n--XX--", KIND, "head"), (b"--XX\r\n\r\n\r\n--XX--\r\n", KIND, "head"),
    (b"--XX\r\nx: " + b"y" * 9000 + b"\r\n\r\nm\r\n--XX--", KIND, "head"),
    (form(FILE), KIND, "model"), (form(part("model", b"")), KIND, "model"),
    (form(part("model", b"m", '; filename="m"')), KIND, "model"),
    (form(part("model", b"m")), b"application/json", "JSON"),
    (form(part("model", b"m"), part("+AG0AbwBkAGUAbA-", b"other")), KIND + b"; charset=utf-7",
     "charset"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "kind", "why"), BAD, ids=range(len(BAD)))
async def test_bad_forms_are_refused(house: House, body: bytes, kind: bytes, why: str) -> None:
    await house.start()
    answer = await upload(house, body, kind)
    assert answer.status == 400
    assert why in answer.json["error"]["message"]
    assert house.engines[0].records == []


async def test_an_unknown_model_in_a_form_is_404(house: House) -> None:
    await house.start()
    assert (await upload(house, form(part("model", b"absent"), FILE))).code == "model_not_found"


@pytest.mark.parametrize(
    "head",
    ['Content-Disposition: form-data; name=model', 'content-disposition:form-data;name="model"',
     'Content-Type: text/plain\r\nCONTENT-DISPOSITION: form-data; x=y; NAME="model"'],
)  # fmt: skip
@pytest.mark.parametrize("kind", [KIND, b'Multipart/Form-Data; charset=UTF-8; Boundary="XX"'])
def test_names_are_found_as_parsers_find_them(head: str, kind: bytes) -> None:
    body = b"preamble\r\n--XX\r\n" + head.encode() + b"\r\n\r\norg/m\r\n--XX--\r\nepilogue"
    asked = read_form(body, kind)
    assert isinstance(asked, Asked)
    assert asked.model == "org/m"
    assert rewritten(asked, "up", ask_usage=False) == body.replace(b"org/m", b"up")
    assert rewritten(asked, "org/m", ask_usage=False) is body


HEADS = [
    """form-data; name*=utf-8''model""", 'x; name="model"', 'attachment; name="model"',
    'form-data; name="other"; name="model"', 'form-data; name="mo\\del"',
    'form-data; name = "model"', 'form-data;\r\n name="model"', 'form-data; name="model',
    'form-data; name*0="mo"; name*1="del"', 'form-data; a="\\\\"; name="model"', "form-data",
    'form-data; name="other"\r\nContent-Disposition: form-data; name="model"',
    'form-data; name="other"\nContent-Disposition: form-data; name="model"',
    'form-data; name="other"\r\nContent-Disposition : form-data; name="model"',
    """form-data; name="model"; filename*=utf-8''x""", 'form-data; a="; filename=x"; name="model"',
    'form-data; name="model"; a="; filename=x"', 'form-data; a="; name=other"; name="model"',
]  # fmt: skip
"""In some of these one parser or another sees the field `model`: Starlette, Werkzeug, email."""


@pytest.mark.parametrize("head", HEADS)
def test_A28_no_engine_finds_a_model_that_we_did_not_see(head: str) -> None:
    """Else a key for one model reached another of the same engine, such as an adapter."""
    hidden = f"--XX\r\nContent-Disposition: {head}\r\n\r\nsecret\r\n".encode()
    for body in (form(part("model", b"m"), hidden), form(hidden, part("model", b"m"))):
        assert isinstance(find_fields(body, KIND, frozenset((b"model",))), ApiError)


@pytest.mark.parametrize(
    "kind",
    [b'multipart/form-data; x="; boundary=YY"; boundary=XX', b"multipart/form-data; boundary=XX;"],
)
def test_the_boundary_is_the_one_that_parsers_find(kind: bytes) -> None:
    found = find_fields(form(part("model", b"m")), kind, frozenset((b"model",)))
    assert isinstance(found, dict)
    assert found[b"model"].value == "m"


async def test_a_form_in_another_encoding_is_refused(house: House) -> None:
    """JSON to us, a form with another model to an engine."""
    await house.start()
    kind = b"application/x-www-form-urlencoded"
    answer = await upload(house, b'{"model": "m", "x": "&model=other&"}', kind)
    assert (answer.status, answer.code) == (415, "invalid_form")


@pytest.mark.parametrize(
    "more",
    ['; filename="a.wav"', "; filename=a.wav", '; filename="a\\"b.wav"', '; filename="C:\\a.wav"',
     '; filename="C:\\\\dir\\\\a.wav"',
     """; filename="a.wav"; filename*=UTF-8''%c3%a4.wav""", '; filename="ä;x=y.wav";'],
)  # fmt: skip
def test_files_of_all_clients_pass(more: str) -> None:
    body = form(part("model", b"m"), part("file", SOUND, more))
    found = find_fields(body, KIND, frozenset((b"model",)))
    assert isinstance(found, dict), found


@given(st.binary(max_size=300), st.data())
def test_rubbish_is_no_crash(rubbish: bytes, data: Any) -> None:
    good = form(part("model", b"m"), part("file", b"x", '; filename="a"'))
    at = data.draw(st.integers(0, len(good)))
    for body in (rubbish, good[:at] + rubbish + good[at:], good[:at]):
        found = find_fields(body, KIND, frozenset((b"model",)))
        assert isinstance(found, (ApiError, dict))
        if isinstance(found, dict) and b"model" in found:
            field = found[b"model"]
            assert body[field.start : field.end].decode() == field.value
