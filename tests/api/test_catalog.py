"""Definitions: every fault with its reason, and what applying changes."""

from __future__ import annotations

import copy
import json

import pytest

from controller.catalog.apply import apply, apply_file
from controller.catalog.faults import CatalogError
from controller.catalog.profile import fingerprint
from controller.catalog.reading import parse, read_file
from controller.catalog.units import mebibytes, seconds
from sql.errors import Refused
from tests.api.served import TINY, command

TOML = """
[pools.cpu]
labels = {role = "cpu", zone = ["b", "a", "a"]}

[[models]]
name = "tiny"
source = "hf:org/tiny@main/tiny.gguf"
aliases = ["small", "default"]
min_replicas = 0
max_replicas = 2
idle_timeout = "5m"
fallbacks = ["org/big"]

[[models.profiles]]
name = "cpu"
engine = "llamacpp"
args = ["-c", 4096, "--temp", 0.5]
cpus = 2
memory = "2GiB"
pool = "cpu"
env = {OMP_NUM_THREADS = 2}

[[models]]
name = "org/big"
source = "https://example.org/big.gguf"

[[models.profiles]]
name = "h100"
engine = "vllm"
engine_version = "0.32.0"
gpus = 2
gpu_class = "H100"
gpu_memory = "60GiB"
share = true
arch = "amd64"
cpu_flags = ["avx512f"]
start_deadline = "10m"
stop_grace = "0s"
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "catalog.toml"
    path.write_text(TOML)
    return path


def with_profile(**more):
    model = copy.deepcopy(TINY)
    model["profiles"][0] |= more
    return {"models": [model]}


def with_model(**more):
    return {"models": [TINY | more]}


FAULTS = [
    (with_profile(arg=["x"]), "model tiny, profile cpu: unknown field 'arg', did you mean 'args'?"),
    (with_model(replicas=3), "model tiny: unknown field 'replicas', did you mean 'min_replicas'?"),
    ({"model": []}, "unknown field 'model', did you mean 'models'?"),
    ({"pools": {"a": {"label": {}}}}, "pool a: unknown field 'label', did you mean 'labels'?"),
    ({"models": [{"name": "x", "profiles": []}]}, "model x: the field 'source' is missing"),
    ({"models": [{}]}, "model number 1: the field 'name' is missing"),
    (
        with_model(min_replicas=3, max_replicas=2),
        "model tiny: min_replicas 3 is over max_replicas 2",
    ),
    (
        with_model(min_replicas=-1),
        "model tiny: min_replicas: must be greater than or equal to 0, not '-1'",
    ),
    (with_model(profiles=[]), "model tiny: it has no profiles"),
    (with_model(aliases=["tiny"]), "its alias tiny is its own name"),
    (with_model(aliases=["a", "a"]), "the alias a is there twice"),
    (with_model(fallbacks=["tiny"]), "it is its own fallback"),
    (with_model(fallbacks=["nope"]), "model tiny: there is no model nope to fall back to"),
    (with_model(fallbacks=["small"]), "the fallback small is an alias of model tiny"),
    (with_model(name="a b"), "model a b: name: the name 'a b' has ' '"),
    (with_model(name="a//b"), "empty or dot part"),
    (with_model(source="ftp://x/y"), "'ftp://x/y' is none of hf:org/repo"),
    (with_model(source="file:x"), "is none of"),
    (with_model(source="hf:org"), "is none of"),
    (with_model(source="s3:bkt/../k"), "'s3:bkt/../k' is none of hf:org/repo"),
    (with_model(source="s3:bkt/k#sha256=1"), "is none of"),
    (with_model(source="s3:"), "is none of"),
    (with_model(idle_timeout="5 minutes"), "idle_timeout: '5 minutes' is not a duration"),
    (with_profile(memory=5), "memory: 5 is not a size"),
    (
        with_profile(engine="tensorrt"),
        "engine: there is no engine 'tensorrt': the engines are llamacpp, vllm, sglang, command",
    ),
    (
        with_profile(engine_version="2.0; rm"),
        "engine_version: '2.0; rm' is no version of an engine: write it as 0.32.0",
    ),
    (with_profile(engine_version=""), "'' is no version of an engine"),
    (with_profile(engine="vlm"), "there is no engine 'vlm': did you mean 'vllm'?"),
    (with_profile(fabric="nvlink"), "must be 'nvlink-domain', 'fabric' or 'any', not 'nvlink'"),
    (with_model(fallbacks=["tny"]), "no model tny to fall back to: did you mean 'tiny'?"),
    (with_model(name="a\u200bb"), "has '\\u200b': use no spaces, control or invisible characters"),
    (with_model(name="a\u202eb"), "invisible characters"),
    (with_model(name="cafe\u0301"), "another name looks the same: write 'caf\u00e9'"),
    (with_profile(engine="command"), "engine command needs a command"),
    (with_profile(command=["x"]), "command belongs to engine command"),
    (
        with_profile(engine="command", command=["x", "{prot}"]),
        "the command has {prot}, which is none of port",
    ),
    (
        with_profile(engine="command", command=["x", "{master_port}"]),
        "{master_port}, which a replica on one node does not have: set shards",
    ),
    (with_profile(engine="llamacpp", shards=2), "llamacpp runs on one node and shards is 2"),
    (
        with_profile(engine="vllm", shards=2, fabric="nvlink-domain"),
        "nvlink-domain connects cards and the profile wants none: set gpus",
    ),
    (with_profile(share=True, gpus=1), "share needs gpu_memory"),
    (with_profile(gpu_class="H100"), "wants none: set gpus"),
    (with_profile(gpus=65), "gpus: must be less than or equal to 64"),
    (with_profile(arch="sparc"), "no node has the architecture 'sparc'"),
    (
        with_profile(pool="nope"),
        "profile cpu: there is no pool nope, so nothing could ever place it",
    ),
    (with_profile(env={"A=B": "x"}), "cannot be an environment variable"),
    (
        with_profile(args=[True]),
        "model tiny, profile cpu, args number 1: must be a valid string, not 'True'",
    ),
    (with_profile(args=["a\0b"]), "NUL"),
    (
        {"pools": {"p": {"labels": {"role": []}}}},
        "pool p: labels: role accepts no value, so no node could ever belong",
    ),
    ({"pools": {"P!": {}}}, "'P!' is no pool name"),
    ({"models": [TINY, TINY]}, "model tiny is declared twice"),
    (
        {"models": [TINY, command("b", aliases=["tiny"])]},
        "model b: the alias tiny is the name of model tiny",
    ),
    (
        {"models": [command("a", aliases=["b"]), command("b", aliases=["a"])]},
        "model a: the alias b is the name of model b",
    ),
    (
        {"models": [TINY, command("b", aliases=["small"])]},
        "model b: the alias small is an alias of model tiny",
    ),
]


async def test_faults_are_named(pool):
    for document, reason in FAULTS:
        with pytest.raises(CatalogError) as caught:
            await changes(pool, document)
        assert reason in str(caught.value)


def test_units():
    assert [seconds(v) for v in ("90s", "5m", "1h30m", "250ms", 7)] == [90, 300, 5400, 0.25, 7]
    assert [mebibytes(v) for v in ("512MiB", "80GiB", "1KiB", "1GB")] == [512, 81920, 1, 954]
    for wrong in ("", "5", "5x", "-5s", True, None, "11y", "99999w", float("nan"), float("inf")):
        with pytest.raises(ValueError, match="duration"):
            seconds(wrong)
    for wrong in ("", "5", "5GiBs", 5, None, "0GiB", "-1GiB"):
        with pytest.raises(ValueError, match="size"):
            mebibytes(wrong)


def test_json_is_read_like_toml(file, tmp_path):
    as_json = tmp_path / "c.json"
    as_json.write_text(json.dumps(__import__("tomllib").loads(TOML)))
    assert read_file(as_json) == read_file(file)


def test_unreadable_files_say_why(tmp_path):
    for name, content, reason in (
        ("a", b"\xff", "not UTF-8"),
        ("b", b"a = ", "not TOML"),
        ("c", b"{", "not JSON"),
        ("d", b"", "is empty: to declare that there are no models, write"),
        ("e", b"# nothing\n", "is empty"),
        ("f", b"{}", "is empty"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(CatalogError, match=reason):
            read_file(tmp_path / name)
    with pytest.raises(CatalogError, match="No such file"):
        read_file(tmp_path / "none")


def test_fingerprint_moves_with_what_matters_only(file):
    big = read_file(file).models[1]
    row = big.profiles[0].document(big.source)
    base = fingerprint(row | {"source": big.source})
    assert base == row["fingerprint"]
    moved = {f for f in row if fingerprint(row | {"source": big.source, f: 77}) != base}
    # A new field of a profile belongs to one of the two: does it change how an engine is run?
    where = {"pool", "arch", "cpu_flags", "driver_min", "cuda_min", "exclude_nodes", "spread"}
    assert set(row) - moved == where | {"name", "start_deadline_s", "fabric", "fingerprint"}
    assert fingerprint(row | {"source": "other"}) != base
    gang = row | {"source": big.source, "shards": 2}
    assert fingerprint(gang | {"fabric": "any"}) != fingerprint(gang)


def test_fingerprints_of_profiles_without_the_newer_fields_are_those_of_old():
    facts = {"source": "file:/m", "engine": "command", "command": ["a"], "shards": 1, "gpus": 0}
    plain = fingerprint(facts)
    assert plain == "6a42429bef580c76"
    assert fingerprint(facts | {"health_path": None, "stop_grace_s": None}) == plain
    assert len({plain, *(fingerprint(facts | {"health_path": p}) for p in ("/a", "/b"))}) == 3


async def changes(pool, document, **more):
    given = {"origin": "file", "file": "/c.toml", "prune": True} | more
    done = await apply(pool, parse(document, "c"), "me", **given)
    return {(c.kind, c.name): c.action for c in done.changes}


async def test_a_file_twice_changes_nothing(pool, file):
    first = (await apply_file(pool, file, "me")).changes
    assert {c.action for c in first} == {"added"}
    again = (await apply_file(pool, file, "me")).changes
    assert {(c.kind, c.name, c.action) for c in again} == {
        ("pool", "cpu", "unchanged"),
        ("model", "tiny", "unchanged"),
        ("model", "org/big", "unchanged"),
    }
    row = await pool.fetchrow("select * from llmgw.profiles where model = 'org/big'")
    assert (row["gpu_memory_mib"], row["share"], row["arch"]) == (61440, True, "x86_64")
    labels = await pool.fetchval("select labels from llmgw.pools where name = 'cpu'")
    assert labels == {"role": ["cpu"], "zone": ["a", "b"]}
    assert await pool.fetchval("select args from llmgw.profiles where model = 'tiny'") == [
        "-c",
        "4096",
        "--temp",
        "0.5",
    ]


async def test_dry_run_shows_and_keeps_nothing(pool, file):
    dry = await apply_file(pool, file, "me", dry_run=True)
    assert {c.action for c in dry.changes} == {"added"}
    assert (
        await pool.fetch("select 1 from llmgw.models union all select 1 from llmgw_core.audit")
        == []
    )


async def test_what_a_file_no_longer_declares_is_removed(pool):
    a, b = command("a", fallbacks=["b"]), command("b")
    pooled = command("a")
    pooled["profiles"][0]["pool"] = "p"
    await changes(pool, {"pools": {"p": {}}, "models": [pooled | {"fallbacks": ["b"]}, b]})
    assert await changes(pool, {"models": [a, b]}) == {
        ("model", "a"): "changed",
        ("model", "b"): "unchanged",
        ("pool", "p"): "removed",
    }
    await changes(pool, {"models": [command("other")]}, file="/other.toml")
    assert await changes(pool, {"models": []}) == {
        ("model", "a"): "removed",
        ("model", "b"): "removed",
    }
    assert [r["name"] for r in await pool.fetch("select name from llmgw.models")] == ["other"]


async def test_names_move_between_models_in_one_call(pool):
    await changes(pool, {"models": [command("a", aliases=["x"]), command("b"), command("old")]})
    moved = await changes(pool, {"models": [command("b", aliases=["x", "old"]), command("a")]})
    assert moved == {
        ("model", "old"): "removed",
        ("model", "a"): "changed",
        ("model", "b"): "changed",
    }
    swapped = await changes(
        pool, {"models": [command("b", fallbacks=["a"]), command("a", aliases=["x"])]}
    )
    assert set(swapped.values()) == {"changed"}


async def test_origins_do_not_overwrite_each_other(pool):
    await changes(pool, {"models": [TINY]})
    with pytest.raises(Refused, match=r"declared by the catalog file /c.toml: change it there"):
        await changes(pool, {"models": [TINY]}, origin="api", file=None, prune=False)
    with pytest.raises(CatalogError, match="the alias small is an alias of model tiny"):
        await changes(
            pool,
            {"models": [command("b", aliases=["small"])]},
            origin="api",
            file=None,
            prune=False,
        )
    await changes(
        pool, {"models": [command("b", fallbacks=["tiny"])]}, origin="api", file=None, prune=False
    )
    with pytest.raises(Refused, match="tiny is a fallback of model b"):
        await changes(pool, {"models": []})


async def test_F10_long_and_foreign_words_are_kept(pool):
    emoji = command("模型🦙", description="語" * 9000)
    await changes(
        pool, {"models": [emoji], "pools": {"p": {"labels": {f"l{i}": "v" for i in range(500)}}}}
    )
    assert len(await pool.fetchval("select description from llmgw.models")) == 9000
