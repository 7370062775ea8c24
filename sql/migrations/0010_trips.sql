-- Breakers that are open, so that a restart does not close them.
set local role llmgw_owner;

create table llmgw_core.trip (
    replica_id bigint primary key references llmgw_core.replica on delete cascade,
    router_id uuid not null,
    until timestamptz not null,
    pause_s double precision not null check (pause_s > 0)
);
comment on table llmgw_core.trip is 'Replicas that a router''s breaker keeps requests from, until when, and after how long a pause; the latest end that any router told. Read by a router that starts, which would send to them at once.';
