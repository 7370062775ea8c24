-- Triggers that keep states legal and claims true, whoever writes.

create or replace function llmgw_core.check_transition() returns trigger
language plpgsql security definer set search_path = llmgw_core, pg_temp as $$
begin
    if new.state = old.state then
        return new;
    end if;
    perform 1 from llmgw_core.transition t
        where t.kind = tg_argv[0] and t.from_state = old.state and t.to_state = new.state;
    if not found then
        raise exception '% % may not go from % to %', tg_argv[0], old.id, old.state, new.state
            using errcode = 'LG002', hint = 'select * from llmgw_core.transition';
    end if;
    new.state_at := clock_timestamp();
    return new;
end $$;
comment on function llmgw_core.check_transition() is 'Refuses moves that are not in llmgw_core.transition (LG002).';

create or replace trigger replica_transition before update of state on llmgw_core.replica
    for each row execute function llmgw_core.check_transition('replica');
create or replace trigger shard_transition before update of state on llmgw_core.shard
    for each row execute function llmgw_core.check_transition('shard');

create or replace function llmgw_core.release_claims() returns trigger
language plpgsql security definer set search_path = llmgw_core, pg_temp as $$
begin
    delete from llmgw_core.gpu_claim where shard_id = new.id;
    return null;
end $$;
comment on function llmgw_core.release_claims() is 'A shard that is over holds no card.';

create or replace trigger shard_over after update of state on llmgw_core.shard
    for each row when (new.state in ('stopped', 'failed') and old.state <> new.state)
    execute function llmgw_core.release_claims();

create or replace function llmgw_core.pool_claimed(p_node text) returns bigint
language sql stable security definer set search_path = llmgw_core, pg_temp as $$
    select coalesce(sum(coalesce(c.memory_mib, g.memory_mib, 0)), 0)::bigint from llmgw_core.gpu_claim c
    join llmgw_core.gpu g on g.node_id = c.node_id and g.uuid = c.gpu_uuid
    where c.node_id = p_node and g.memory_kind = 'unified'
$$;
comment on function llmgw_core.pool_claimed(text) is 'Host memory in MiB of a node that is claimed through cards with unified memory (E02).';

create or replace function llmgw_core.check_shard_fits() returns trigger
language plpgsql security definer set search_path = llmgw_core, pg_temp as $$
declare
    n llmgw_core.node;
    used_mib bigint;
    used_cpus double precision;
begin
    select * into n from llmgw_core.node where id = new.node_id for no key update;
    select coalesce(sum(memory_mib), 0), coalesce(sum(cpus), 0) into used_mib, used_cpus
        from llmgw_core.shard where node_id = new.node_id and state not in ('stopped', 'failed');
    used_mib := used_mib + llmgw_core.pool_claimed(new.node_id);
    -- Coalesced: against an unknown size nothing fits.
    if new.memory_mib is not null and not coalesce(used_mib + new.memory_mib <= n.memory_effective_mib, false) then
        raise exception 'node % has not enough memory: need % MiB, have % of % MiB unclaimed', new.node_id, new.memory_mib,
            coalesce((n.memory_effective_mib - used_mib)::text, 'unknown'), coalesce(n.memory_effective_mib::text, 'unknown') using errcode = 'LG003';
    end if;
    if new.cpus is not null and not coalesce(used_cpus + new.cpus <= n.cpus_effective + 1e-6, false) then
        raise exception 'node % has not enough cores: need %, have % of % unclaimed', new.node_id, new.cpus,
            coalesce((n.cpus_effective - used_cpus)::text, 'unknown'), coalesce(n.cpus_effective::text, 'unknown') using errcode = 'LG003';
    end if;
    return new;
end $$;
comment on function llmgw_core.check_shard_fits() is 'Memory and cores claimed by live shards stay within the node. Locks the node, so two inserts cannot both pass.';

create or replace trigger shard_fits before insert on llmgw_core.shard
    for each row execute function llmgw_core.check_shard_fits();

create or replace function llmgw_core.check_claim_fits() returns trigger
language plpgsql security definer set search_path = llmgw_core, pg_temp as $$
declare
    card llmgw_core.gpu;
    shared_mib bigint;
    whole boolean;
begin
    select * into card from llmgw_core.gpu where node_id = new.node_id and uuid = new.gpu_uuid for no key update;
    perform 1 from llmgw_core.shard where id = new.shard_id and node_id = new.node_id and state not in ('stopped', 'failed');
    if not found then
        raise exception 'shard % is over or not on node %: it cannot hold gpu %', new.shard_id, new.node_id, new.gpu_uuid using errcode = 'LG003';
    end if;
    select coalesce(sum(memory_mib), 0), coalesce(bool_or(memory_mib is null), false) into shared_mib, whole
        from llmgw_core.gpu_claim
        where node_id = new.node_id and gpu_uuid = new.gpu_uuid and shard_id <> new.shard_id;
    if whole or (new.memory_mib is null and shared_mib > 0) then
        raise exception 'gpu % of node % is taken', new.gpu_uuid, new.node_id using errcode = 'LG003';
    end if;
    if new.memory_mib is not null and (card.memory_mib is null or shared_mib + new.memory_mib > card.memory_mib) then
        raise exception 'gpu % of node % has not enough memory: need % MiB, have % MiB unclaimed',
            new.gpu_uuid, new.node_id, new.memory_mib, coalesce((card.memory_mib - shared_mib)::text, 'unknown') using errcode = 'LG003';
    end if;
    if card.memory_kind = 'unified' and not coalesce((select
            (select coalesce(sum(s.memory_mib), 0) from llmgw_core.shard s where s.node_id = n.id and s.state not in ('stopped', 'failed'))
            + llmgw_core.pool_claimed(n.id) + coalesce(new.memory_mib, card.memory_mib) <= n.memory_effective_mib
            from llmgw_core.node n where n.id = new.node_id), false) then
        raise exception 'node % has not enough memory for gpu %: the two share it', new.node_id, new.gpu_uuid using errcode = 'LG003';
    end if;
    return new;
end $$;
comment on function llmgw_core.check_claim_fits() is 'A card has one whole holder, or shares that sum within its memory; holders are live shards of its node. Locks the card.';

create or replace trigger claim_fits before insert or update on llmgw_core.gpu_claim
    for each row execute function llmgw_core.check_claim_fits();
