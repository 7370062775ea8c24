"""Weights: local files, downloads that resume, one writer, nothing unverified."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import trio

from agent.fetch_hf import wanted_files
from agent.fetch_verify import FetchError
from agent.probes.weights_scan import WeightsScan
from agent.source import BadSource, parse_source, read_note
from agent.weights import NoWeights
from tests.agent.conftest import until
from tests.agent.file_server import DATA, ROOT, SHA, Server, nothing, part_of, running, weights
from tests.tiny_model import tiny_gguf

if TYPE_CHECKING:
    from collections.abc import Iterator
    from http.server import BaseHTTPRequestHandler


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    made.http.daemon_threads = True
    with running(made.http):
        yield made
    made.release.set()


async def test_a_download_is_verified_listed_and_not_repeated(
    server: Server, tmp_path: Path
) -> None:
    source = f"{server.url}/m.gguf#sha256={SHA}"
    path = await weights(tmp_path).ensure(source, nothing)
    assert path.read_bytes() == DATA
    assert await weights(tmp_path).ensure(source, nothing) == path
    assert server.ranges == [None]
    [entry] = WeightsScan([tmp_path / "weights"]).scan()
    assert (entry["source"], entry["complete"]) == (source, True)
    assert entry["bytes"] >= len(DATA)


async def test_a_cut_download_goes_on_where_it_was(server: Server, tmp_path: Path) -> None:
    server.cut_after = 300_000
    path = await weights(tmp_path).ensure(f"{server.url}/m.gguf", nothing)
    assert path.read_bytes() == DATA
    assert server.ranges == [None, "bytes=300000-"]


@pytest.mark.slow
async def test_D22_a_killed_download_leaves_no_lock_and_resumes(
    server: Server, tmp_path: Path
) -> None:
    server.hold_after = 500_000
    child = subprocess.Popen(
        [sys.executable, "-m", "agent.fetch"],
        cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert child.stdin is not None
    assert child.stdout is not None
    job = {"source": f"{server.url}/m.gguf", "weights_dir": str(tmp_path / "weights")}
    child.stdin.write(json.dumps({**job, "reserve_bytes": 0}).encode() + b"\n")
    child.stdin.flush()

    def some() -> bool:
        part = part_of(tmp_path)
        return part is not None and part.stat().st_size >= 400_000

    try:
        await until(some, "half of the file is here")
    finally:
        child.kill()
        child.wait()
        child.stdin.close()
        child.stdout.close()
    assert read_note(next(tmp_path.glob("weights/http/*")))["complete"] is False
    have = part_of(tmp_path)
    assert have is not None
    size = have.stat().st_size
    server.release.set()
    with trio.fail_after(60):
        path = await weights(tmp_path).ensure(job["source"], nothing)
    assert path.read_bytes() == DATA
    assert server.ranges == [None, f"bytes={size}-"]


@pytest.mark.slow
async def test_D22_two_agents_on_one_folder_have_one_writer(
    server: Server, tmp_path: Path, nursery: trio.Nursery
) -> None:
    server.hold_after = 500_000
    source = f"{server.url}/m.gguf"
    paths: list[Path] = []
    waited: list[dict[str, Any]] = []

    async def one() -> None:
        paths.append(await weights(tmp_path).ensure(source, waited.append))

    nursery.start_soon(one)
    await until(lambda: part_of(tmp_path) is not None, "the first writes")
    nursery.start_soon(one)
    await until(lambda: bool(waited), "the second shows the progress of the first")
    server.release.set()
    await until(lambda: len(paths) == 2, "both have it")
    assert paths[0] == paths[1]
    assert server.ranges == [None]
    assert waited[0]["source"] == source


@pytest.mark.slow
async def test_D22_a_download_that_nobody_wants_any_more_ends(
    server: Server, tmp_path: Path
) -> None:
    server.hold_after = 100
    with trio.move_on_after(1.0) as scope:
        await weights(tmp_path).ensure(f"{server.url}/m.gguf", nothing)
    assert scope.cancelled_caught
    server.release.set()
    with trio.fail_after(60):
        await weights(tmp_path).ensure(f"{server.url}/m.gguf", nothing)


async def test_a_file_that_changed_meanwhile_starts_over(server: Server, tmp_path: Path) -> None:
    server.cut_after = 300_000

    def swap(data: bytes) -> None:
        server.data, server.tag = data, '"v2"'

    original = server.send

    def send_then_swap(to: BaseHTTPRequestHandler, data: bytes) -> None:
        original(to, data)
        swap(DATA[::-1])

    server.send = send_then_swap  # type: ignore[method-assign]
    path = await weights(tmp_path).ensure(f"{server.url}/m.gguf", nothing)
    assert path.read_bytes() == DATA[::-1]


async def test_D25_a_wrong_checksum_is_never_served(server: Server, tmp_path: Path) -> None:
    source = f"{server.url}/m.gguf#sha256={'0' * 64}"
    with pytest.raises(NoWeights, match=f"its sha256 is {SHA} and 0000"):
        await weights(tmp_path).ensure(source, nothing)
    assert part_of(tmp_path) is None
    assert not WeightsScan([tmp_path / "weights"]).scan()[0]["complete"]


async def test_D23_a_download_that_the_disk_cannot_hold_is_refused_before_it_starts(
    server: Server, tmp_path: Path
) -> None:
    with pytest.raises(NoWeights, match=r"no space: 0\.00 GiB is still to come"):
        await weights(tmp_path, reserve=1 << 60).ensure(f"{server.url}/m.gguf", nothing)
    part = part_of(tmp_path)
    assert part is None or part.stat().st_size == 0


async def test_a_refusal_of_the_server_is_told(server: Server, tmp_path: Path) -> None:
    with pytest.raises(NoWeights, match="answers 404"):
        await weights(tmp_path).ensure(f"{server.url}/gone", nothing)


@pytest.mark.slow
async def test_a_model_of_a_hub_is_brought_whole_or_by_file(server: Server, tmp_path: Path) -> None:
    pytest.importorskip("huggingface_hub")
    server.files = {"config.json": b"{}", "model.safetensors": DATA, "pytorch_model.bin": b"old"}
    bring = weights(
        tmp_path, HF_ENDPOINT=server.url, HF_HUB_DISABLE_TELEMETRY="1", HF_HUB_DISABLE_XET="1"
    )
    folder = await bring.ensure("hf:org/tiny", nothing)
    assert (folder / "model.safetensors").read_bytes() == DATA
    assert (folder / "config.json").exists()
    assert not (folder / "pytorch_model.bin").exists()
    one = await bring.ensure("hf:org/tiny@main/model.safetensors", nothing)
    assert one.read_bytes() == DATA


def test_of_a_hub_only_the_needed_files_are_taken() -> None:
    sizes: dict[str, int | None] = {"a-00001-of-00002.gguf": 1, "a-00002-of-00002.gguf": 1}
    assert wanted_files(sizes, "a-00001-of-00002.gguf") == sizes
    assert wanted_files({**sizes, "README.md": 1}, None).keys() >= sizes.keys()
    with pytest.raises(FetchError, match=r"holds 2 GGUF models \(a, b-Q4\.gguf\)"):
        wanted_files({**sizes, "b-Q4.gguf": 1}, None)
    many = {"m.safetensors": 1, "m.bin": 1, "original/m.pth": 1}
    assert wanted_files(many, None) == {"m.safetensors": 1}


async def test_local_files_are_taken_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"x" * 10)
    source = f"file:{tmp_path}/a.gguf"
    assert await weights(tmp_path).ensure(source, nothing) == tmp_path / "a.gguf"
    [entry] = WeightsScan([tmp_path / "weights"]).scan([source])
    assert (entry["bytes"], entry["complete"]) == (10, False), "ten bytes are no model"
    assert "GGUF" in entry["reason"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("gs://bucket/m", "is none of file:/path"),
        ("s3:bucket/../x", "is not s3:bucket/key"),
        ("s3:bkt/k#sha256=1", "only sha256"),
        ("file:a.gguf", "absolute path"),
        ("hf:just-a-name", "is not hf:org/repo"),
        ("hf:org/repo/../../etc/passwd", "is not hf:org/repo"),
        ("https://h/f#md5=1", "only sha256"),
    ],
)
async def test_sources_that_nobody_can_fetch_say_why(text: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(NoWeights, match=words):
        await weights(tmp_path).ensure(text, nothing)


def test_a_source_is_read_in_its_parts() -> None:
    s = parse_source("hf:org/repo@v1.0/sub/model-00001-of-00002.gguf")
    assert (s.repo, s.revision, s.file) == ("org/repo", "v1.0", "sub/model-00001-of-00002.gguf")
    assert parse_source("hf:org/repo").file is None
    assert parse_source("file:/a%20b/c").path == Path("/a b/c")
    with pytest.raises(BadSource):
        parse_source("")


def _gguf(folder: Path) -> Path:
    """A model that the agent understands; the last bytes are tensors."""
    return tiny_gguf(folder / "m.gguf")


async def test_D25_a_file_that_lacks_its_end_is_never_handed_to_an_engine(tmp_path: Path) -> None:
    path = _gguf(tmp_path)
    source = f"file:{path}"
    assert await weights(tmp_path).ensure(source, nothing) == path
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(NoWeights, match=r"m\.gguf is not whole.* 100 bytes.*put the whole of it"):
        await weights(tmp_path).ensure(source, nothing)


@pytest.mark.parametrize("noted", ["by an agent before", "as it comes"])
async def test_D25_a_cut_download_is_never_handed_on_whoever_noted_it_complete(
    server: Server, tmp_path: Path, noted: str
) -> None:
    short = _gguf(tmp_path).read_bytes()[:-100]
    server.data = short
    source = f"{server.url}/m.gguf"
    if noted != "as it comes":
        folder = parse_source(source).folder(tmp_path / "weights")
        folder.mkdir(parents=True)
        (folder / "m.gguf").write_bytes(short)
        files = {"m.gguf": {"bytes": len(short), "verified": "size"}}
        note = {"source": source, "complete": True, "files": files}
        (folder / "source.json").write_text(json.dumps(note))
    with pytest.raises(NoWeights, match=r"not whole.*correct it where it comes from, and remove /"):
        await weights(tmp_path).ensure(source, nothing)
    assert server.ranges == ([None] if noted == "as it comes" else [])


async def test_a_folder_with_a_part_missing_is_refused_and_one_of_an_unknown_kind_is_not(
    tmp_path: Path,
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "model.onnx").write_bytes(b"who knows")
    assert await weights(tmp_path).ensure(f"file:{tmp_path}", nothing) == tmp_path
    index = {"weight_map": {"a": "model-00001-of-00001.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(NoWeights, match=r"1 of 1 files of .* missing"):
        await weights(tmp_path).ensure(f"file:{tmp_path}", nothing)
