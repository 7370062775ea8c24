"""Settings typed in psql: one odd number must not stop every agent or every tick."""

from __future__ import annotations

import psycopg
import pytest

from tests.sql.fleet import refusal_of

CHANGE = "update llmgw_core.setting set value = %s where name = %s"
STOPPING = [
    ("syncs_per_second", 0), ("poll_busy", 1e12), ("poll_idle", -5), ("lease_ttl", 0),
    ("decision_days", -1), ("usage_days", 1e9), ("concurrency", 0), ("lost_after", 0),
    ("silent_share_max", 2), ("guard", -1), ("backoff_max", "NaN"), ("stable", "Infinity"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), STOPPING)
def test_nonsense_is_refused_with_the_bounds(fleet, name, value):
    with pytest.raises(psycopg.Error, match=rf"setting {name} may not be .*: it is from .* to "):
        fleet.admin.execute(CHANGE, (value, name))


def test_every_setting_is_within_its_bounds_and_may_be_changed(fleet):
    names = [row["name"] for row in fleet.rows("select name from llmgw_core.setting")]
    assert fleet.admin.execute("update llmgw_core.setting set value = value").rowcount == len(names)
    for name in ("guard", "min_residence", "backoff_base", "scan_every", "drain_deadline"):
        assert fleet.admin.execute(CHANGE, (0, name)).rowcount == 1


def test_a_setting_cannot_go_missing(fleet):
    assert refusal_of(fleet.admin, "delete from llmgw_core.setting where name = 'stable'") == (
        "LG003"
    )
    rename = "update llmgw_core.setting set name = 'lease_tll' where name = 'lease_ttl'"
    assert refusal_of(fleet.admin, rename) == "LG003"
