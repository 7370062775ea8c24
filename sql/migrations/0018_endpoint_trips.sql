-- Breakers of static endpoints, so that a restart does not close those either.
set local role llmgw_owner;

create table llmgw_core.endpoint_trip (
    place text primary key,
    router_id uuid not null,
    until timestamptz not null,
    pause_s double precision not null check (pause_s > 0)
);
comment on table llmgw_core.endpoint_trip is 'The same as trip, of endpoints that no replica is behind: id=HOST:PORT/PATH, as routers were started with.';
