create or replace view llmgw.budgets as
select b.id, b.key_id as key, case when b.key_id is null then s.kind else 'key' end as level, s.id as scope_id, s.path as scope,
    k.name as key_name, b.micros, b.period, b.zone, b.warn, w.spent, r.reserved, round(w.spent / b.micros, 6) as fraction,
    llmgw_core.budget_frees_at(b.id, b.period, b.zone, clock_timestamp()) as frees_at, b.created_by, b.created_at
from llmgw_core.budget b
left join llmgw_core.api_key k on k.id = b.key_id
left join llmgw_core.scope_line s on s.id = coalesce(b.scope_id, k.scope_id)
cross join lateral (select llmgw_core.budget_spent(b.id, b.period, b.zone, clock_timestamp()) as spent) w
cross join lateral (select coalesce(sum(a.amount), 0) as reserved from llmgw_core.allowance a
    where a.kind = 'money' and a.object_id = b.id and a.expires_at >= clock_timestamp()) r
where b.deleted_at is null and k.revoked_at is null and s.deleted_at is null
order by b.id;
comment on view llmgw.budgets is 'What scopes and keys may spend in a period, in micros; level says on what a budget sits, scope is its path or that of its key. spent in the present one, reserved by routers for requests that run or are expected; together never more than micros, unless a request came out dearer than its bound or micros was lowered. frees_at: when a calendar period begins anew, or the oldest slice of a rolling one leaves it (null: nothing spent).';

create or replace view llmgw.limits as
select l.id, l.key_id as key, case when l.key_id is null then s.kind else 'key' end as level, s.id as scope_id, s.path as scope,
    k.name as key_name, l.model, l.requests_per_min, l.tokens_per_min, l.parallel,
    case when l.requests_per_min is not null then a.requests end as requests, case when l.tokens_per_min is not null then a.tokens end as tokens,
    case when l.parallel is not null then a.slots end as in_parallel, l.created_by, l.created_at
from llmgw_core.rate_limit l
left join llmgw_core.api_key k on k.id = l.key_id
left join llmgw_core.scope_line s on s.id = coalesce(l.scope_id, k.scope_id)
cross join lateral (select coalesce(sum(x.amount) filter (where x.kind = 'requests'), 0) as requests,
        coalesce(sum(x.amount) filter (where x.kind = 'tokens'), 0) as tokens, coalesce(sum(x.hold) filter (where x.kind = 'slots'), 0) as slots
    from llmgw_core.allowance x where x.kind <> 'money' and x.object_id = l.id and x.expires_at >= clock_timestamp()) a
where l.deleted_at is null and k.revoked_at is null and s.deleted_at is null
order by l.id;
comment on view llmgw.limits is 'What scopes and keys may ask for on all routers together, of one model or (null) of all; level and scope as in budgets. requests and tokens: given out to routers in this minute; in_parallel: running as routers last told.';

create or replace view llmgw.budget_events as
select e.id, e.at, e.budget_id as budget, b.key_id as key, b.scope_id, b.period, e.threshold, round(e.spent) as spent, e.micros
from llmgw_core.budget_event e join llmgw_core.budget b on b.id = e.budget_id;
comment on view llmgw.budget_events is 'Budgets that passed a threshold (a fraction of micros): once for each threshold and period.';
