-- What clients used: one row per request, and sums by minute and day.

create table llmgw_core.usage_event (
    id uuid not null,
    at timestamptz not null,
    key_id text,
    model_asked text,
    model text,
    replica_id bigint,
    endpoint text not null,
    status text not null check (status in ('ok', 'error', 'client_closed', 'partial')),
    http_status int,
    error_code text,
    stream boolean not null,
    prompt_tokens bigint check (prompt_tokens >= 0),
    cached_tokens bigint check (cached_tokens >= 0),
    completion_tokens bigint check (completion_tokens >= 0),
    ttft_ms double precision check (ttft_ms >= 0),
    total_ms double precision check (total_ms >= 0),
    attempts int not null default 0,
    request_id text,
    reasoning_tokens bigint,
    estimated boolean not null default false,
    queue_ms double precision,
    org_id bigint,
    team_id bigint,
    user_id bigint,
    cost_micros numeric,
    unpriced boolean not null default false,
    degraded boolean not null default false,
    tags jsonb,
    upstream_id text,
    tried jsonb,
    primary key (at, id)
) partition by range (at);
create index usage_event_key on llmgw_core.usage_event (key_id, at desc);
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
