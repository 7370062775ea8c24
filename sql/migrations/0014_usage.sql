-- Usage rows with scopes, cost and what became of each attempt; sums by minute and by day.
set local role llmgw_owner;

-- No checks and no defaults that are computed: a year of rows is not read under the strongest lock.
alter table llmgw_core.usage_event
    add column org_id bigint,
    add column team_id bigint,
    add column user_id bigint,
    add column cost_micros numeric,
    add column unpriced boolean not null default false,
    add column degraded boolean not null default false,
    add column tags jsonb,
    add column upstream_id text,
    add column tried jsonb;
comment on table llmgw_core.usage_event is 'One row per client request; tokens are null when nothing is known of them, estimated when the engine did not tell them all. Scopes are those that the router knew when the request began. cost_micros is exact, by the price in force then; null and unpriced when there is none. degraded: what was known could not all be kept. tried: [replica, model, why, ms] of attempts that failed. queue_ms is how long it waited in the router for its model to start or for a place at a replica, null when it was refused before. Daily partitions.';

create table llmgw_core.usage_minute (
    minute timestamptz not null,
    key_id text,
    model text,
    org_id bigint,
    team_id bigint,
    user_id bigint,
    requests bigint not null,
    errors bigint not null,
    prompt_tokens bigint not null,
    cached_tokens bigint not null,
    completion_tokens bigint not null,
    reasoning_tokens bigint not null,
    cost_micros numeric not null,
    unpriced bigint not null,
    estimated bigint not null,
    degraded bigint not null,
    last_at timestamptz not null,
    unique nulls not distinct (minute, key_id, model, org_id, team_id, user_id)
) partition by range (minute);
comment on table llmgw_core.usage_minute is 'Sums of usage_event by minute, written with the rows: errors are failed or partial requests; unpriced, estimated and degraded are numbers of such rows. Daily partitions.';

create table llmgw_core.usage_day (
    day date not null,
    key_id text,
    model text,
    org_id bigint,
    team_id bigint,
    user_id bigint,
    requests bigint not null,
    errors bigint not null,
    prompt_tokens bigint not null,
    cached_tokens bigint not null,
    completion_tokens bigint not null,
    reasoning_tokens bigint not null,
    cost_micros numeric not null,
    unpriced bigint not null,
    estimated bigint not null,
    degraded bigint not null,
    last_at timestamptz not null,
    unique nulls not distinct (day, key_id, model, org_id, team_id, user_id)
) with (fillfactor = 80);
comment on table llmgw_core.usage_day is 'Sums of usage_event by day (UTC), as usage_minute; kept longer than the rows.';

insert into llmgw_core.setting (name, value, unit, why) values
    ('usage_minute_days', 35, 'd', 'how long sums of usage by minute are kept; older reports count whole days'),
    ('usage_day_days', 1200, 'd', 'how long sums of usage by day are kept');

drop function if exists llmgw_core.usage_write(llmgw_core.usage_event[]);
