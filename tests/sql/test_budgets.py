"""Budgets: their words, their midnights, what is charged to them and what is told of it."""

from __future__ import annotations

import psycopg
import pytest

from tests.sql.spending import budget, key, scope, spend, spent, used

ZONES = [
    "Asia/Tokyo",
    "America/St_Johns",
    "America/Havana",
    "Africa/Cairo",
    "Australia/Lord_Howe",
    "Asia/Kathmandu",
]
"""Without DST; half an hour off; over midnight, back too; by half an hour; three quarters off."""
TILES = """
with moment as (
    select z as zone, p as period, m as at
    from unnest(%s::text[]) z, unnest(array['day', 'week', 'month']) p,
        generate_series(timestamptz '2026-01-01 00:10+00', '2027-01-05 00:00+00', %s::interval) m),
tile as (
    select *, llmgw_core.bucket_start(period, zone, at) as starts,
        llmgw_core.period_ends(period, zone, at) as ends from moment)
select distinct zone, period, starts, ends, min(at) as first, max(at) as last,
    (starts at time zone zone)::time as clock, extract(epoch from ends - starts) / 3600 as hours
from tile group by zone, period, starts, ends order by zone, period, starts"""


def test_b13_every_moment_is_in_one_period_from_midnight_to_midnight(fleet):
    tiles = fleet.rows(TILES, ZONES, "3 h 1 min")
    assert len(tiles) > len(ZONES) * (365 + 52 + 12)
    before = None
    for tile in tiles:
        assert tile["starts"] <= tile["first"], tile
        assert tile["last"] < tile["ends"], tile
        follows = before and (before["zone"], before["period"]) == (tile["zone"], tile["period"])
        if follows:  # no moment is in two periods or in none
            assert tile["starts"] == before["ends"], (before, tile)
        midnight = tile["clock"].isoformat()
        # Where clocks go forward at midnight that day begins at one.
        late = midnight == "01:00:00" and tile["zone"] in {"Africa/Cairo", "America/Havana"}
        assert late or midnight == "00:00:00", tile
        before = tile


def test_b13_the_days_of_a_dst_change_are_shorter_and_longer_once(fleet):
    tiles = fleet.rows(TILES, ZONES, "3 h")
    hours = {zone: [] for zone in ZONES}
    for tile in tiles:
        if tile["period"] == "day" and tile["hours"] != 24:
            hours[tile["zone"]].append(float(tile["hours"]))
    assert hours == {
        "Asia/Tokyo": [],
        "America/St_Johns": [23, 25],
        "America/Havana": [23, 25],
        "Africa/Cairo": [23, 25],
        "Australia/Lord_Howe": [24.5, 23.5],
        "Asia/Kathmandu": [],
    }


@pytest.mark.parametrize(
    ("zone", "midnight"),
    [
        ("Asia/Tokyo", "2026-05-01 15:00+00"),
        ("America/St_Johns", "2026-03-08 03:30+00"),  # its day has 23 hours
        ("America/St_Johns", "2026-11-02 03:30+00"),  # the day before had 25
    ],
)
def test_b13_spending_starts_anew_at_local_midnight_exactly(fleet, zone, midnight):
    number = budget(fleet, key(fleet, "tokyo1"), 100, "day", zone=zone)
    at = "timestamptz '" + midnight + "'"
    before, after = (
        fleet.value(f"select ({at} + interval '{step}')::text") for step in ("-1 us", "0")
    )
    spend(fleet, used("tokyo1", 30, before), used("tokyo1", 4, after))
    assert (spent(fleet, number, before), spent(fleet, number, after)) == (34, 4)
    ends = "select llmgw_core.period_ends('day', %s, %s)"
    assert fleet.value(ends, zone, before) == fleet.value("select %s::timestamptz", midnight)


@pytest.mark.parametrize("word", ["daily", "1d", "weekly", "monthly", "Day", "24H", "", "year"])
def test_b14_other_spellings_are_refused_with_the_right_words(fleet, word):
    with pytest.raises(psycopg.Error, match=r"day, week or month .* or 24h, 7d or 30d"):
        budget(fleet, key(fleet, "words1"), 100, word)


def test_b14_each_period_says_when_it_begins_anew(fleet):
    key(fleet, "words2")
    for period in ("day", "week", "month"):
        budget(fleet, "words2", 100, period, zone="Europe/Berlin")
    for period in ("24h", "7d", "30d"):
        budget(fleet, "words2", 100, period)
    now = fleet.value("select clock_timestamp()::text")
    spend(fleet, used("words2", 1, now))
    local = "(select (date_trunc('{0}', clock_timestamp() at time zone 'Europe/Berlin')"
    local += " + interval '1 {0}') at time zone 'Europe/Berlin')"
    for row in fleet.rows("select period, zone, frees_at, fraction from llmgw.budgets"):
        if row["zone"] is None:
            left = fleet.value("select %s - %s::timestamptz", row["frees_at"], now)
            hours = {"24h": 24, "7d": 168, "30d": 720}[row["period"]]
            # When the slice that it is in is out of the window whole.
            assert 0 <= left.total_seconds() / 3600 - hours <= hours / 100 + 0.01, row
        else:
            assert row["frees_at"] == fleet.value("select " + local.format(row["period"]))
        assert float(row["fraction"]) == 0.01


def test_b14_a_zone_is_used_or_refused(fleet):
    key(fleet, "words3")
    with pytest.raises(psycopg.Error, match="a time zone would say nothing"):
        budget(fleet, "words3", 100, "7d", zone="Asia/Tokyo")
    with pytest.raises(psycopg.Error, match="there is no time zone Mars/Olympus"):
        budget(fleet, "words3", 100, "day", zone="Mars/Olympus")
    budget(fleet, "words3", 100, "day")
    assert fleet.value("select zone from llmgw.budgets") == "UTC"


@pytest.mark.parametrize("period", ["24h", "7d", "30d"])
def test_rolling_periods_count_no_less_than_their_length_and_a_slice_more_at_most(fleet, period):
    number = budget(fleet, key(fleet, "roll01"), 100, period)
    at = "2026-06-01 10:17+00"
    spend(fleet, used("roll01", 7, at))
    days, slice_h = {"24h": (1, 1 / 6), "7d": (7, 1), "30d": (30, 6)}[period]
    later = "select (%s::timestamptz + make_interval(hours => %s, secs => %s))::text"
    inside = fleet.value(later, at, 24 * days, -1)
    outside = fleet.value(later, at, 24 * days, slice_h * 3600)
    assert (spent(fleet, number, inside), spent(fleet, number, outside)) == (7, 0)


def test_a_row_is_charged_to_every_budget_above_its_key_and_to_no_other(fleet):
    org, other = scope(fleet, "org", "acme"), scope(fleet, "org", "else")
    team = scope(fleet, "team", "ml", org)
    mine = key(fleet, "mine01", team)
    on = {at: budget(fleet, at, 1000) for at in (org, other, team, mine)}
    on["day"] = budget(fleet, mine, 1000, "24h")
    now = fleet.value("select clock_timestamp()::text")
    spend(
        fleet,
        used(mine, "0.25", now, org_id=org, team_id=team),
        used(mine, "0.5", now, org_id=org, team_id=team),
        used(mine, None, now, org_id=org, team_id=team),  # not priced: unknown, and not nothing
        used("absent", 3, now, org_id=org),
    )
    found = {row["id"]: float(row["spent"]) for row in fleet.rows("select * from llmgw.budgets")}
    assert found == {on[org]: 3.75, on[other]: 0, on[team]: 0.75, on[mine]: 0.75, on["day"]: 0.75}


def test_a_changed_budget_keeps_what_is_spent_also_in_another_zone(fleet):
    key(fleet, "move01")
    number = budget(fleet, "move01", 100, "day", zone="Pacific/Kiritimati")
    spend(fleet, used("move01", 60, fleet.value("select clock_timestamp()::text")))
    for zone in ("Pacific/Pago_Pago", "Asia/Tokyo", "Pacific/Kiritimati"):
        assert budget(fleet, "move01", 50, "day", zone=zone) == number
        assert fleet.value("select spent from llmgw.budgets") == 60
    assert float(fleet.value("select fraction from llmgw.budgets")) == 1.2


def test_a_threshold_is_told_once_in_a_period(fleet):
    number = budget(fleet, key(fleet, "warn01"), 100, "24h", warn=["0.5", "0.8", "1"])
    now = fleet.value("select clock_timestamp()::text")
    for micros in (49, 2, 30, 1, 40):
        spend(fleet, used("warn01", micros, now))
    events = fleet.rows("select budget, threshold, spent from llmgw.budget_events order by id")
    told = [(e["budget"], float(e["threshold"]), int(e["spent"])) for e in events]
    assert told == [(number, 0.5, 51), (number, 0.8, 81), (number, 1.0, 122)]


@pytest.mark.parametrize("warn", [["0"], ["1.5"], ["-1"], ["NaN"], [None], ["0.1"] * 11])
def test_thresholds_are_fractions(fleet, warn):
    with pytest.raises(psycopg.Error, match="up to ten fractions"):
        budget(fleet, key(fleet, "warn02"), 100, warn=warn)


def test_a_budget_sits_on_one_thing_that_is_there(fleet):
    put = "select llmgw.budget_put_v1('test', %s, %s, 5, 'day', null, null)"
    key(fleet, "once01")
    scope(fleet, "org", "acme")
    for on in ((None, None), ("acme", "once01")):
        with pytest.raises(psycopg.Error, match="name one of the two"):
            fleet.controller.execute(put, on)
    for on in (("acme/none", None), ("77", None), (None, "absent")):
        with pytest.raises(psycopg.Error, match=r"there is no (scope|key)"):
            fleet.controller.execute(put, on)
    fleet.controller.execute(put, ("acme", None))
    assert fleet.value("select scope from llmgw.budgets") == "acme"


def test_a_removed_budget_bounds_nothing_and_can_be_set_anew(fleet):
    first = budget(fleet, key(fleet, "gone01"), 100)
    fleet.controller.execute("select llmgw.budget_remove_v1('test', %s)", (first,))
    with pytest.raises(psycopg.Error, match=f"there is no budget {first}"):
        fleet.controller.execute("select llmgw.budget_remove_v1('test', %s)", (first,))
    spend(fleet, used("gone01", 5, fleet.value("select clock_timestamp()::text")))
    second = budget(fleet, "gone01", 100)
    assert second != first
    assert fleet.value("select spent from llmgw.budgets") == 0
    told = "select action, object from llmgw.events where object ~ 'budget' order by id"
    actions = fleet.rows(told)
    assert [(a["action"], a["object"]) for a in actions] == [
        ("set", f"budget {first}"), ("remove", f"budget {first}"), ("set", f"budget {second}"),
    ]  # fmt: skip
