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

alter table llmgw_core.replica
    add column replace_asked timestamptz,
    add column replace_actor text,
    add column replace_force boolean not null default false;
comment on table llmgw_core.replica is 'One serving unit. launch counts its starts: each start makes new shards. The model is a name, not a key: a replica outlives its model until it is gone. replace_asked: an operator wants another in its stead, ready first; with replace_force it may stop first where there is no room for both.';

alter table llmgw_core.rejection drop constraint rejection_code_fkey;
comment on table llmgw_core.rejection is 'Why each candidate did not fit, of each attempt whose refusals changed; daily partitions. code is no key: a newer controller may know a reason that this database does not, and must be believed.';

alter table llmgw_core.weight
    add column filer_path text,
    add column shared_bytes bigint check (shared_bytes >= 0);
comment on table llmgw_core.weight is 'Weights on a node''s disk, with what their headers say of the model (facts). shared: on a filer, so that every node that mounts it lists the same bytes; managed: our own download. filer and filer_path are the same on every node; shared_bytes of bytes are counted in another row already.';

alter table llmgw_core.ask
    drop constraint ask_kind_check,
    add constraint ask_kind_check check (kind in ('log', 'scan', 'collect')),
    add column paths jsonb check (jsonb_typeof(paths) = 'array');
comment on table llmgw_core.ask is 'Questions to an agent (log tails, fabric scans, downloads to remove), answered at its next sync; removed after ten minutes.';
