-- How many requests at once a replica gets where nobody measured it; how long each request waited.
set local role llmgw_owner;

insert into llmgw_core.setting (name, value, unit, why) values
    ('depth', 1024, 'requests', 'what one replica is sent at once where nobody measured it; more wait in the routers. No less than engines batch by themselves: vLLM up to 1024');

-- No check on the new column: one would read a year of rows under the strongest lock.
alter table llmgw_core.usage_event add column queue_ms double precision;
comment on table llmgw_core.usage_event is 'One row per client request; tokens are null when nothing is known of them, estimated when the engine did not tell them all. queue_ms is how long it waited in the router for its model to start or for a place at a replica, null when it was refused before. Daily partitions.';
