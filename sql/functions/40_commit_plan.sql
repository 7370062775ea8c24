-- The one way in which decisions become rows: term, alloc_gen, claims and gangs are checked here.

create or replace function llmgw_core.endpoint_of(p_replica bigint, p_launch int) returns text
language sql stable security definer set search_path = llmgw_core, pg_temp as $$
    select 'http://' || case when n.mgmt_addr like '%:%' then '[' || n.mgmt_addr || ']' else n.mgmt_addr end || ':' || s.port
    from llmgw_core.shard s join llmgw_core.node n on n.id = s.node_id
    where s.replica_id = p_replica and s.launch = p_launch and s.rank = 0
$$;
comment on function llmgw_core.endpoint_of(bigint, int) is 'Where rank 0 of a launch serves.';

create or replace function llmgw_core.plan_place(p_term bigint, p_item jsonb, p_gens jsonb) returns void
language plpgsql security definer set search_path = llmgw_core, pg_temp as $$
declare
    r llmgw_core.replica;
    s record;
    n llmgw_core.node;
    shard bigint;
begin
    select * into r from llmgw_core.replica where id = (p_item->>'replica_id')::bigint for no key update;
    if r.id is null or r.state <> 'pending' then
        raise exception 'replica % is % and not pending', p_item->>'replica_id', coalesce(r.state, 'unknown') using errcode = 'LG003';
    end if;
    update llmgw_core.replica set state = 'starting', profile = p_item->>'profile', fingerprint = p_item->>'fingerprint',
        pool = p_item->>'pool', launch = launch + 1, term = p_term, reason = p_item->>'reason',
        backoff_until = null, drain_deadline = null, endpoint = null, ready_at = null,
        replace_asked = null, replace_actor = null, replace_force = false
        where id = r.id;
    if llmgw_core.list_or_empty(p_item->'shards') = '[]' then
        raise exception 'replica % is placed on no node', r.id using errcode = 'LG003';
    end if;
    for s in select * from jsonb_to_recordset(p_item->'shards') as x(rank int, node_id text, basis bigint,
            gpus text[], gpu_memory_mib bigint, port int, master_port int, cpus double precision, memory_mib bigint, gang jsonb) loop
        select * into n from llmgw_core.node where id = s.node_id;
        if n.id is null then
            raise exception 'node % does not exist', s.node_id using errcode = 'LG003';
        elsif n.intent <> 'ready' then
            raise exception 'node % is %', n.id, n.intent using errcode = 'LG003';
        elsif (p_gens->>n.id)::bigint is distinct from s.basis then
            raise exception 'node % changed since the snapshot', n.id using errcode = 'LG003';
        end if;
        -- Two indexes keep each kind of port to one live holder; between the kinds only this does.
        if s.port = s.master_port or exists (select 1 from llmgw_core.shard o where o.node_id = n.id and o.state not in ('stopped', 'failed')
                and (o.master_port = s.port or o.port = s.master_port)) then
            raise exception 'port % of node % is taken', concat_ws(' or ', s.port, s.master_port), n.id using errcode = 'LG003';
        end if;
        insert into llmgw_core.shard (replica_id, launch, rank, node_id, port, master_port, cpus, memory_mib, spec)
            values (r.id, r.launch + 1, s.rank, s.node_id, s.port, s.master_port, s.cpus, s.memory_mib,
                    (p_item->'spec') || jsonb_build_object('shards', jsonb_array_length(p_item->'shards'))
                    || case jsonb_typeof(s.gang) when 'object' then jsonb_build_object('gang', s.gang) else '{}' end)
            returning id into shard;
        if exists (select 1 from unnest(s.gpus) g left join llmgw_core.gpu c on c.node_id = s.node_id and c.uuid = g
                   where c.uuid is null or not c.healthy or c.partitioned) then
            raise exception 'a gpu of node % is gone or unhealthy', n.id using errcode = 'LG003';
        end if;
        insert into llmgw_core.gpu_claim (shard_id, node_id, gpu_uuid, memory_mib)
            select shard, s.node_id, g, s.gpu_memory_mib from unnest(s.gpus) g;
        update llmgw_core.node set alloc_gen = alloc_gen + 1 where id = n.id;
    end loop;
end $$;
comment on function llmgw_core.plan_place(bigint, jsonb, jsonb) is 'One placement: all shards of the replica or an error. p_gens holds alloc_gen of the nodes when they were locked.';

create or replace function llmgw_core.plan_move(p_term bigint, p_item jsonb) returns void
language plpgsql security definer set search_path = llmgw_core, pg_temp as $$
declare
    r llmgw_core.replica;
    to_state text := p_item->>'to_state';
begin
    select * into r from llmgw_core.replica where id = (p_item->>'replica_id')::bigint for no key update;
    if r.id is null or r.state <> p_item->>'from_state' then
        raise exception 'replica % is % and not %', p_item->>'replica_id', coalesce(r.state, 'unknown'), p_item->>'from_state'
            using errcode = 'LG003';
    end if;
    update llmgw_core.replica set
        state = to_state, term = p_term, reason = p_item->>'reason',
        error = case when to_state = 'ready' then null else coalesce(p_item->>'error', error) end,
        backoff_until = to_timestamp((p_item->>'backoff_until')::double precision),
        drain_deadline = to_timestamp((p_item->>'drain_deadline')::double precision),
        restarts = coalesce((p_item->>'restarts')::int, restarts),
        room_for = case when to_state in ('draining', 'stopping') then coalesce(p_item->>'room_for', room_for) end,
        endpoint = case when to_state = 'ready' then llmgw_core.endpoint_of(id, launch)
                        when to_state = 'draining' then endpoint end,
        ready_at = case when to_state = 'ready' then coalesce(ready_at, clock_timestamp())
                        when to_state = 'draining' then ready_at end
        where id = r.id;
end $$;
comment on function llmgw_core.plan_move(bigint, jsonb) is 'One move of a replica; stopping and failed tell its shards to stop (replica_over).';

create or replace function llmgw_core.plan_replica(p_item jsonb) returns bigint
language sql immutable set search_path = llmgw_core, pg_temp as $$
    select case when p_item->>'replica_id' ~ '^[0-9]{1,18}$' then (p_item->>'replica_id')::bigint end
$$;
comment on function llmgw_core.plan_replica(jsonb) is 'The replica that a plan item names; null for anything odd, which the item itself then reports.';

create or replace function llmgw_core.plan_lock(p_items jsonb) returns jsonb
language plpgsql security definer set search_path = llmgw_core, pg_temp as $$
declare
    placed text[];
    moved bigint[];
begin
    select array_agg(distinct s->>'node_id') into placed
        from jsonb_array_elements(p_items) i, jsonb_array_elements(llmgw_core.list_or_empty(i->'shards')) s;
    select array_agg(distinct llmgw_core.plan_replica(i)) into moved from jsonb_array_elements(p_items) i;
    perform 1 from llmgw_core.node n where n.id = any (placed) or n.id in (
            select s.node_id from llmgw_core.shard s where s.replica_id = any (moved) and s.state not in ('stopped', 'failed'))
        order by n.id for no key update;
    perform 1 from llmgw_core.replica r where r.id = any (moved) order by r.id for no key update;
    -- Agents' reports take their shards in this order too.
    perform 1 from llmgw_core.shard s where s.replica_id = any (moved) and s.state not in ('stopped', 'failed')
        order by s.id for no key update;
    return (select coalesce(jsonb_object_agg(n.id, n.alloc_gen), '{}') from llmgw_core.node n where n.id = any (placed));
end $$;
comment on function llmgw_core.plan_lock(jsonb) is 'Locks every node, replica and shard that a plan touches, always in one order so that commits and reports cannot deadlock; returns alloc_gen of the nodes to place on.';

create or replace function llmgw_core.commit_plan_v1(p_term bigint, p_items jsonb)
returns table ("position" int, outcome text)
language plpgsql security definer set search_path = llmgw_core, pg_temp as $$
declare
    item jsonb;
    gens jsonb;
    at_position int := 0;
    changed boolean := false;
    verdict text;
begin
    perform llmgw_core.require_term('tick', p_term);
    gens := llmgw_core.plan_lock(p_items);
    for item in select * from jsonb_array_elements(p_items) loop
        verdict := 'ok';
        begin  -- a subtransaction each: one bad item never stops the others (D10)
            case item->>'kind'
                when 'create' then
                    insert into llmgw_core.replica (model, term, reason)
                        select m.name, p_term, item->>'reason' from llmgw_core.model m where m.name = item->>'model';
                    if not found then
                        raise exception 'model % left the catalog', item->>'model' using errcode = 'LG003';
                    end if;
                when 'place' then perform llmgw_core.plan_place(p_term, item, gens);
                when 'move' then perform llmgw_core.plan_move(p_term, item);
                else raise exception 'unknown kind of plan item: %', item->>'kind' using errcode = 'LG003';
            end case;
            changed := true;
        exception
            when sqlstate 'LG002' or sqlstate 'LG003' or integrity_constraint_violation or data_exception then
                verdict := sqlerrm;
        end;
        insert into llmgw_core.decision (term, kind, model, replica_id, node_id, reason, detail)
            values (p_term, case when verdict = 'ok' then item->>'kind' else 'refuse' end, item->>'model',
                    llmgw_core.plan_replica(item), item->'shards'->0->>'node_id',
                    case when verdict = 'ok' then coalesce(item->>'reason', '') else verdict end,
                    case jsonb_typeof(item) when 'object' then item - 'spec' - 'model' - 'replica_id' else item end);
        "position" := at_position;
        outcome := verdict;
        at_position := at_position + 1;
        return next;
    end loop;
    if changed then
        perform llmgw_core.notify('plan');
    end if;
end $$;
comment on function llmgw_core.commit_plan_v1(bigint, jsonb) is 'Writes a plan made under this term. Raises LG001 and changes nothing when another term leads; an item that no longer fits is refused by itself and planned again in the next tick.';

grant execute on function llmgw_core.commit_plan_v1(bigint, jsonb) to llmgw_controller;
