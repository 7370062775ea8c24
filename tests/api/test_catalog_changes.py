"""What applying a catalog tells: differences, what follows for replicas, who did it; odd names."""

from __future__ import annotations

import copy
import json
from itertools import pairwise
from urllib.parse import quote

import pytest

from controller.catalog.checks import Known, circle
from controller.catalog.difference import Difference, differences
from controller.catalog.reading import parse
from tests.api.served import TINY, command
from tests.cli.served import Ctl

NAMES = [
    "org/model:7b",
    "a/scale",
    "模型/🦙:最新",
    "👩\u200d💻",
    "50%",
    "a+b",
    "x?y#z",
    "ns:a/b:c@d",
]


def catalog(*models, **more):
    return {"file": "/etc/c.toml", "models": list(models), **more}


def test_differences_are_fields_and_profiles_by_name():
    was = {
        "min": 1,
        "prices": None,
        "profiles": [{"name": "a", "args": ["x"], "gpus": 1}, {"name": "b"}],
    }
    now = {
        "min": 2,
        "prices": {"prompt": 0},
        "profiles": [{"name": "c"}, {"name": "a", "args": [], "gpus": 1}],
    }
    assert differences(was, was) == ()
    assert differences(was, now) == (
        Difference("min", 1, 2),
        Difference("prices", None, {"prompt": 0}),
        Difference("profiles", ["a", "b"], ["c", "a"]),
        Difference("profiles.a.args", ["x"], []),
    )
    swapped = {**was, "profiles": was["profiles"][::-1]}
    assert differences(was, swapped) == (Difference("profiles", ["a", "b"], ["b", "a"]),)


async def test_a_dry_run_shows_the_difference_and_keeps_nothing(api, pool):
    body = catalog(TINY, pools={"cpu": {"labels": {"role": "cpu"}}})
    await api.good("POST", "/catalog", body)
    before = await pool.fetch("select * from llmgw.events")
    changed = copy.deepcopy(body)
    changed["pools"]["cpu"]["labels"] = {"role": ["cpu", "any"]}
    changed["models"][0] |= {"max_replicas": 3, "prices": {"prompt": 5}, "aliases": []}
    changed["models"][0]["profiles"][0]["args"] = ["-c", 8192]
    for path in ("/catalog?dry_run=1", "/catalog"):
        done = await api.good("POST", path, changed)
        pool_change, model_change = done["changes"]
        assert pool_change["differences"] == [
            {"field": "labels", "was": {"role": ["cpu"]}, "now": {"role": ["any", "cpu"]}}
        ]
        found = {d["field"]: (d.get("was"), d.get("now")) for d in model_change["differences"]}
        assert len(found.pop("profiles.cpu.fingerprint")) == 2
        assert found == {
            "aliases": (["small"], []),
            "max_replicas": (1, 3),
            "prices": (None, {"prompt": 5, "cached": None, "completion": None}),
            "profiles.cpu.args": (["-c", "4096"], ["-c", "8192"]),
        }
        if path.endswith("1"):
            assert await pool.fetch("select * from llmgw.events") == before
            assert await api.good("GET", "/prices") == []
    again = await api.good("POST", "/catalog", changed)
    assert [set(c) for c in again["changes"]] == [{"action", "kind", "name"}] * 2


async def test_the_command_prints_the_difference(url, tmp_path):
    ctl = Ctl(url)
    file = tmp_path / "c.toml"
    text = (
        '[[models]]\nname = "m"\nsource = "file:/m"\nmin_replicas = {least}\n'
        'profiles = [{{name = "p", engine = "llamacpp", args = {args}}}]\n'
    )
    file.write_text(text.format(least=1, args=[]))
    await ctl.good("apply", "-f", str(file))
    file.write_text(text.format(least=2, args=["-np", "4"]))
    said = (await ctl.good("apply", "-f", str(file), "--dry-run")).splitlines()
    assert said[1].split() == ["changed", "model", "m"]
    assert said[2:] == [
        "model m: max_replicas: 1 -> 2",
        "model m: min_replicas: 1 -> 2",
        'model m: profiles.p.args: [] -> ["-np","4"]',
        "0 unchanged. Dry run: nothing was kept.",
    ]
    one = tmp_path / "one.json"
    one.write_text(json.dumps(TINY))
    await ctl.good("model", "add", str(one))
    one.write_text(json.dumps(TINY | {"description": "small"}))
    assert (await ctl.good("model", "add", str(one))).splitlines() == [
        "Model tiny: changed.",
        'tiny: description: - -> "small"',
    ]


async def test_replicas_of_changed_and_removed_models_are_told_of(api, fleet, database):
    await api.good("POST", "/catalog", catalog(TINY, command("other")))
    with database.connect() as db:
        db.execute(
            "update llmgw_core.replica set fingerprint = (select fingerprint"
            " from llmgw_core.profile where model = 'tiny') where profile = 'cpu'"
        )
    cheap = await api.good("POST", "/catalog", catalog(TINY | {"priority": 5}, command("other")))
    assert "notes" not in cheap  # nothing that a running engine would notice
    edited = copy.deepcopy(TINY)
    edited["profiles"][0]["args"] = []
    done = await api.good("POST", "/catalog?dry_run=1", catalog(edited, command("other")))
    told = "model tiny: its replicas 1 run what it was before, until llmgwctl replace"
    assert done["notes"] == [told]
    done = await api.good("POST", "/catalog", catalog(command("other")))
    assert done["notes"] == ["model tiny is removed: its replicas 1, 2 drain and go"]
    # They outlive their model: rows, placement and routes know them until they are gone.
    assert [r["id"] for r in await api.good("GET", "/replicas?model=tiny")] == [1, 2]


async def test_removing_a_model_names_its_replicas(api, fleet, url):
    ctl = Ctl(url)
    await api.good("POST", "/models", TINY)
    said = await ctl.good("model", "remove", "tiny")
    assert said == "Model tiny is removed; its replicas 1, 2 drain and go.\n"
    await api.good("POST", "/models", TINY)
    assert await api.good("DELETE", "/models/tiny") == {"removed": "tiny", "replicas": [1, 2]}


async def test_every_change_is_audited_with_its_actor(api, pool):
    head = {"X-Llmgw-Actor": "ann"}

    async def change(verb, path, body=None):
        answer = await api(verb, path, body, headers=head)
        assert answer.status_code == 200, answer.text

    both = catalog(command("m"), pools={"p": {}})
    await change("POST", "/catalog", both)
    await change("POST", "/catalog", both)
    labelled = catalog(command("m", priority=1), pools={"p": {"labels": {"a": "b"}}})
    await change("POST", "/catalog", labelled)
    await change("POST", "/catalog", catalog())
    await change("POST", "/models", TINY)
    await change("POST", "/models/tiny/scale", {"min": 2})
    await change("DELETE", "/models/tiny")
    rows = await pool.fetch("select actor, action, object from llmgw.events order by id")
    assert {row["actor"] for row in rows} == {"ann"}
    assert [(row["action"], row["object"]) for row in rows] == [
        ("added", "pool p"),
        ("added", "model m"),
        ("changed", "pool p"),
        ("changed", "model m"),
        ("removed", "model m"),
        ("removed", "pool p"),
        ("added", "model tiny"),
        ("scale", "model tiny"),
        ("removed", "model tiny"),
    ]


async def test_models_may_stand_in_for_each_other_and_that_is_told(api):
    done = await api.good(
        "POST", "/catalog", catalog(command("a", fallbacks=["b"]), command("b", fallbacks=["a"]))
    )
    assert done["notes"][0].startswith("fallbacks go in a circle, ")
    assert "a request tries each model once" in done["notes"][0]


def test_a_circle_is_found_through_models_that_others_declared():
    ours = parse({"models": [command("a", fallbacks=["b", "z"])]}, "c")
    chain = Known(models=frozenset("bcz"), fallbacks={"b": ["c"], "c": ["a"], "z": []})
    found = circle(ours, chain)
    assert found[0] == found[-1]
    steps = list(pairwise(found))
    assert set(steps) == {("a", "b"), ("b", "c"), ("c", "a")}
    assert circle(ours, Known(fallbacks={"b": ["c"], "c": ["z"]})) == []
    deep = {f"m{i}": [f"m{i + 1}"] for i in range(20_000)}
    assert circle(ours, Known(fallbacks=deep)) == []


@pytest.mark.parametrize("name", NAMES)
async def test_a_name_is_the_same_everywhere(name, api, url, tmp_path):
    """With slashes, colons, signs of URLs and any script: added, shown, scaled, removed."""
    ctl = Ctl(url)
    file = tmp_path / "m.json"
    file.write_text(json.dumps(command(name, aliases=[f"{name}-alias"])))
    assert await ctl.good("model", "add", str(file)) == f"Model {name}: added.\n"
    assert (await ctl.good("models")).splitlines()[1].startswith(f"{name} ")
    assert (await ctl.good("scale", name, "--min", "0")).startswith(f"Model {name}: min 0")
    part = quote(name, safe="")
    assert (await api.good("POST", f"/models/{part}/scale", {"min": 1}))["model"] == name
    assert f"{name}: no attempt" in await ctl.good("explain-placement", name)
    await ctl.good("keys", "create", "k", "--models", name)
    assert (await ctl.good("model", "remove", name)).startswith(f"Model {name} is removed")
    assert await api.good("GET", "/models") == []
