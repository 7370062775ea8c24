-- What the leader leaves alone, and why, where doctor and psql can see it.
set local role llmgw_owner;

alter table llmgw_core.lease add column notes text[] not null default '{}';
comment on column llmgw_core.lease.notes is 'What the holder of this term leaves alone, and why: rows that make no sense, silence that may be ours.';
