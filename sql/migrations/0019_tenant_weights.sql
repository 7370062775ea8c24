-- Turns of a tenant while others wait too: a word of the scope at the top of its tree.
set local role llmgw_owner;

-- Without a default no row is written again.
alter table llmgw_core.scope add column weight real constraint scope_weight check (weight between 0.01 and 100);
comment on column llmgw_core.scope.weight is 'Turns that requests of all below it get in a queue, for one of a scope of weight 1; counts at the top of a tree only. Null: 1.';
