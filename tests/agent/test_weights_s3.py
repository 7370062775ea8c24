"""Sources s3: whole folders and single objects, resumed, verified, with nothing secret told."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from agent import procfs
from agent.probes.weights_scan import WeightsScan
from agent.source import parse_source, read_note
from agent.weights import NoWeights, Weights
from tests.agent.conftest import until
from tests.agent.file_server import DATA, ROOT, SHA, nothing, running, weights
from tests.agent.s3_server import Store

if TYPE_CHECKING:
    from collections.abc import Iterator

pytest.importorskip("boto3")
pytestmark = pytest.mark.slow  # a process that imports boto3 each time
SECRET = "wJalrXUtnFEMI-secret"


@pytest.fixture
def store() -> Iterator[Store]:
    made = Store()
    with running(made.http):
        yield made
        made.release.set()


@pytest.fixture
def bring(store: Store, tmp_path: Path) -> Weights:
    (tmp_path / "aws").mkdir()
    return weights(tmp_path, **environment(store, tmp_path))


def environment(store: Store, folder: Path) -> dict[str, str]:
    """Credentials and nothing of the developer's own."""
    return {
        "AWS_ENDPOINT_URL": store.url,
        "AWS_ACCESS_KEY_ID": "AKIDEXAMPLE",
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_CONFIG_FILE": str(folder / "aws/config"),
        "AWS_SHARED_CREDENTIALS_FILE": str(folder / "aws/credentials"),
        "AWS_EC2_METADATA_DISABLED": "true",
    }


async def test_a_folder_is_brought_whole_signed_and_verified(
    store: Store, bring: Weights, tmp_path: Path
) -> None:
    store.objects = {
        "m/a/config.json": b"{}",
        "m/a/sub/part 1.safetensors": DATA,
        "m/a/": b"",
        "m/a-big/x": b"not of it",
        "m/a/nothing": b"",
    }
    store.sha256.add("m/a/config.json")
    store.etags["m/a/nothing"] = '"d41d8cd98f00b204e9800998ecf8427e-2"'
    told: list[dict[str, Any]] = []
    path = await bring.ensure("s3:bkt/m/a", told.append)
    assert (path / "sub/part 1.safetensors").read_bytes() == DATA
    names = {str(p.relative_to(path)) for p in path.rglob("*") if p.is_file()}
    assert names == {"config.json", "sub/part 1.safetensors", "nothing", "lock", "source.json"}
    assert {f: v["verified"] for f, v in note_of(path)["files"].items()} == {
        "config.json": "sha256",
        "sub/part 1.safetensors": "md5",
        "nothing": "size",  # an object of several parts has no checksum that we could compute
    }
    assert told[-1]["bytes_total"] == len(DATA) + 2
    assert all("AKIDEXAMPLE" in one for one in store.signed)
    [entry] = WeightsScan([tmp_path / "weights"]).scan()
    assert (entry["source"], entry["name"], entry["managed"]) == ("s3:bkt/m/a", "bkt/m/a", True)
    asked = len(store.signed)
    assert await bring.ensure("s3:bkt/m/a", nothing) == path
    assert len(store.signed) == asked


def note_of(folder: Path) -> dict[str, Any]:
    return read_note(folder)


async def test_one_object_is_the_file_itself(store: Store, bring: Weights) -> None:
    store.objects = {"m/a.gguf": DATA, "m/a.gguf.txt": b"x"}
    path = await bring.ensure(f"s3://bkt/m/a.gguf#sha256={SHA}", nothing)
    assert (path.name, path.read_bytes()) == ("a.gguf", DATA)
    assert await bring.ensure(f"s3://bkt/m/a.gguf#sha256={SHA}", nothing) == path
    with pytest.raises(NoWeights, match=f"its sha256 is {SHA} and 0000"):
        await bring.ensure(f"s3:bkt/m/a.gguf#sha256={'0' * 64}", nothing)
    with pytest.raises(NoWeights, match="names a folder, and a sha256 is of one object"):
        await bring.ensure(f"s3:bkt/m#sha256={SHA}", nothing)


async def test_a_cut_object_goes_on_where_it_was(store: Store, bring: Weights) -> None:
    store.objects, store.cut_after = {"a.gguf": DATA}, 600_000
    path = await bring.ensure("s3:bkt/a.gguf", nothing)
    assert path.read_bytes() == DATA
    [first, second] = store.ranges
    assert first == ("a.gguf", None)
    assert second[1] in ("bytes=524288-", "bytes=600000-"), "what had come is not fetched again"


@pytest.mark.slow
@pytest.mark.parametrize("shift", [-1000, 1])
async def test_D25_parts_that_do_not_meet_are_never_served(
    store: Store, bring: Weights, shift: int
) -> None:
    store.objects, store.cut_after, store.shift = {"a.gguf": DATA}, 600_000, shift
    store.etags = {"a.gguf": '"0123456789abcdef0123456789abcdef-3"'}  # of parts: says no md5
    path = await bring.ensure("s3:bkt/a.gguf", nothing)
    assert path.read_bytes() == DATA
    assert [wanted is None for _, wanted in store.ranges] == [True, False, True]


async def test_D22_a_killed_download_resumes_and_shows_no_secret(
    store: Store, bring: Weights, tmp_path: Path
) -> None:
    store.objects, store.hold_after = {"m/a.bin": DATA, "m/b.bin": b"b" * 1000}, 600_000
    job = {"source": "s3:bkt/m", "weights_dir": str(tmp_path / "weights"), "reserve_bytes": 0}
    env = {"PATH": "/usr/bin", **environment(store, tmp_path)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    child = subprocess.Popen([sys.executable, "-m", "agent.fetch"], cwd=ROOT, env=env, **pipes)
    child.stdin.write(json.dumps(job).encode() + b"\n")
    child.stdin.flush()
    parts = tmp_path / "weights/s3"

    def half() -> bool:
        part = next(iter(parts.glob("*/a.bin.part")), None)
        done = next(iter(parts.glob("*/b.bin")), None)
        return done is not None and part is not None and part.stat().st_size >= 500_000

    try:
        await until(half, "half of one object and the other are here")
        assert SECRET not in procfs.command_line(child.pid)
    finally:
        child.kill()
        child.wait()
        child.stdin.close()
        child.stdout.close()
    folder = next(parts.iterdir())
    assert note_of(folder)["complete"] is False
    store.hold_after = None
    store.release.set()
    store.ranges.clear()
    path = await bring.ensure("s3:bkt/m", nothing)
    assert (path / "a.bin").read_bytes() == DATA
    [(key, wanted)] = store.ranges
    assert key == "m/a.bin"
    assert wanted is not None
    assert int(wanted.removeprefix("bytes=").rstrip("-")) >= 500_000


async def test_D25_a_wrong_byte_is_never_served_and_costs_one_object(
    store: Store, bring: Weights, tmp_path: Path
) -> None:
    store.objects, store.corrupt = {"m/a": DATA, "m/b": b"b" * 1000}, "m/a"
    md5 = hashlib.md5(DATA).hexdigest()
    with pytest.raises(NoWeights, match=rf"s3:bkt/m/a: its md5 is \w+ and {md5} was expected"):
        await bring.ensure("s3:bkt/m", nothing)
    store.corrupt = None
    store.ranges.clear()
    path = await bring.ensure("s3:bkt/m", nothing)
    assert (path / "a").read_bytes() == DATA
    assert ("m/a", None) in store.ranges
    (path / "a").write_bytes(DATA[:-1])  # cut at rest
    store.ranges.clear()
    assert await bring.ensure("s3:bkt/m", nothing) == path
    assert (path / "a").read_bytes() == DATA
    assert store.ranges == [("m/a", None)]


async def test_an_object_replaced_meanwhile_is_not_mixed(store: Store, bring: Weights) -> None:
    store.objects, store.cut_after = {"a": DATA}, 600_000
    whole = store.object

    def replaced(to: Any, key: str, *, body: bool) -> None:
        whole(to, key, body=body)
        if body:
            store.objects = {"a": DATA[::-1]}

    store.object = replaced  # type: ignore[method-assign]
    with pytest.raises(NoWeights, match="s3:bkt/a was replaced while it was fetched"):
        await bring.ensure("s3:bkt/a", nothing)
    path = await bring.ensure("s3:bkt/a", nothing)
    assert path.read_bytes() == DATA[::-1]


@pytest.mark.parametrize(
    ("key", "source", "words"),
    [
        ("m/../../../x", "s3:bkt/m", "would lie outside"),
        ("m//x", "s3:bkt/m", "would lie outside"),
        ("m/lock", "s3:bkt/m", "keeps the name 'lock' for itself"),
        ("m/x", "s3:bkt/n", "has no object 'n' and none below 'n/'"),
        ("m/x", "s3:other/m", "cannot be fetched: An error occurred"),
    ],
)
async def test_what_cannot_be_fetched_says_why(
    store: Store, bring: Weights, tmp_path: Path, key: str, source: str, words: str
) -> None:
    store.objects = {key: b"x"}
    with pytest.raises(NoWeights, match=words) as caught:
        await bring.ensure(source, nothing)
    assert SECRET not in str(caught.value)
    assert list(tmp_path.rglob("x")) == []


async def test_without_credentials_requests_are_unsigned(store: Store, tmp_path: Path) -> None:
    store.objects = {"a": b"public"}
    env = environment(store, tmp_path)
    names = {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""}
    path = await weights(tmp_path, **{**env, **names}).ensure("s3:bkt/a", nothing)
    assert path.read_bytes() == b"public"
    assert set(store.signed) == {""}


async def test_without_boto3_it_says_what_to_install(store: Store, tmp_path: Path) -> None:
    (tmp_path / "hide/boto3").mkdir(parents=True)
    (tmp_path / "hide/boto3/__init__.py").write_text("raise ImportError('not here')")
    hidden = weights(tmp_path, PYTHONPATH=str(tmp_path / "hide"))
    with pytest.raises(NoWeights, match=r"pip install 'llmgw\[s3\]'"):
        await hidden.ensure("s3:bkt/a", nothing)


def test_an_s3_source_is_read_in_its_parts() -> None:
    s = parse_source("s3://bkt.x/a/b/")
    assert (s.bucket, s.key, s.name, s.single) == ("bkt.x", "a/b/", "bkt.x/a/b/", None)
    assert parse_source("s3:bkt").key is None
