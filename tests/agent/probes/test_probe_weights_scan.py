"""Weights on disk: every layout, every kind of half-finished, filers, and unchanged trees."""

from __future__ import annotations

import json
import os
import re
import struct
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agent.probes import weights_files, weights_scan
from agent.probes.root import Root
from agent.probes.weights_scan import WeightsScan
from agent.probes.weights_tree import Tree

CONFIG = json.dumps(
    {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
)


def shard(name: str, values: int = 16) -> bytes:
    end = values * 2
    head = {f"{name}.weight": {"dtype": "BF16", "shape": [values], "data_offsets": [0, end]}}
    text = json.dumps(head).encode()
    return struct.pack("<Q", len(text)) + text + b"\0" * end


def gguf(layers: int = 2) -> bytes:
    def text(word: str) -> bytes:
        return struct.pack("<Q", len(word)) + word.encode()

    keys = text("general.architecture") + struct.pack("<I", 8) + text("llama")
    keys += text("llama.block_count") + struct.pack("<II", 4, layers)
    head = b"GGUF" + struct.pack("<IQQ", 3, 1, 2) + keys
    head += text("output.weight") + struct.pack("<IQIQ", 1, 8, 0, 0)
    return head + b"\0" * (-len(head) % 32) + b"\0" * 32


def write(place: Path, files: dict[str, bytes | str]) -> Path:
    for name, data in files.items():
        path = place / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data.encode() if isinstance(data, str) else data)
    return place


def scan(place: Path, *sources: str) -> list[dict]:
    return WeightsScan([place]).scan(sources)


def one(place: Path, *sources: str) -> dict:
    [found] = scan(place, *sources)
    return found


def link(place: Path, to: str) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    place.symlink_to(to)


INDEX = json.dumps(
    {
        "metadata": {"total_size": 64},
        "weight_map": {
            "a.weight": "model-00001-of-00002.safetensors",
            "b.weight": "model-00002-of-00002.safetensors",
        },
    }
)
SHARDED: dict[str, bytes | str] = {
    "config.json": CONFIG,
    "model.safetensors.index.json": INDEX,
    "model-00001-of-00002.safetensors": shard("a"),
    "model-00002-of-00002.safetensors": shard("b"),
}


def test_plain_folder_with_its_facts(tmp_path):
    write(tmp_path / "tiny", SHARDED)
    found = one(tmp_path)
    assert (found["name"], found["format"], found["complete"]) == ("tiny", "safetensors", True)
    assert found["path"] == str(tmp_path / "tiny")
    assert found["bytes"] == sum(len(data) for data in SHARDED.values())
    assert found["facts"]["parameters"] == 32
    assert found["facts"]["tensor_bytes"] == 64
    assert found["facts"]["dtype"] == "bfloat16"  # the config has none: the tensors tell
    assert found["facts"]["kv_bytes_per_token"] == 2 * 2 * 2 * 16 * 2
    assert "source" not in found
    assert "reason" not in found


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model-00002-of-00002.safetensors": None}, r"1 of 2 files of model\.safetensors\.index"),
        ({"model-00002-of-00002.safetensors": b""}, "1 of 2 files"),
        ({"model-00002-of-00002.safetensors": shard("b")[:-1]}, "lacks its last 1 bytes"),
        ({"model-00002-of-00002.safetensors": b"x" * 200}, "is no safetensors file"),
        ({"model.safetensors.index.json": INDEX[:-20]}, "is cut off"),
        (
            {"model.safetensors.index.json": None, "model-00001-of-00002.safetensors": None},
            r"1 of 2 parts of model\.safetensors missing: 1",
        ),
        (
            {"model-00001-of-00002.safetensors": "version https://git-lfs.github.com/spec/v1\noid"},
            "Git LFS pointer",
        ),
        ({f"model-0000{i}-of-00002.safetensors": None for i in (1, 2)}, "2 of 2 files"),
        (
            {name: None for name in SHARDED if name != "config.json"},
            "holds no weights: only its configuration",
        ),
    ],
)
def test_why_a_model_is_not_complete(tmp_path, change, words):
    files = {**SHARDED, **change}
    write(tmp_path / "m", {name: data for name, data in files.items() if data is not None})
    found = one(tmp_path)
    assert found["complete"] is False
    assert re.search(words, found["reason"])
    assert found["facts"]["layers"] == 2
    assert "parameters" not in found["facts"]


def test_a_file_that_aria2_still_fills_is_not_complete(tmp_path):
    write(tmp_path / "m", {**SHARDED, "model-00001-of-00002.safetensors.aria2": b"x"})
    write(tmp_path, {"a.gguf": gguf(), "a.gguf.aria2": b"x"})
    for found in scan(tmp_path):
        assert found["complete"] is False
        assert ".aria2 says that a download is not finished" in found["reason"]


def test_the_same_weights_twice_are_summed_once(tmp_path):
    extra = {"consolidated.safetensors": shard("x", 99), "original/consolidated.00.pth": b"p" * 50}
    write(tmp_path / "m", {"model.safetensors": shard("a"), "config.json": CONFIG, **extra})
    found = one(tmp_path)
    assert found["facts"]["tensor_bytes"] == 32
    assert found["bytes"] > 32 + 198 + 50


def test_pytorch_files_are_complete_when_their_archive_ends(tmp_path):
    good = b"PK\x03\x04" + b"data" * 10 + b"PK\x05\x06" + b"\0" * 18
    write(tmp_path / "good", {"config.json": CONFIG, "pytorch_model.bin": good})
    write(tmp_path / "short", {"config.json": CONFIG, "pytorch_model.bin": good[:-9]})
    found = {d["name"]: d for d in scan(tmp_path)}
    assert found["good"]["complete"] is True
    assert found["good"]["format"] == "pytorch"
    assert found["good"]["facts"]["tensor_bytes"] == len(good)
    assert "cut off" in found["short"]["reason"]


def test_gguf_files_single_split_and_damaged(tmp_path):
    write(
        tmp_path,
        {
            "a.gguf": gguf(3),
            "b-00001-of-00002.gguf": gguf(),
            "b-00002-of-00002.gguf": gguf(),
            "c-00001-of-00002.gguf": gguf(),
            "deep/d.gguf": gguf()[:-1],
            "deep/e.gguf": b"nonsense" * 9,
        },
    )
    found = {d["name"]: d for d in scan(tmp_path)}
    assert found["a"]["complete"] is True
    assert found["a"]["facts"]["layers"] == 3
    assert found["a"]["facts"]["quantization"] == {"method": "gguf", "name": "F32", "bits": 32.0}
    both = found["b-00001-of-00002"]
    assert (both["complete"], both["bytes"]) == (True, 2 * len(gguf()))
    assert both["facts"]["parameters"] == 16
    assert found["c-00001-of-00002"]["reason"] == "1 of 2 parts of c.gguf missing: 2"
    assert "lacks its last 1 bytes" in found["d"]["reason"]
    assert "is no GGUF file" in found["e"]["reason"]


def hub(place: Path, *, finished: bool = True) -> Path:
    """A cache with two revisions of one repository that share a shard."""
    repo = place / "hub/models--org--tiny"
    blobs = {"b1": shard("a"), "b2": shard("b"), "b3": CONFIG, "b4": INDEX, "b5": "readme"}
    write(repo / "blobs", blobs)
    write(repo / "refs", {"main": "bbbb\n", "v1": "aaaa"})
    write(repo, {".no_exist/bbbb/x.json": "", "trees/bbbb.json": "[]"})
    write(place / "hub", {"CACHEDIR.TAG": "Signature", "version.txt": "1"})
    names = {
        "model-00001-of-00002.safetensors": "b1",
        "model-00002-of-00002.safetensors": "b2",
        "config.json": "b3",
        "model.safetensors.index.json": "b4",
    }
    for revision in ("aaaa", "bbbb"):
        for name, blob in names.items():
            if finished or blob != "b2":
                link(repo / "snapshots" / revision / name, f"../../blobs/{blob}")
    link(repo / "snapshots/bbbb/README.md", "../../blobs/b5")
    return repo


def test_hub_cache_has_a_document_for_each_revision(tmp_path):
    repo = hub(tmp_path)
    new, old = sorted(scan(tmp_path), key=lambda d: d["source"])
    assert (new["source"], new["revision"]) == ("hf:org/tiny", "bbbb")
    assert (old["source"], old["revision"]) == ("hf:org/tiny@v1", "aaaa")
    assert new["path"] == str(repo / "snapshots/bbbb")
    assert new["complete"]
    assert old["complete"]
    assert {d["name"] for d in (new, old)} == {"org/tiny"}
    held = sum(path.stat().st_size for path in (repo / "blobs").iterdir())
    assert new["bytes"] == held
    assert old["shared_bytes"] == old["bytes"]
    assert new["bytes"] + old["bytes"] - old["shared_bytes"] == held
    assert new["facts"]["parameters"] == 32


def test_hub_cache_with_an_unfinished_download(tmp_path):
    repo = hub(tmp_path, finished=False)
    write(repo / "blobs", {"b9.incomplete": b"12345"})
    for found in scan(tmp_path):
        assert found["complete"] is False
        assert "model-00002-of-00002.safetensors" in found["reason"]
        assert "1 download is not finished" in found["reason"]


def test_hub_cache_of_which_nothing_has_arrived(tmp_path):
    repo = tmp_path / "models--org--new"
    write(repo, {"blobs/x.incomplete": b"123", "refs/main": "cccc"})
    found = one(tmp_path)
    assert (found["source"], found["revision"]) == ("hf:org/new", "cccc")
    assert (found["complete"], found["bytes"]) == (False, 3)


def test_hub_cache_whose_blob_was_removed(tmp_path):
    repo = hub(tmp_path)
    (repo / "blobs/b2").unlink()
    assert all("model-00002" in d["reason"] for d in scan(tmp_path))


def test_gguf_files_of_a_hub_repository_are_named_by_file(tmp_path):
    repo = tmp_path / "models--org--tiny-GGUF"
    write(repo, {"blobs/q4": gguf(), "blobs/q8": gguf(5), "refs/main": "dddd"})
    link(repo / "snapshots/dddd/tiny-Q4_0.gguf", "../../blobs/q4")
    link(repo / "snapshots/dddd/Q8/tiny-Q8_0.gguf", "../../../blobs/q8")
    found = {d["source"]: d for d in scan(tmp_path)}
    assert set(found) == {
        "hf:org/tiny-GGUF/tiny-Q4_0.gguf",
        "hf:org/tiny-GGUF/Q8/tiny-Q8_0.gguf",
    }
    assert found["hf:org/tiny-GGUF/Q8/tiny-Q8_0.gguf"]["facts"]["layers"] == 5
    assert found["hf:org/tiny-GGUF/tiny-Q4_0.gguf"]["path"].endswith("dddd/tiny-Q4_0.gguf")


def test_captured_listing_of_a_hub_cache(captures, tmp_path):
    """The listing as a tree again: what is not a link is a file of some bytes."""
    stack: list[str] = []
    line = re.compile(r"^(.*?)(?:├── |└── )\[ *([0-9.]+[MKG]?)\]  (\S+)(?: -> (\S+))?$")
    for text in (captures / "models/hf-cache-tree.txt").read_text().splitlines()[1:]:
        match = line.match(text)
        assert match, text
        depth = (len(match[1]) - 4) // 4
        stack[depth:] = [match[3]]
        path = tmp_path.joinpath(*stack)
        if match[4]:
            link(path, match[4])
        elif path.parent.name == "refs":
            write(path.parent, {path.name: "bbc77c8132af1cc5cf678da3f1ddf2de43606d48"})
        elif path.parent.name in {"blobs", "trees"}:
            write(path.parent, {path.name: b"x" * int(float(match[2].rstrip("MK")) * 10)})
    main, other = sorted(scan(tmp_path), key=lambda d: len(d["source"]))
    assert main["source"] == "hf:julien-c/EsperBERTo-small"
    assert main["revision"].startswith("bbc77c8")
    assert other["source"].endswith("@2439f60ef33a0d46d85da5001d52aeda5b00ce9f")
    assert (main["format"], main["complete"]) == ("pytorch", True)
    assert main["bytes"] == 3210 + 3980
    assert (other["bytes"], other["shared_bytes"]) == (3210 + 14, 3210)


def download(place: Path, source: str, complete: bool, **files: bytes | str) -> Path:
    note = json.dumps({"source": source, "complete": complete, "bytes": 1})
    return write(place, {"source.json": note, "lock": "", **files})


def test_our_downloads_keep_their_source_words(tmp_path):
    whole = "https://host/m.gguf#sha256=" + "0" * 64
    download(tmp_path / "http/m.gguf-1", whole, True, **{"m.gguf": gguf()})
    download(tmp_path / "http/n.gguf-2", "https://host/n.gguf", False, **{"n.gguf.part": b"12"})
    download(tmp_path / "hf/org--tiny-3", "hf:org/tiny@main", True, **SHARDED)
    found = {d["source"]: d for d in scan(tmp_path)}
    assert set(found) == {whole, "https://host/n.gguf", "hf:org/tiny@main"}
    assert all(d["managed"] for d in found.values())
    assert found[whole]["path"] == str(tmp_path / "http/m.gguf-1")
    assert (found[whole]["complete"], found[whole]["facts"]["layers"]) == (True, 2)
    assert found["https://host/n.gguf"]["reason"] == "its download is not finished"
    assert found["hf:org/tiny@main"]["revision"] == "main"
    assert found["hf:org/tiny@main"]["name"] == "org/tiny"
    assert found["hf:org/tiny@main"]["facts"]["parameters"] == 32


def test_a_repository_with_both_formats_is_what_an_engine_loads_of_it(tmp_path):
    both = {**SHARDED, "extra.gguf": gguf()}
    download(tmp_path / "hf/a-1", "hf:org/both", True, **both)
    download(tmp_path / "hf/b-2", "hf:org/both/extra.gguf", True, **both)
    found = {d["source"]: d["format"] for d in scan(tmp_path)}
    assert found == {"hf:org/both": "safetensors", "hf:org/both/extra.gguf": "gguf"}


def test_a_verified_download_of_an_unknown_kind_stays_complete_but_a_cut_one_does_not(tmp_path):
    odd = b"GGUF" + struct.pack("<I", 9) + b"\0" * 90
    download(tmp_path / "http/a-1", "https://host/a.gguf", True, **{"a.gguf": odd})
    download(tmp_path / "http/b-2", "https://host/b.gguf", True, **{"b.gguf": gguf()[:-3]})
    found = {d["source"]: d for d in scan(tmp_path)}
    assert found["https://host/a.gguf"]["complete"] is True
    assert "version 9" in found["https://host/a.gguf"]["reason"]
    assert found["https://host/b.gguf"]["complete"] is False


def test_local_sources_of_models(tmp_path):
    write(tmp_path / "models/m", SHARDED)
    write(tmp_path / "elsewhere", {"x.gguf": gguf(), "odd.weights": b"123"})
    sources = [
        f"file:{tmp_path}/models/m",
        f"file:{tmp_path}/elsewhere/x.gguf",
        f"file:{tmp_path}/elsewhere/odd.weights",
        f"file:{tmp_path}/none",
        "file:relative",
    ]
    found = {d["source"]: d for d in scan(tmp_path / "models", *sources)}
    assert set(found) == set(sources[:3])
    assert found[sources[0]]["complete"] is True
    assert found[sources[1]]["facts"]["layers"] == 2
    assert (found[sources[2]]["format"], found[sources[2]]["bytes"]) == ("other", 3)


def test_shared_filers_are_named_and_found_again_from_another_mount(machine, tmp_path):
    table = (
        "1 0 259:2 / / rw - ext4 /dev/a rw\n"
        "2 1 0:40 / {} rw - nfs4 filer:/export/models rw,addr=10.0.0.1\n"
    )
    place = write(tmp_path / "root/data/models/m", SHARDED).parent
    local = WeightsScan(["/data/models"], machine({"/proc/self/mountinfo": table.format("/mnt")}))
    assert "shared" not in local.scan()[0]
    root = machine({"/proc/self/mountinfo": table.format("/data/models")})
    [found] = WeightsScan(["/data/models"], root).scan()
    assert found["path"] == "/data/models/m"
    assert (found["shared"], found["filer"]) == (True, "nfs:filer:/export/models")
    assert found["filer_path"] == "/m"
    assert place.is_dir()


def test_odd_trees_end(tmp_path):
    write(tmp_path / "a/b", SHARDED)
    link(tmp_path / "a/loop", "..")
    link(tmp_path / "a/self", "self")
    link(tmp_path / "twice", "a")
    write(tmp_path, {".hidden/m/model.safetensors": shard("a"), "datasets--x/a.gguf": gguf()})
    deep = tmp_path.joinpath(*["d"] * 30)
    write(deep, {"x.gguf": gguf()})
    assert [Path(d["path"]).name for d in scan(tmp_path)] == ["b"]


def test_names_that_are_no_text(tmp_path):
    odd = Path(os.fsdecode(os.fsencode(tmp_path) + b"/m\xff\xfe"))
    try:
        write(odd, SHARDED)
    except OSError:
        pytest.skip("this filesystem takes text only")
    found = one(tmp_path)
    assert found["name"] == r"m\xff\xfe"
    json.dumps(found).encode()


def test_what_cannot_be_read_is_told(tmp_path):
    scanner = WeightsScan([tmp_path / "none", tmp_path])
    write(tmp_path, {"a.gguf": gguf()})
    assert len(scanner.scan()) == 1
    assert "cannot be read" in scanner.problems[str(tmp_path / "none")]
    (tmp_path / "none").mkdir()
    scanner.scan()
    assert scanner.problems == {}


def test_a_tree_of_too_many_entries_is_cut_and_told(tmp_path, monkeypatch):
    monkeypatch.setattr("agent.probes.weights_tree.MAX_ENTRIES", 20)
    write(tmp_path, {f"{i:03}/x.txt": "" for i in range(40)})
    found = Tree(Root(), weights_files.Memory()).scan(tmp_path)
    assert "more than 20 entries" in (found.problem or "")


def test_an_unchanged_file_is_not_read_again(tmp_path):
    write(tmp_path, {"a.gguf": gguf(3)})
    scanner = WeightsScan([tmp_path])
    assert scanner.scan()[0]["facts"]["layers"] == 3
    before = (tmp_path / "a.gguf").stat()
    (tmp_path / "a.gguf").write_bytes(gguf(4))
    os.utime(tmp_path / "a.gguf", ns=(before.st_atime_ns, before.st_mtime_ns))
    assert scanner.scan()[0]["facts"]["layers"] == 3
    os.utime(tmp_path / "a.gguf", ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    assert scanner.scan()[0]["facts"]["layers"] == 4
    (tmp_path / "a.gguf").unlink()
    assert scanner.scan() == []


@pytest.mark.slow
async def test_a_dead_filer_costs_only_its_own_directory(tmp_path, monkeypatch):
    write(tmp_path / "dead", {"a.gguf": gguf()})
    write(tmp_path / "alive", {"b.gguf": gguf()})
    scanner = WeightsScan([tmp_path / "dead", tmp_path / "alive"])
    assert len(await scanner.read()) == 2
    monkeypatch.setattr(weights_scan, "SCAN_TIMEOUT_S", 1.0)
    lock = scanner._places[tmp_path / "dead"].lock
    with lock:  # the thread waits here as it would for the filer
        assert {d["name"] for d in await scanner.read()} == {"a", "b"}  # as it was last
        assert "does not answer" in scanner.problems[str(tmp_path / "dead")]
        monkeypatch.setattr(weights_scan, "LAST_VALID_S", 0.0)
        assert {d["name"] for d in await scanner.read()} == {"b"}


def test_a_report_stays_within_what_the_database_takes(tmp_path, monkeypatch):
    monkeypatch.setattr(weights_scan, "MAX_REPORT", 3000)
    write(tmp_path, {f"{i}.gguf": gguf() for i in range(30)})
    download(tmp_path / "own", "https://host/z.gguf", True, **{"z.gguf": gguf()})
    scanner = WeightsScan([tmp_path])
    found = scanner.scan()
    assert len(json.dumps(found)) < 3200
    assert found[0].get("managed") is True
    assert "31 weights found" in scanner.problems["all"]


def test_index_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(weights_files, "CHUNK", 64)
    write(tmp_path, {"i.json": INDEX})
    shards, whole = weights_files.read_index(tmp_path / "i.json")
    assert whole
    assert len(shards) == 2


def test_captured_index_and_folder(captures, tmp_path):
    index = captures / "models/llama-3.1-8b.model.safetensors.index.json"
    shards, whole = weights_files.read_index(index)
    assert whole
    assert sorted(shards) == [f"model-0000{i}-of-00004.safetensors" for i in range(1, 5)]
    found = one(captures / "models/tiny-random-PhiModel")
    assert found["complete"] is True
    assert found["facts"]["parameters"] == 2 * 46_282
    assert found["facts"]["architecture"] == "PhiModel"


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.dictionaries(st.sampled_from(sorted(SHARDED)), st.binary(max_size=60), max_size=4))
def test_damaged_files_never_raise(tmp_path, damage):
    write(tmp_path / "m", {**SHARDED, **damage})
    for found in scan(tmp_path):
        json.dumps(found, allow_nan=False).encode()
