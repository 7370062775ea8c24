-- What a model thought is told beside what it said, and a count that is only an estimate says so.
set local role llmgw_owner;

-- No check on the new column: one would read a year of rows under the strongest lock.
alter table llmgw_core.usage_event add column reasoning_tokens bigint, add column estimated boolean not null default false;
comment on table llmgw_core.usage_event is 'One row per client request; tokens are null when nothing is known of them, estimated when the engine did not tell them all. Daily partitions.';
