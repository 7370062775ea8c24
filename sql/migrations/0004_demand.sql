-- What clients ask for and what replicas can do: scaling by demand.
set local role llmgw_owner;

insert into llmgw_core.setting (name, value, unit, why) values
    ('demand_stale', 10, 's', 'what a router said of its demand longer ago does not count'),
    ('concurrency', 8, 'requests', 'what one replica is taken to serve at once where nobody measured it'),
    ('min_residence', 60, 's', 'a replica that was woken or added stays at least this long'),
    ('idle_timeout', 900, 's', 'an on-demand model that nobody used this long stops, where it says nothing else itself');

alter table llmgw_core.model
    add column priority int not null default 0 check (priority between -1000 and 1000);
comment on table llmgw_core.model is 'A model of the catalog; min_replicas 0 means on demand. Of models that compete for cards the higher priority goes first.';

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

alter table llmgw_core.replica add column room_for text;
comment on table llmgw_core.replica is 'One serving unit. launch counts its starts: each start makes new shards. The model is a name, not a key: a replica outlives its model until it is gone. replace_asked: an operator wants another in its stead, ready first; with replace_force it may stop first where there is no room for both. room_for is the model for which it was asked to leave.';
