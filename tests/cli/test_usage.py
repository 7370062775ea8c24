"""`llmgwctl usage`: who used what as a table, and single requests as CSV and JSON."""

from __future__ import annotations

import csv
import io
import json

import pytest

from controller.cli import usage
from tests.usage_made import Made


@pytest.fixture
def made(database):
    with database.connect() as db:
        yield Made(db)


async def test_a_table_of_teams_dearest_first(bare, made):
    assert await bare.good("usage") == "Nothing was used.\n"
    made.month()
    heading, *lines = (await bare.good("usage")).splitlines()
    assert heading.split() == list(usage.COLUMNS)
    assert [line.split()[0] for line in lines] == ["acme/ml", "no", "acme/web"]
    assert lines[0].split()[1:7] == ["1", "4", "12", "0", "8", "0.000028"]
    assert " - " in lines[2], "what has no price costs nobody knows what"


async def test_options_reach_the_api(bare, made):
    made.month()
    found = json.loads(await bare.good("usage", "--by", "key", "--top", "1", "--json"))
    assert [row["id"] for row in found] == ["kann00"]
    found = json.loads(
        await bare.good(
            "usage", "--by", "org", "--since", "30d", "--until", "26h", "--within", "acme", "--json"
        )
    )
    assert [row["requests"] for row in found] == [3]
    done = await bare("usage", "--since", "soon")
    assert done.code == 2
    assert "24h" not in done.out
    assert "is not a duration" in done.err
    assert (await bare("usage", "--within", "nobody")).code == 1


async def test_csv_has_every_request_page_by_page(bare, made, monkeypatch):
    made.month()
    monkeypatch.setattr(usage, "PAGE_ROWS", 3)
    text = await bare.good("usage", "rows", "--since", "100d", "--csv", "--oldest")
    rows = list(csv.DictReader(io.StringIO(text)))
    assert len(rows) == 20
    assert [row["at"] for row in rows] == sorted(row["at"] for row in rows)
    assert rows[0]["key"] in ("kann00", "kweb00", "kout00")
    free = next(row for row in rows if row["model"] == "free")
    assert (free["cost_micros"], free["flags"], free["team"], free["user"]) == (
        "", "unpriced", "web", "",
    )  # fmt: skip
    limited = await bare.good("usage", "rows", "--since", "100d", "--csv", "--limit", "7")
    assert len(limited.splitlines()) == 8


async def test_json_is_one_document_of_all_pages(bare, made, monkeypatch):
    assert json.loads(await bare.good("usage", "rows", "--json")) == []
    made.month()
    monkeypatch.setattr(usage, "PAGE_ROWS", 3)
    rows = json.loads(await bare.good("usage", "rows", "--since", "100d", "--json"))
    assert len({row["id"] for row in rows}) == 20
    one = await bare.good("usage", "rows", "--key", "kweb00", "--model", "free", "--json")
    assert len(json.loads(one)) == 2


async def test_a_table_of_requests(bare, made):
    assert await bare.good("usage", "rows") == "No requests.\n"
    made.month()
    heading, *lines = (await bare.good("usage", "rows")).splitlines()
    assert heading.split() == list(usage.ROW_COLUMNS)
    assert len(lines) == 8
    assert any("acme/ml/ann" in line and "0.000007" in line for line in lines)


@pytest.mark.parametrize(
    ("micros", "shown"),
    [
        (0, "0.00"),
        (1_500_000, "1.50"),
        (28, "0.000028"),
        (0.15, "0.00000015"),
        (1e12, "1000000.00"),
    ],
)
def test_money_keeps_its_digits(micros, shown):
    assert usage.money(micros) == shown
