"""What each command prints: the contract's columns, sentences, and the rows of psql."""

from __future__ import annotations

import json
import re

import trio

from tests.api.served import TINY, command, view_rows, without_ages

EMPTY = {
    "nodes": "No nodes have registered.",
    "models": "No models.",
    "replicas": "No replicas.",
    "keys": "No keys.",
    "scopes": "No scopes.",
    "users": "No users.",
    "audit": "Nothing was changed.",
    "decisions": "No decisions.",
    "weights": "No weights",
}


async def test_empty_lists_say_so(bare):
    for name, said in EMPTY.items():
        assert (await bare.good(name)).startswith(said)
        assert json.loads(await bare.good(name, "--json")) == []
    text = await bare.good("status")
    assert "No GPUs." in text
    assert "models: 0 of 0 satisfied" in text
    assert "leader: nobody" in text


async def test_nodes(ctl):
    text = (await ctl.good("nodes")).splitlines()
    assert text[0].split() == [
        "NODE",
        "STATE",
        "GPUS",
        "MEM",
        "CLASSES",
        "FABRICS",
        "REPLICAS",
        "LAST",
        "SEEN",
    ]
    assert text[1].split()[:8] == ["n1", "ready", "2/4", "free", "64", "GiB", "H100", "-"]
    assert text[3].split()[:5] == ["n3", "lost", "0/0", "free", "-"]
    assert text[4] == "n1 gpu 3: Xid 79: fell off the bus (kept out of placement)"
    assert not any(line.endswith(" ") for line in text)
    one = await ctl.good("node", "n1")
    assert "warning: no AVX2" in one
    assert "engines: vllm 0.32.0" in one
    assert "70000 MiB" in one
    assert "512.25 W" in one
    skewed = await ctl.good("node", "n2")
    assert "7.5 s off" in skewed


async def test_status(ctl):
    text = await ctl.good("status")
    assert "[#####---------------]" in text
    assert text.splitlines()[0].split() == ["CLASS", "USED", "FREE", "UNAVAILABLE", "UNHEALTHY"]
    assert "nodes: 1 cordoned, 1 lost, 1 ready" in text
    assert re.search(r"idle longest: tiny/1 (9[0-9]|1[01][0-9])s \(1 GPUs\)", text)


async def test_models_replicas_and_explanation(ctl, tmp_path):
    file = tmp_path / "m.json"
    file.write_text(json.dumps(TINY | {"min_replicas": 2}))
    assert await ctl.good("model", "add", str(file)) == "Model tiny: added.\n"
    text = (await ctl.good("models")).splitlines()
    assert text[0].split() == ["MODEL", "REPLICAS", "ALIASES", "PROFILES", "FALLBACKS"]
    assert text[1].split() == ["tiny", "1/2", "ready", "(2", "total)", "small", "cpu", "-"]
    text = (await ctl.good("replicas", "--model", "tiny")).splitlines()
    assert text[0].split() == [
        "REPLICA",
        "MODEL",
        "STATE",
        "POOL",
        "NODES",
        "AGE",
        "IDLE",
        "ENDPOINT",
    ]
    assert text[1].split()[:5] == ["1", "tiny", "ready", "gpus", "n1:[0]"]
    assert text[1].split()[-1] == "http://10.0.0.1:20000"
    *words, age, idle, endpoint = text[2].split()
    assert (words, idle, endpoint) == (["2", "tiny", "pending", "-", "-"], "-", "-")
    assert re.fullmatch(r"[0-9]+s", age)
    assert "edited since it was placed" in text[3]
    text = (await ctl.good("explain-placement", "tiny")).splitlines()
    assert "could not be placed; every candidate and why:" in text[0]
    assert text[1].split() == ["PROFILE", "POOL", "NODE", "REASON"]
    assert text[2].split() == ["cpu", "-", "n2", "the", "node", "is", "cordoned"]
    file.write_text(json.dumps(command("other")))
    await ctl.good("model", "add", str(file))
    assert await ctl.good("explain-placement", "other") == "other: no attempt to place it yet\n"
    assert await ctl.good("replicas", "--model", "other") == "Model other has no replicas.\n"
    none = "No decisions about model other"
    assert await ctl.good("decisions", "--model", "other") == f"{none}.\n"
    said = await ctl.good("decisions", "--model", "other", "--node", "n1", "--since", "1h")
    assert said == f"{none} and node n1 in that time.\n"
    assert await ctl.good("--json", "replicas", "--model", "other") == "[]\n"
    for word in ("replicas", "decisions"):
        done = await ctl(word, "--model", "otter")
        assert (done.code, done.out) == (1, "")
        assert "there is no model otter in the catalog: did you mean 'other'?" in done.err
    assert (await ctl.good("scale", "other", "--min", "0", "--idle-timeout", "15m")) == (
        "Model other: min 0, max 1, idle timeout 15m, on demand.\n"
    )
    assert (
        await ctl.good("model", "remove", "other")
        == "Model other is removed; it had no replicas.\n"
    )
    assert (await ctl.good("decisions", "--since", "1h")).splitlines()[1].split()[1:3] == [
        "attempt",
        "tiny",
    ]
    assert "120.6 KiB" in await ctl.good("weights")


async def test_psql_shows_the_same_rows_as_json(ctl, database, tmp_path):
    (tmp_path / "m.json").write_text(json.dumps(TINY))
    await ctl.good("model", "add", str(tmp_path / "m.json"))
    await ctl.good("keys", "create", "me", "--models", "tiny, small", "--expires", "30d")
    orders = {"nodes": "id", "models": "name", "replicas": "id", "keys": "created_at, id"}
    with database.connect(database.read_url) as db:
        for name, order in orders.items():
            shown = json.loads(await ctl.good(name, "--json"))
            assert without_ages(shown) == without_ages(view_rows(db, name, order)), name
            assert shown, name


async def test_controllers(bare, database):
    assert await bare.good("controllers") == "No controllers.\n"
    with database.connect() as db:
        (number,) = db.execute(
            "select llmgw_core.controller_join_v1(gen_random_uuid(), 'control', 'gw-1', 7, '1.0')"
        ).fetchone()
        db.execute("select pg_advisory_lock(7719, %s)", (number,))
        db.execute(
            "select llmgw_core.catalog_told_v1(c.id, '/c.toml', null, 'no such field')"
            " from llmgw_core.controller c"
        )
        head, row, problem = (await bare.good("controllers")).splitlines()
        assert head.split()[:4] == ["CONTROLLER", "ROLE", "STATE", "LEADS"]
        assert row.split()[:3] == ["gw-1/7", "control", "alive"]
        assert row.split()[-1] == "refused"
        assert problem == "gw-1/7: no such field"
        done = await bare("doctor")
        assert done.code == 1
        assert "controller gw-1/7 catalog: Correct the file" in done.out
        assert done.out.endswith("0 nodes, 1 controller: 0 passed, 0 warn, 1 failed\n")
    with trio.fail_after(40):  # the server ends the closed connection by itself
        while (shown := json.loads(await bare.good("controllers", "--json")))[0]["alive"]:
            await trio.sleep(0.02)
    assert [c["catalog_problem"] for c in shown] == ["no such field"]
    assert "No checks have been reported." in await bare.good("doctor")


async def test_long_lists_come_whole(bare, database):
    with database.connect() as db:
        db.execute(
            "insert into llmgw_core.node (id)"
            " select 'n' || lpad(i::text, 5, '0') from generate_series(1, 2300) i"
        )
    rows = json.loads(await bare.good("nodes", "--json"))
    assert [row["id"] for row in rows] == [f"n{i:05}" for i in range(1, 2301)]


async def test_apply(bare, tmp_path):
    file = tmp_path / "catalog.toml"
    file.write_text(
        '[pools.cpu]\nlabels = {role = "cpu"}\n[[models]]\nname = "m"\nsource = "file:/m"\n'
        '[[models.profiles]]\nname = "p"\nengine = "llamacpp"\npool = "cpu"\n'
    )
    text = await bare.good("apply", "-f", str(file), "--dry-run")
    assert text.splitlines()[1].split() == ["added", "pool", "cpu"]
    assert "Dry run: nothing was kept." in text
    assert await bare.good("models", "--json") == "[]\n"
    await bare.good("apply", "-f", str(file))
    assert await bare.good("apply", "-f", str(file)) == "2 unchanged.\n"
    shown = json.loads(await bare.good("models", "--json"))
    assert (shown[0]["origin"], shown[0]["origin_file"]) == ("file", str(file))
    refused = await bare("scale", "m", "--min", "2")
    assert refused.code == 1
    assert f"declared by the catalog file {file}" in refused.err
    file.write_text("[models]\n")
    assert (
        (await bare("apply", "-f", str(file), "--json"))
        .document["error"]
        .startswith("models: must be a valid list")
    )
    file.write_text("modles = []\n")
    assert "did you mean 'models'?" in (await bare("apply", "-f", str(file))).err
    whole = await bare("model", "add", str(file))
    assert "unknown field 'modles'" in whole.err
    assert (await bare("apply", "-f", str(tmp_path / "none"))).code == 1
    assert (await bare("apply", "-f", "-")).code == 2


async def test_node_words(ctl):
    assert "Node n1 is cordoned" in await ctl.good("cordon", "n1", "--reason", "new fan")
    assert "why: new fan" in await ctl.good("node", "n1")
    assert "may be used again" in await ctl.good("uncordon", "n1")
    done = await ctl("drain", "n1")
    assert done.code == 0
    assert "one at a time" in done.err
    assert (await ctl("drain", "n1", "--json")).document == {"id": "n1", "state": "draining"}
    assert (await ctl("drain", "n3", "--wait", "--json")).document == {
        "id": "n3",
        "state": "draining",
        "replicas": 0,
    }
    made = await ctl("node", "enroll", "n9", "--ttl", "10m", "--json")
    assert made.document["token"].startswith("enroll-")
    assert made.document["node"] == "n9"
    plain = await ctl("node", "enroll")
    assert plain.out.startswith("enroll-")
    assert "any new node" in plain.err
    assert "locked out" in await ctl.good("node", "revoke", "n1")


async def test_keys(ctl):
    made = await ctl("keys", "create", "team")
    assert made.out.startswith("sk-")
    assert made.out.count("\n") == 1
    number = made.out.split("-")[1]
    text = await ctl.good("keys")
    assert text.splitlines()[0].split() == [
        "KEY",
        "NAME",
        "SCOPE",
        "MODELS",
        "FALLBACK",
        "STATE",
        "CREATED",
        "EXPIRES",
        "USED",
        "BY",
    ]
    assert number in text
    assert made.out.strip() not in text
    assert await ctl.good("keys", "revoke", number) == f"Key {number} is revoked.\n"
    assert json.loads(await ctl.good("keys", "list", "--json"))[0]["state"] == "revoked"


async def test_engines_words_do_not_steer_the_terminal(ctl, database):
    with database.connect() as db:
        db.execute("update llmgw_core.replica set error = E'boom \\x1b[31m[bold]x[/bold]\\u0007'")
    text = await ctl.good("replicas")
    assert "boom �[31m[bold]x[/bold]�" in text
