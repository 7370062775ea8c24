"""`llmgwctl capacity`: a table of measurements, and what is said without any."""

from __future__ import annotations

import json


async def test_capacity(ctl, database, tmp_path):
    assert (await ctl.good("capacity")).startswith("Nothing was measured yet")
    with database.connect() as db:
        db.execute(
            "insert into llmgw_core.capacity"
            " (model, profile, concurrency, tokens_per_s, ttft_ms, itl_ms, measured_by)"
            " values ('m', 'p', 12, 812.345, '{\"p95\": 91.5}', '[1]', 'me')"
        )
    head, row = (await ctl.good("capacity", "--model", "m")).splitlines()
    assert head.startswith("MODEL")
    words = row.split()
    assert words[:10] == ["m", "p", "-", "-", "12", "-", "812.3", "91.5", "ms", "-"]
    assert words[-1] == "me"
    (found,) = json.loads(await ctl.good("capacity", "--json"))
    assert found["concurrency"] == 12
