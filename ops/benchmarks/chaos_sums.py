"""What must hold after `ops/bench chaos`, asked of the database and compared with the clients."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from tests.end_to_end.chaos import Postgres

    Wanted = Mapping[str, tuple[Any, ...]]

OVER = """
with held as (select kind, object_id, sum(amount) as amount from llmgw_core.allowance group by 1, 2)
select 'money', max(b.spent + coalesce(h.amount, 0) - b.micros) from llmgw.budgets b
    left join held h on h.kind = 'money' and h.object_id = b.id
union all select h.kind, max(h.amount - case h.kind when 'requests' then l.requests_per_min
        when 'tokens' then l.tokens_per_min else l.parallel end)
    from held h join llmgw_core.rate_limit l on l.id = h.object_id where h.kind <> 'money'
    group by h.kind
"""
"""By kind, by how much the fullest bound is passed: never above 0."""
LEASES = """
select kind, object_id, router_id::text, amount, hold from llmgw_core.allowance a
where kind in ('money', 'slots') and expires_at >= clock_timestamp()"""
HELD = f"{LEASES} and hold > 0"
OF_DEAD = f"{LEASES} and renewed_at < %s"
"""Who lives renews each second: what was not since the last kill is of a dead router."""
ROWS = """
select request_id, status, key_id, prompt_tokens, cached_tokens, completion_tokens, cost_micros
from llmgw_core.usage_event"""
SUMS = """
select coalesce(key_id, ''), {count}, coalesce(sum(prompt_tokens), 0),
    coalesce(sum(cached_tokens), 0), coalesce(sum(completion_tokens), 0),
    coalesce(sum(cost_micros), 0)
from llmgw_core.{table} group by 1 order by 1"""
TABLES = {"usage_event": "count(*)", "usage_minute": "sum(requests)", "usage_day": "sum(requests)"}
SPENT = """
select b.id, b.micros,
    coalesce((select sum(spent) from llmgw_core.budget_bucket where budget_id = b.id), 0),
    coalesce((select sum(u.cost_micros) from llmgw_core.usage_event u
        where u.key_id = b.key_id or b.scope_id in (u.org_id, u.team_id, u.user_id)), 0)
from llmgw_core.budget b order by b.id"""
LIMITS = """
select s.name, count(*) <= m.minutes * coalesce(l.requests_per_min, 1000000000)
    and sum(u.prompt_tokens + u.completion_tokens)
        <= m.minutes * coalesce(l.tokens_per_min, 1000000000)
from llmgw_core.rate_limit l join llmgw_core.scope s on s.id = l.scope_id
join llmgw_core.usage_event u on u.team_id = s.id and u.status = 'ok'
cross join (select 1 + (extract(epoch from max(date_trunc('minute', at))
    - min(date_trunc('minute', at - total_ms * interval '1 ms'))) / 60) as minutes
    from llmgw_core.usage_event) m
group by s.name, m.minutes, l.requests_per_min, l.tokens_per_min"""


def missing(database: Postgres, names: set[str]) -> set[str]:
    """Requests without a row."""
    return names - {name for (name, *_) in database.rows(ROWS)}


def rows(
    database: Postgres,
    sent: Wanted,
    whole: set[str],
    cut: set[str],
    served: Counter[str],
) -> Iterator[tuple[str, Any, bool]]:
    """Figures of rows, and whether they are as they must be.

    `sent` has what a whole answer's row is made of; `cut`: requests whose connection broke.
    """
    found = database.rows(ROWS)
    kept = {name: tuple(rest) for name, status, *rest in found if status == "ok"}
    beyond = kept.keys() - whole
    yield "rows", len(found), True
    twice = len(found) - len({row[0] for row in found})
    yield "rows of one request twice", twice, not twice
    yield "rows with status ok", len(kept), True
    lost = [name for name in whole if kept.get(name) != sent[name]]
    yield "whole answers without their row, to token and micro", len(lost), not lost
    # Their rows were on disk, and the router was killed before the last byte went out.
    wrong = [name for name in beyond if name not in cut or kept[name] != sent[name]]
    yield "ok rows beyond: answers cut in their last bytes", len(beyond), not wrong
    for what, column in (("completion tokens", 3), ("micros", 4)):
        of_rows = sum(row[column] for row in kept.values())
        of_clients = sum(sent[name][column] for name in whole)
        of_cut = sum(sent[name][column] for name in beyond)
        figure = f"{of_rows} = {of_clients} + {of_cut}"
        yield f"{what}: ok rows = whole + cut answers", figure, of_rows == of_clients + of_cut
    # A killed router's answers in flight: their clients know that they have none.
    alone = [name for name in served if name not in kept]
    figure = f"{sum(served.values())}; {len(alone)}"
    yield "answers of engines; of them cut by kills, without ok row", figure, not whole & set(alone)
    unserved = [name for name in kept if not served[name]]
    yield "ok rows that no engine answered", len(unserved), not unserved


def sums(database: Postgres) -> Iterator[tuple[str, Any, bool]]:
    """Minutes, days, budgets and limits against the rows."""
    told = {
        table: database.rows(SUMS.format(table=table, count=count))
        for table, count in TABLES.items()
    }
    for table in ("usage_minute", "usage_day"):
        wrong = set(told[table]) ^ set(told["usage_event"])
        yield f"keys whose {table} is not their rows", len({row[0] for row in wrong}), not wrong
    spent = database.rows(SPENT)
    wrong = [row for row in spent if row[2] != row[3]]
    yield "budgets charged other than their rows", f"{len(wrong)} of {len(spent)}", not wrong
    passed = [row for row in spent if row[2] > row[1]]
    yield "budgets passed", len(passed), not passed
    over = [name for name, kept in database.rows(LIMITS) if not kept]
    yield "limits passed over all minutes", len(over), not over


def unspent(database: Postgres, most: int, endless: int) -> list[int]:
    """Budgets that were asked to their end and have more left than a request may cost."""
    return [
        number
        for number, micros, spent, _ in database.rows(SPENT)
        if micros < endless and micros - spent > most
    ]
