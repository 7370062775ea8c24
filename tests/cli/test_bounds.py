"""llmgwctl budgets and limits."""

from __future__ import annotations

import json

from tests.api.served import TINY


async def test_budgets_and_limits_are_set_shown_and_removed(ctl, tmp_path):
    assert (await ctl.good("budgets")).startswith("No budgets. Set one with")
    assert (await ctl.good("limits")).startswith("No limits. Set one with")
    assert (await ctl.good("budgets", "events")).startswith("No budget has passed")
    (tmp_path / "m.json").write_text(json.dumps(TINY))
    await ctl.good("model", "add", str(tmp_path / "m.json"))
    key = json.loads(await ctl.good("keys", "create", "app", "--json"))["id"]
    place = ["--key", key]
    said = await ctl.good(
        "budgets", "set", *place, "--micros", "1000", "--period", "week", "--zone", "Asia/Tokyo"
    )
    assert said == f"Budget 1 of key {key} (app): 1000 micros per week, 0 spent.\n"
    header, row = (await ctl.good("budgets")).splitlines()
    assert header.split() == [
        "BUDGET", "ON", "PERIOD", "ZONE", "MICROS", "SPENT", "RESERVED", "USED", "FREES",
    ]  # fmt: skip
    assert row.split()[:9] == ["1", "key", key, "(app)", "week", "Asia/Tokyo", "1000", "0", "0"]
    said = await ctl.good(
        "limits", "set", *place, "--requests", "60", "--parallel", "4", "--model", "small"
    )
    assert said == f"Limit 1 of key {key} (app): 60 requests/min, 4 parallel of tiny.\n"
    _, row = (await ctl.good("limits", "list", *place)).splitlines()
    assert row.split() == ["1", "key", key, "(app)", "tiny", "0/60", "-", "0/4"]
    for name in ("budgets", "limits"):
        assert (await ctl.good(name, "remove", "1")).endswith("1 is removed.\n")
        assert json.loads(await ctl.good(name, "--json")) == []


async def test_wrong_words_are_told(ctl):
    for wrong in (
        ["budgets", "set", "--scope", "x", "--micros", "5", "--period", "day"],
        ["budgets", "remove", "7"],
        ["limits", "remove", "seven"],
    ):
        done = await ctl(*wrong)
        assert (done.code, done.out) == (1, "")
        assert "there is no" in done.err
