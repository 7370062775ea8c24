"""Removing downloads: only our own, only whole, only what nobody uses or fetches."""

from __future__ import annotations

import fcntl
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import trio

from agent.source import NOTE, parse_source, read_note
from agent.weights import Weights
from agent.weights_collect import Collector, remove
from tests.agent.conftest import Node, until
from tests.agent.file_server import DATA, Server, nothing, running, weights

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SOURCE = "hf:org/repo"


def downloaded(root: Path, source: str = SOURCE) -> Path:
    """A download as agent.fetch leaves it."""
    folder = parse_source(source).folder(root)
    (folder / "sub").mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"x" * 1000)
    (folder / "sub/more").write_bytes(b"y" * 500)
    (folder / "lock").touch()
    (folder / NOTE).write_text(json.dumps({"source": source, "complete": True}))
    return folder


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "weights").mkdir()
    return tmp_path / "weights"


async def ask(root: Path, *paths: Path | str, sources: tuple[str, ...] = ()) -> dict[str, Any]:
    collector = Collector(Weights(root, {}), lambda: sources)
    return await collector.collect(1, [str(path) for path in paths])


async def kept(root: Path, path: Path | str, *sources: str) -> str:
    answer = await ask(root, path, sources=sources)
    assert answer["freed"] == []
    [entry] = answer["kept"]
    assert entry["path"] == str(path)
    return str(entry["reason"])


async def test_a_whole_download_goes_and_its_bytes_are_told(root: Path) -> None:
    folder, other = downloaded(root), downloaded(root, "hf:org/other")
    (folder / "elsewhere").hardlink_to(other / "model.safetensors")
    answer = await ask(root, folder, sources=("hf:org/other",))
    assert answer == {"freed": [{"path": str(folder), "bytes": 1500}], "kept": []}
    assert not folder.exists()
    assert (other / "model.safetensors").exists()


async def test_what_is_no_download_of_ours_stays(root: Path, tmp_path: Path) -> None:
    mine, outside = downloaded(root), tmp_path / "precious"
    outside.mkdir()
    (outside / NOTE).write_text('{"source": "hf:a/b", "complete": true}')
    (root / "hf/linked").symlink_to(outside)
    (root / "hf/plain").mkdir()
    for path, words in (
        (f"{mine}/../../../precious", "no plain absolute path"),
        ("weights/hf/x", "no plain absolute path"),
        (outside, "no download below"),
        ("/", "no download below"),
        (root, "no download below"),
        (root / "hf", "no download below"),
        (mine / "sub", "no download below"),
        (root / "other/thing", "no download below"),
        (root / "hf/linked", "links lead to it"),
        (root / "hf/plain", "no source.json"),
        (root / "hf/gone", "not there any more"),
        (f"{mine}\0", "no plain absolute path"),
    ):
        assert words in await kept(root, path), path
    assert (outside / NOTE).exists()
    assert (mine / "sub/more").exists()


async def test_links_within_are_removed_and_not_followed(root: Path, tmp_path: Path) -> None:
    folder, outside = downloaded(root), tmp_path / "precious"
    outside.mkdir()
    (outside / "file").write_bytes(b"z")
    (folder / "sub/out").symlink_to(outside)
    (folder / "top").symlink_to(outside / "file")
    await ask(root, folder)
    assert not folder.exists()
    assert (outside / "file").read_bytes() == b"z"


@pytest.mark.parametrize("form", ["{source}", "file:{folder}/model.safetensors", "file:{root}"])
async def test_what_a_live_shard_uses_stays(root: Path, form: str) -> None:
    folder = downloaded(root)
    source = form.format(source=SOURCE, folder=folder, root=root)
    assert f"a live shard of this node uses it, by the source {source}" == await kept(
        root, folder, "hf:other/x", "nonsense", source
    )
    assert (folder / "model.safetensors").exists()


async def test_D22_what_is_being_fetched_stays(root: Path) -> None:
    folder = downloaded(root)
    with (folder / "lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert await kept(root, folder) == "it is being fetched right now"
    assert read_note(folder)["complete"] is True


async def test_a_removal_that_fails_half_way_never_leaves_half_a_model(root: Path) -> None:
    folder = downloaded(root)

    def fails(path: str, *_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("agent.weights_collect.shutil.rmtree", fails)
        done = remove(folder)
    assert done.freed_bytes == 1000
    assert "Permission denied" in str(done.problem)
    assert read_note(folder) == {"source": SOURCE, "complete": False}
    assert remove(folder).problem is None
    assert not folder.exists()


async def test_an_answer_that_was_lost_is_told_again(root: Path) -> None:
    folder = downloaded(root)
    collector = Collector(Weights(root, {}), tuple)
    first = await collector.collect(7, [str(folder)])
    assert await collector.collect(7, [str(folder)]) == first
    assert "not there" in (await collector.collect(8, [str(folder)]))["kept"][0]["reason"]


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    with running(made.http):
        yield made
        made.release.set()


@pytest.mark.slow
async def test_a_download_that_waits_for_a_removal_brings_everything_anew(
    server: Server, tmp_path: Path, nursery: trio.Nursery
) -> None:
    source = f"{server.url}/m.gguf"
    path = await weights(tmp_path).ensure(source, nothing)
    (path.parent / "source.json").write_text('{"source": "x", "complete": false}')
    lock = (path.parent / "lock").open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    waited: list[dict[str, Any]] = []
    found: list[Path] = []

    async def want() -> None:
        found.append(await weights(tmp_path).ensure(source, waited.append))

    nursery.start_soon(want)
    await until(lambda: bool(waited), "a download waits for the lock")
    for name in ("m.gguf", "source.json", "lock"):
        (path.parent / name).unlink()
    path.parent.rmdir()
    lock.close()
    await until(lambda: bool(found), "it came anew")
    assert found[0].read_bytes() == DATA
    assert server.ranges == [None, None]


async def test_who_wants_a_download_that_is_being_removed_waits(root: Path) -> None:
    folder = downloaded(root)
    here = Weights(root, {})
    seen: list[Path] = []
    async with trio.open_nursery() as nursery:

        async def want() -> None:
            seen.append(await here.ensure(SOURCE, nothing))

        with here.removing(folder):
            nursery.start_soon(want)
            await trio.testing.wait_all_tasks_blocked()
            assert seen == []
    assert seen == [folder]


async def test_the_agent_removes_what_it_is_asked_to(
    node: Node, odd: Callable[..., dict[str, Any]]
) -> None:
    root = node.folder / "weights"
    gone, used = downloaded(root), downloaded(root, "hf:org/used")
    node.door.assign(odd(1, source="hf:org/used"))
    async with node.running():
        await node.state(1, "ready")
        node.door.asks = [{"id": 5, "kind": "collect", "paths": [str(gone), str(used)]}]
        looks = node.probes.looks
        await until(lambda: 5 in node.door.collected, "it answers")
        await until(lambda: node.probes.looks > looks, "it looks at its disks at once")
    answer = node.door.collected[5]
    assert [f["path"] for f in answer["freed"]] == [str(gone)]
    assert "live shard" in answer["kept"][0]["reason"]
    assert used.exists()
    assert not gone.exists()


@pytest.mark.slow
async def test_what_a_shard_used_that_is_over_goes(
    node: Node, odd: Callable[..., dict[str, Any]]
) -> None:
    """The shard is known until the next list, which on a quiet node may be next week."""
    folder = downloaded(node.folder / "weights")
    first = odd(1, source=SOURCE)
    node.door.assign(first)
    async with node.running():
        await node.state(1, "ready")
        node.door.assign({**first, "desired": "stopped"})
        await node.state(1, "stopped")
        node.door.asks = [{"id": 5, "kind": "collect", "paths": [str(folder)]}]
        await until(lambda: 5 in node.door.collected, "it answers")
    assert node.door.collected[5]["kept"] == []
    assert not folder.exists()
