"""llmgwctl scopes, keys, users and audit: what people type and read."""

from __future__ import annotations

import json

PASSWORD = "correct horse battery"


async def test_a_tree_is_made_moved_and_deleted(bare):
    await bare.good("scopes", "create", "org", "acme", "--tag", "cost=7")
    said = await bare.good("scopes", "create", "team", "acme/ml")
    assert said == "team acme/ml is made: scope 2.\n"
    key = json.loads(await bare.good("keys", "create", "k", "--scope", "acme/ml", "--json"))
    assert key["scope"] == "acme/ml"
    lines = (await bare.good("scopes")).splitlines()
    assert lines[0].split() == [
        "SCOPE",
        "KIND",
        "ID",
        "KEYS",
        "TAGS",
        "FALLBACK",
        "WEIGHT",
        "CREATED",
        "BY",
    ]
    assert [line.split()[:5] for line in lines[1:]] == [
        ["acme", "org", "1", "0", "cost=7"],
        ["acme/ml", "team", "2", "1", "-"],
    ]
    assert await bare.good("scopes", "rename", "acme/ml", "nn") == "Scope acme/ml is acme/nn now.\n"
    assert await bare.good("scopes", "move", "2", "--top") == "Scope 2 is nn now.\n"
    assert "nn" in (await bare.good("keys", "list", "--scope", "nn")).splitlines()[1].split()
    said = await bare.good("scopes", "delete", "nn")
    assert said == "Scope nn is deleted: 1 in all, 1 keys revoked.\n"
    assert "nn" not in await bare.good("scopes")
    assert "team (deleted)" in await bare.good("scopes", "list", "--deleted")
    changes = (await bare.good("audit", "--object", "scope")).splitlines()
    assert [line.split()[3] for line in changes[1:]] == ["delete", "move", "rename", "create",
                                                          "create"]  # fmt: skip
    assert changes[1].endswith("127.0.0.1")


async def test_a_key_is_rotated_and_moved(bare):
    await bare.good("scopes", "create", "org", "acme")
    made = (await bare.good("keys", "create", "k")).strip()
    number = made.split("-")[1]
    rotated = await bare("keys", "rotate", number, "--grace", "10m")
    assert rotated.out.startswith(f"sk-{number}-")
    assert rotated.out.strip() != made
    assert "good until" in rotated.err
    assert await bare.good("keys", "move", number, "--to", "acme") == (
        f"Key {number} is in acme now.\n"
    )
    [row] = json.loads(await bare.good("keys", "--json"))
    assert (row["scope"], "old_until" in row) == ("acme", True)
    await bare.good("keys", "move", number, "--out")
    assert "scope" not in json.loads(await bare.good("keys", "--json"))[0]


async def test_C10_scopes_and_keys_say_when_to_fall_back(bare):
    await bare.good("scopes", "create", "org", "acme", "--fallback", "error,timeout")
    made = (await bare.good("keys", "create", "k", "--scope", "acme", "--fallback", "none")).strip()
    number = made.split("-")[1]
    assert (await bare.good("keys")).splitlines()[1].split()[4] == "none"
    assert (await bare.good("scopes")).splitlines()[1].split()[5] == "error,timeout"
    await bare.good("keys", "change", number, "--fallback", "inherit")
    assert (await bare.good("keys")).splitlines()[1].split()[4] == "-"
    said = await bare.good("scopes", "change", "acme", "--fallback", "refusal, error")
    assert said == "Scope acme is changed.\n"
    [row] = json.loads(await bare.good("scopes", "--json"))
    assert row["fallback"] == ["error", "refusal"]
    wrong = await bare("keys", "change", number, "--fallback", "always")
    assert (wrong.code, "'unavailable', 'timeout'" in wrong.err) == (1, True)


async def test_an_org_has_a_weight_and_what_is_below_has_not(bare):
    await bare.good("scopes", "create", "org", "acme")
    await bare.good("scopes", "create", "team", "acme/ml")
    assert await bare.good("scopes", "change", "acme", "--weight", "2.5") == (
        "Scope acme is changed.\n"
    )
    lines = (await bare.good("scopes")).splitlines()
    assert [line.split()[6] for line in lines[1:]] == ["2.5", "-"]
    wrong = await bare("scopes", "change", "acme/ml", "--weight", "2")
    assert (wrong.code, "only the scope at the top has a weight" in wrong.err) == (1, True)
    wrong = await bare("scopes", "change", "acme", "--weight", "0")
    assert (wrong.code, "weight" in wrong.err) == (1, True)


async def test_passwords_come_from_stdin_and_are_shown_nowhere(bare):
    made = await bare.process("users", "create", "ada", "--admin", input=f"{PASSWORD}\n".encode())
    assert (made.code, made.out) == (0, "User ada can log in.\n")
    token = await bare.process("users", "login", "ada", input=f"{PASSWORD}\n".encode())
    assert token.out.startswith("ls-")
    wrong = await bare.process("users", "login", "ada", input=b"wrong\n")
    assert (wrong.code, wrong.out) == (1, "")
    assert "the name or the password is wrong" in wrong.err
    nothing = await bare.process("users", "password", "ada", input=b"")
    assert nothing.code == 2
    row = (await bare.good("users")).splitlines()[1].split()
    assert row[:4] == ["ada", "yes", "-", "1"]
    for done in (made, token, wrong):
        assert PASSWORD not in done.out + done.err
    assert PASSWORD not in await bare.good("audit", "--json")
    assert await bare.good("users", "remove", "ada") == "User ada is removed.\n"
