-- Replicas over several nodes, and the rules of profiles that go with them.
set local role llmgw_owner;

alter table llmgw_core.profile
    add column fabric text not null default 'fabric' check (fabric in ('nvlink-domain', 'fabric', 'any')),
    add column driver_min text,
    add column cuda_min text,
    add column exclude_nodes text[] not null default '{}',
    add column spread text not null default 'prefer' check (spread in ('prefer', 'node'));
comment on table llmgw_core.profile is 'One way to run a model; the lowest position is tried first. fingerprint changes when anything that matters to a running engine does. fabric is what the shards of one replica need between them; spread = node never puts two replicas of the model on one node.';

alter table llmgw_core.shard add column master_port int check (master_port between 1 and 65535);
create unique index shard_master_port on llmgw_core.shard (node_id, master_port)
    where master_port is not null and state not in ('stopped', 'failed');
comment on table llmgw_core.shard is 'A replica''s part on one node in one launch. One live holder per (node, port) by index. master_port is where the shards of a gang meet, on the node of rank 0; new at each launch.';
