"""Sources hf: and the room of a disk: resumed after a kill, verified, shared, never too much."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import trio

from agent import procfs
from agent.fetch_http import fetch_file
from agent.fetch_many import bring
from agent.fetch_room import Room
from agent.fetch_verify import FetchError, NoRoom, digest
from agent.source import read_note
from agent.weights import NoWeights, Weights
from tests.agent.conftest import until
from tests.agent.file_server import DATA, ROOT, SHA, Server, nothing, part_of, raw, running, weights

if TYPE_CHECKING:
    from collections.abc import Iterator

pytest.importorskip("huggingface_hub")


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    made.files = {"config.json": b"{}", "model.safetensors": DATA}
    with running(made.http):
        yield made
        made.release.set()


def hub(server: Server, folder: Path, **more: Any) -> Weights:
    env = {"HF_ENDPOINT": server.url, "HF_HUB_DISABLE_TELEMETRY": "1", **more}
    return weights(folder, **env)


@pytest.mark.slow
async def test_D22_a_killed_hub_download_resumes_and_leaves_nothing_behind(
    server: Server, tmp_path: Path
) -> None:
    server.hold_after = 600_000
    token = tmp_path / "token"
    token.write_text("hf_verysecret\n")
    job = {"source": "hf:org/tiny", "weights_dir": str(tmp_path / "weights"), "reserve_bytes": 0}
    env = {"PATH": "/usr/bin", "HF_ENDPOINT": server.url}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    child = subprocess.Popen([sys.executable, "-m", "agent.fetch"], cwd=ROOT, env=env, **pipes)
    child.stdin.write(json.dumps({**job, "hf_token_file": str(token)}).encode() + b"\n")
    child.stdin.flush()
    parts = tmp_path / "weights/hf"

    def half() -> bool:
        part = next(iter(parts.glob("*/model.safetensors.part")), None)
        done = next(iter(parts.glob("*/config.json")), None)
        return done is not None and part is not None and part.stat().st_size >= 500_000

    try:
        await until(half, "half of it is here")
        assert "hf_verysecret" not in procfs.command_line(child.pid)
        environment = Path(f"/proc/{child.pid}/environ").read_bytes()
        assert b"hf_verysecret" not in environment
    finally:
        child.kill()
        child.wait()
        child.stdin.close()
        child.stdout.close()
    assert server.tokens - {None} == {"Bearer hf_verysecret"}
    [folder] = parts.iterdir()
    assert read_note(folder)["complete"] is False
    size = (folder / "model.safetensors.part").stat().st_size
    server.release.set()
    server.ranges.clear()
    assert await hub(server, tmp_path).ensure("hf:org/tiny", nothing) == folder
    assert server.ranges == [f"bytes={size}-"]
    assert (folder / "model.safetensors").read_bytes() == DATA
    left = {p.name for p in folder.iterdir()}
    assert left == {"config.json", "model.safetensors", "lock", "source.json"}
    assert read_note(folder)["files"]["model.safetensors"]["bytes"] == len(DATA)


@pytest.mark.slow
async def test_D25_of_a_hub_a_wrong_byte_is_never_served(server: Server, tmp_path: Path) -> None:
    server.sha256 = {"model.safetensors": hashlib.sha256(DATA[::-1]).hexdigest()}
    with pytest.raises(NoWeights, match=f"its sha256 is {SHA} and"):
        await hub(server, tmp_path).ensure("hf:org/tiny", nothing)
    assert not list(tmp_path.rglob("model.safetensors*"))
    server.sha256 = {"model.safetensors": SHA}
    folder = await hub(server, tmp_path).ensure("hf:org/tiny", nothing)
    assert read_note(folder)["files"]["model.safetensors"]["verified"] == "sha256"
    (folder / "model.safetensors").write_bytes(DATA[:-1])
    server.ranges.clear()
    await hub(server, tmp_path).ensure("hf:org/tiny", nothing)
    assert server.ranges == [None], "only the file that was cut at rest is fetched again"


@pytest.mark.slow
@pytest.mark.parametrize("sized", [True, False])
async def test_two_replicas_share_one_download_and_its_progress(
    server: Server, tmp_path: Path, nursery: trio.Nursery, sized: bool
) -> None:
    server.sized, server.hold_after = sized, 600_000
    here, told, paths = hub(server, tmp_path), ([], []), []

    async def want(number: int) -> None:
        paths.append(await here.ensure("hf:org/tiny", told[number].append))

    nursery.start_soon(want, 0)
    nursery.start_soon(want, 1)
    await until(
        lambda: all(t and t[-1]["bytes_done"] >= 500_000 for t in told), "both show how far it is"
    )
    server.release.set()
    await until(lambda: len(paths) == 2, "both have it")
    assert paths[0] == paths[1]
    assert server.ranges == [None, None], "each of the two files came once"
    totals = {word.get("bytes_total") for words in told for word in words}
    assert totals == ({None, len(DATA) + 2} if sized else {None})


async def test_a_token_file_that_cannot_be_read_is_named(server: Server, tmp_path: Path) -> None:
    here = Weights(tmp_path / "w", {"HF_ENDPOINT": server.url}, 0, tmp_path / "no-token")
    with pytest.raises(NoWeights, match=r"hf_token_file .*no-token cannot be read"):
        await here.ensure("hf:org/tiny", nothing)


@pytest.mark.slow
async def test_D23_two_downloads_that_fit_alone_but_not_together(
    server: Server, tmp_path: Path, nursery: trio.Nursery
) -> None:
    server.files, server.hold_after = {}, 10
    free = shutil.disk_usage(tmp_path).free
    server.announced = free * 2 // 3
    nursery.start_soon(weights(tmp_path).ensure, f"{server.url}/m.gguf", nothing)
    await until(lambda: part_of(tmp_path) is not None, "the first writes")
    with pytest.raises(NoWeights, match=r"no space: .* of which downloads under way will take .* "):
        await weights(tmp_path).ensure(f"{server.url}/n.gguf", nothing)
    nursery.cancel_scope.cancel()
    with trio.CancelScope(shield=True):
        server.announced = None
        server.release.set()
        path = await weights(tmp_path).ensure(f"{server.url}/n.gguf", nothing)
    assert path.read_bytes() == DATA, "the claim of a download that ended is gone"


def test_D23_a_disk_that_others_fill_stops_a_download(tmp_path: Path) -> None:
    (tmp_path / "f").mkdir()
    free = shutil.disk_usage(tmp_path).free
    for total in (1, None):
        Room(tmp_path, tmp_path / "f", "hf:a/b", free // 2).check(total)
    with pytest.raises(FetchError, match=r"no space: .* it goes on from there"):
        Room(tmp_path, tmp_path / "f", "hf:a/b", free * 2).check(1)


@pytest.mark.parametrize(("total", "left"), [(None, set()), (2 * len(DATA), {"a.part", "b.part"})])
def test_D23_of_what_may_never_fit_nothing_stays_on_a_full_disk(
    tmp_path: Path, total: int | None, left: set[str]
) -> None:
    """Half of a model of unknown size that fills the disk would keep all others from coming."""
    server, room = Server(), Room(tmp_path, tmp_path, "hf:a/b", 0)
    server.raw = [
        raw(200, b"5\r\nhello\r\n", "Transfer-Encoding: chunked")
        if total is None
        else raw(200, b"hello", f"Content-Length: {len(DATA)}")
    ]

    def full(_: int, known: int | None) -> None:
        (tmp_path / "b.part").write_bytes(b"of another file")
        room._reserve = shutil.disk_usage(tmp_path).total
        room.check(known)

    said = "are removed" if total is None else "goes on from there"
    with running(server.http), pytest.raises(NoRoom, match=said):
        fetch_file(f"{server.url}/a", tmp_path / "a", None, lambda _: None, full)
    with pytest.raises(NoRoom, match=said):
        bring({"b": lambda: "size"}, tmp_path, total, full)
    assert {path.name for path in tmp_path.glob("*.part")} == left


def test_the_id_of_a_git_blob_is_a_checksum(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"hello\n")
    assert digest(tmp_path / "x", "git") == "ce013625030ba8dba906f756967f9e9ca394464a"
