-- What never changes once it is written, and what follows of itself from a change: whoever types in psql too.

create or replace function llmgw_core.check_replica_fixed() returns trigger
language plpgsql security definer set search_path = llmgw_core, pg_temp as $$
begin
    raise exception 'replica % stays one of % and never goes back to an earlier launch: move it to gone, and the leader makes another', old.id, old.model
        using errcode = 'LG003';
end $$;
comment on function llmgw_core.check_replica_fixed() is 'A replica keeps its model, and its launch only grows (LG003).';

create or replace trigger replica_fixed before update of model, launch on llmgw_core.replica
    for each row when (new.model is distinct from old.model or new.launch < old.launch) execute function llmgw_core.check_replica_fixed();

create or replace function llmgw_core.check_shard_fixed() returns trigger
language plpgsql security definer set search_path = llmgw_core, pg_temp as $$
begin
    raise exception 'shard % keeps its replica, launch, rank, node and ports: its agent would not follow; end it, and the leader places another', old.id
        using errcode = 'LG003';
end $$;
comment on function llmgw_core.check_shard_fixed() is 'A shard stays where it was placed (LG003): agents take another place for another shard.';

create or replace trigger shard_fixed before update of replica_id, launch, rank, node_id, port, master_port on llmgw_core.shard
    for each row when ((new.replica_id, new.launch, new.rank, new.node_id, new.port, new.master_port)
        is distinct from (old.replica_id, old.launch, old.rank, old.node_id, old.port, old.master_port))
    execute function llmgw_core.check_shard_fixed();

create or replace function llmgw_core.check_claim_fixed() returns trigger
language plpgsql security definer set search_path = llmgw_core, pg_temp as $$
begin
    -- A shard that is over, or deleted, gives its cards back: then its engine is not on them any more.
    if exists (select 1 from llmgw_core.shard where id = old.shard_id and node_id = old.node_id and state not in ('stopped', 'failed'))
            and (tg_op = 'DELETE' or (new.shard_id, new.node_id, new.gpu_uuid) is distinct from (old.shard_id, old.node_id, old.gpu_uuid)) then
        raise exception 'shard % runs on gpu % of node %: end the shard, and the card is free', old.shard_id, old.gpu_uuid, old.node_id
            using errcode = 'LG003';
    end if;
    return case tg_op when 'DELETE' then old else new end;
end $$;
comment on function llmgw_core.check_claim_fixed() is 'No card is taken from under a live shard (LG003).';

create or replace trigger claim_fixed before update or delete on llmgw_core.gpu_claim
    for each row execute function llmgw_core.check_claim_fixed();

create or replace function llmgw_core.check_grows() returns trigger
language plpgsql security definer set search_path = llmgw_core, pg_temp as $$
begin
    raise exception '% of % only grows: who has seen a higher one believes no lower', tg_argv[0], to_jsonb(old)->>tg_argv[1] using errcode = 'LG003';
end $$;
comment on function llmgw_core.check_grows() is 'Refuses lower generations and terms (LG003): agents and late leaders are told by them what is old.';

create or replace trigger gen_grows before update of alloc_gen on llmgw_core.node
    for each row when (new.alloc_gen < old.alloc_gen) execute function llmgw_core.check_grows('alloc_gen', 'id');
create or replace trigger term_grows before update of term on llmgw_core.lease
    for each row when (new.term < old.term) execute function llmgw_core.check_grows('term', 'name');
create or replace trigger term_stays before delete on llmgw_core.lease
    for each row execute function llmgw_core.check_grows('term', 'name');

create or replace function llmgw_core.stop_shards() returns trigger
language plpgsql security definer set search_path = llmgw_core, pg_temp as $$
begin
    update llmgw_core.shard set desired = 'stopped'
        where replica_id = new.id and desired = 'running' and state not in ('stopped', 'failed')
          and (launch <> new.launch or new.state in ('pending', 'stopping', 'failed', 'gone'));
    return null;
end $$;
comment on function llmgw_core.stop_shards() is 'Nothing runs for a replica that is over, nor from an earlier launch of one.';

create or replace trigger replica_over after update of state, launch on llmgw_core.replica
    for each row when (new.launch <> old.launch or new.state <> old.state and new.state in ('pending', 'stopping', 'failed', 'gone'))
    execute function llmgw_core.stop_shards();

create or replace function llmgw_core.tell_agent() returns trigger
language plpgsql security definer set search_path = llmgw_core, pg_temp as $$
begin
    update llmgw_core.node set alloc_gen = alloc_gen + 1 where id = old.node_id;
    return null;
end $$;
comment on function llmgw_core.tell_agent() is 'A shard is wanted otherwise, or not at all any more: its node''s assignments have changed.';

create or replace trigger shard_wanted after update of desired, spec, cpus, memory_mib on llmgw_core.shard
    for each row when ((new.desired, new.spec, new.cpus, new.memory_mib) is distinct from (old.desired, old.spec, old.cpus, old.memory_mib))
    execute function llmgw_core.tell_agent();
create or replace trigger shard_deleted after delete on llmgw_core.shard
    for each row when (old.state not in ('stopped', 'failed')) execute function llmgw_core.tell_agent();
