-- An agent that ends and stops its engines says so: nobody need wait until its silence is long enough.
set local role llmgw_owner;

alter table llmgw_core.beat add column left_at timestamptz;
comment on table llmgw_core.beat is 'Last sync of each agent by the database''s clock; left_at when it said that it ends and stops its engines, null while it runs. Narrow and without an index on the time, so that updates stay HOT.';
