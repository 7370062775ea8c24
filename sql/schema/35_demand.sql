-- What clients ask for and what replicas can do: scaling by demand.

create table llmgw_core.demand (
    router_id uuid not null,
    model text not null,
    waiting int not null check (waiting >= 0),
    in_flight int not null check (in_flight >= 0),
    wanted_at timestamptz,
    peak int not null check (peak >= 0),
    peak_before int not null default 0 check (peak_before >= 0),
    peak_since timestamptz not null,
    reported_at timestamptz not null,
    primary key (router_id, model)
) with (fillfactor = 50);
comment on table llmgw_core.demand is 'What each router has waiting and running for each model, told every second or so. wanted_at is the last time that a request found no replica, null once such requests go on. peak is the most of both at once since peak_since, peak_before the most in the minute before that.';

create table llmgw_core.capacity (
    model text not null,
    profile text not null,
    node_class text not null default '',
    engine text,
    concurrency double precision not null check (concurrency > 0),
    requests_per_s double precision check (requests_per_s >= 0),
    tokens_per_s double precision check (tokens_per_s >= 0),
    ttft_ms jsonb,
    itl_ms jsonb,
    slo jsonb,
    measured_at timestamptz not null default clock_timestamp(),
    measured_by text not null,
    replica bigint,
    primary key (model, profile, node_class)
);
comment on table llmgw_core.capacity is 'Measurements: how many requests at once a profile serves within its objectives. A name, not a key: a measurement outlives its model.';

create table llmgw_core.trip (
    replica_id bigint primary key references llmgw_core.replica on delete cascade,
    router_id uuid not null,
    until timestamptz not null,
    pause_s double precision not null check (pause_s > 0)
);
comment on table llmgw_core.trip is 'Replicas that a router''s breaker keeps requests from, until when, and after how long a pause; the latest end that any router told. Read by a router that starts, which would send to them at once.';

create table llmgw_core.endpoint_trip (
    place text primary key,
    router_id uuid not null,
    until timestamptz not null,
    pause_s double precision not null check (pause_s > 0)
);
comment on table llmgw_core.endpoint_trip is 'The same as trip, of endpoints that no replica is behind: id=HOST:PORT/PATH, as routers were started with.';
