-- Budgets and limits: what may be spent and asked for, what was, and what the routers hold of it.
set local role llmgw_owner;

create table llmgw_core.budget (
    id bigint generated always as identity primary key,
    scope_id bigint references llmgw_core.scope,
    key_id text references llmgw_core.api_key on delete cascade,
    micros bigint not null check (micros between 1 and 1000000000000000),
    period text not null check (period in ('day', 'week', 'month', '24h', '7d', '30d')),
    zone text,
    warn numeric[] not null check (cardinality(warn) <= 10 and array_position(warn, null) is null and 0 < all (warn) and 1 >= all (warn)),
    created_by text not null,
    created_at timestamptz not null default clock_timestamp(),
    deleted_at timestamptz,
    short_until timestamptz,
    changed xid8 not null default pg_current_xact_id(),
    check (num_nonnulls(scope_id, key_id) = 1),
    check ((zone is not null) = (period in ('day', 'week', 'month')))
) with (fillfactor = 70);
create unique index budget_of_scope on llmgw_core.budget (scope_id, period) where scope_id is not null and deleted_at is null;
create unique index budget_of_key on llmgw_core.budget (key_id, period) where key_id is not null and deleted_at is null;
create index budget_changed on llmgw_core.budget (changed, id);
comment on table llmgw_core.budget is 'What a scope or a key, with all below it, may spend in a period, in micros: calendar periods begin at midnight in zone, rolling ones have none. warn: fractions at which an event is written. Until short_until somebody lacked what others held unused, so nobody holds any ahead. changed is the transaction that last changed what routers must know.';

create table llmgw_core.budget_bucket (
    budget_id bigint not null references llmgw_core.budget on delete cascade,
    starts_at timestamptz not null,
    spent numeric not null check (spent >= 0),
    primary key (budget_id, starts_at)
) with (fillfactor = 50);
comment on table llmgw_core.budget_bucket is 'What was spent of a budget, exactly, by the time of the requests'' ends: one row for each calendar period, or for each slice of a rolling one (24h: 10 minutes, 7d: 1 hour, 30d: 6 hours).';

create table llmgw_core.budget_event (
    id bigint generated always as identity primary key,
    at timestamptz not null default clock_timestamp(),
    budget_id bigint not null references llmgw_core.budget on delete cascade,
    threshold numeric not null,
    spent numeric not null,
    micros bigint not null
);
create index budget_event_of on llmgw_core.budget_event (budget_id, at);
comment on table llmgw_core.budget_event is 'A budget passed one of its thresholds (a fraction of micros): once for each threshold and period.';

create table llmgw_core.rate_limit (
    id bigint generated always as identity primary key,
    scope_id bigint references llmgw_core.scope,
    key_id text references llmgw_core.api_key on delete cascade,
    model text check (length(model) between 1 and 200),
    requests_per_min bigint check (requests_per_min between 1 and 1000000000),
    tokens_per_min bigint check (tokens_per_min between 1 and 1000000000000),
    parallel bigint check (parallel between 1 and 1000000),
    created_by text not null,
    created_at timestamptz not null default clock_timestamp(),
    deleted_at timestamptz,
    short_until timestamptz,
    changed xid8 not null default pg_current_xact_id(),
    check (num_nonnulls(scope_id, key_id) = 1),
    check (num_nonnulls(requests_per_min, tokens_per_min, parallel) > 0)
) with (fillfactor = 70);
create unique index rate_limit_of_scope on llmgw_core.rate_limit (scope_id, coalesce(model, '')) where scope_id is not null and deleted_at is null;
create unique index rate_limit_of_key on llmgw_core.rate_limit (key_id, coalesce(model, '')) where key_id is not null and deleted_at is null;
create index rate_limit_changed on llmgw_core.rate_limit (changed, id);
comment on table llmgw_core.rate_limit is 'What a scope or a key, with all below it, may ask for on all routers together: of one model, or (null) of all. Null is without bound. Minutes are those of the clock. short_until and changed as in budget.';

create table llmgw_core.allowance (
    kind text not null check (kind in ('money', 'requests', 'slots', 'tokens')),
    object_id bigint not null,
    router_id uuid not null,
    amount numeric not null check (amount >= 0),
    hold numeric not null check (hold >= 0),
    minute bigint not null,
    call bigint not null,
    renewed_at timestamptz not null,
    expires_at timestamptz not null,
    primary key (kind, object_id, router_id)
) with (fillfactor = 50);
create index allowance_router on llmgw_core.allowance (router_id);
comment on table llmgw_core.allowance is 'What a router may use of a budget (money, in micros) or of a limit (the other kinds) without asking: amounts of all routers and what was spent never pass the whole. hold is the part in use when it last told; minute is the clock''s, of requests and tokens, else 0; call is the number of the router''s call that wrote the row, so that none that was held up undoes a later one.';

insert into llmgw_core.setting (name, value, unit, why) values
    ('budget_lease', 60, 's', 'what a silent router holds of a budget is free again after this long: time enough to come back and settle what it used'),
    ('slot_lease', 10, 's', 'the parallel requests of a silent router are free again after this long');
