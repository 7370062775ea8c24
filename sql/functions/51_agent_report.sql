-- Slow facts: inventory, when it changed and at times.

create or replace function agent.report_host(p_token text, p_host jsonb) returns void
language plpgsql security definer set search_path = llmgw_core, pg_temp as $$
declare
    me text := llmgw_core.node_of(p_token);
begin
    if jsonb_typeof(p_host) is distinct from 'object' or pg_column_size(p_host) > 65536 then
        raise exception 'the host facts of node % are not an object of at most 64 KiB', me using errcode = 'LG003';
    elsif p_host->>'mgmt_addr' !~ '^[0-9A-Za-z.:_%-]{1,253}$' then  -- it becomes part of a URL
        raise exception 'the address of node % is neither a host name nor an IP address', me using errcode = 'LG003';
    end if;
    update llmgw_core.node set
        hostname = p_host->>'hostname', mgmt_addr = p_host->>'mgmt_addr', os = p_host->>'os', kernel = p_host->>'kernel',
        arch = p_host->>'arch', cpu_model = p_host->>'cpu_model', cpu_flags = llmgw_core.strings_of(p_host->'cpu_flags'),
        cpus_host = (p_host->>'cpus_host')::double precision, cpus_effective = (p_host->>'cpus_effective')::double precision,
        memory_host_mib = (p_host->>'memory_host_mib')::bigint, memory_effective_mib = (p_host->>'memory_effective_mib')::bigint,
        memory_available_mib = (p_host->>'memory_available_mib')::bigint,
        labels = coalesce(nullif(p_host->'labels', 'null'), '{}'),
        port_first = coalesce((p_host->'ports'->>0)::int, port_first), port_last = coalesce((p_host->'ports'->>1)::int, port_last),
        warnings = llmgw_core.strings_of(p_host->'warnings'), agent_version = p_host->>'agent_version',
        host_reported_at = clock_timestamp()
        where id = me;
    perform nextval('llmgw_core.change');
end $$;
comment on function agent.report_host(text, jsonb) is 'Replaces the host facts of the calling node; a missing field becomes unknown.';

create or replace function agent.report_gpus(p_token text, p_gpus jsonb) returns void
language plpgsql security definer set search_path = llmgw_core, pg_temp as $$
declare
    me text := llmgw_core.node_of(p_token);
begin
    perform 1 from llmgw_core.node where id = me for no key update;  -- as commit_plan does before it claims cards
    insert into llmgw_core.gpu as g (node_id, uuid, index, name, class, memory_mib, healthy, problems, pci_bus_id, numa, driver_version, cuda_version)
        select distinct on (2) me, e->>'uuid', (e->>'index')::int, e->>'name', e->>'class', (e->>'memory_mib')::bigint,
            coalesce((e->>'healthy')::boolean, true), coalesce(llmgw_core.strings_of(e->'problems'), '{}'),
            e->>'pci_bus_id', (e->>'numa')::int, e->>'driver_version', e->>'cuda_version'
        from llmgw_core.list_of(p_gpus, 64, 'gpus') e
        on conflict (node_id, uuid) do update set index = excluded.index, name = excluded.name, class = excluded.class,
            memory_mib = excluded.memory_mib, healthy = excluded.healthy, problems = excluded.problems, pci_bus_id = excluded.pci_bus_id,
            numa = excluded.numa, driver_version = excluded.driver_version, cuda_version = excluded.cuda_version,
            reported_at = clock_timestamp();
    -- A card that vanished while a shard holds it must stay visible, and out of placement (E20).
    update llmgw_core.gpu g set healthy = false, problems = array['not seen by the agent any more']
        where g.node_id = me and not exists (select 1 from jsonb_array_elements(p_gpus) e where e->>'uuid' = g.uuid)
          and exists (select 1 from llmgw_core.gpu_claim c where c.node_id = me and c.gpu_uuid = g.uuid);
    delete from llmgw_core.gpu g
        where g.node_id = me and not exists (select 1 from jsonb_array_elements(p_gpus) e where e->>'uuid' = g.uuid)
          and not exists (select 1 from llmgw_core.gpu_claim c where c.node_id = me and c.gpu_uuid = g.uuid);
    perform nextval('llmgw_core.change');
end $$;
comment on function agent.report_gpus(text, jsonb) is 'Replaces the cards of the calling node.';

create or replace function agent.report_engines(p_token text, p_engines jsonb) returns void
language plpgsql security definer set search_path = llmgw_core, pg_temp as $$
declare
    me text := llmgw_core.node_of(p_token);
begin
    delete from llmgw_core.engine where node_id = me;
    insert into llmgw_core.engine (node_id, engine, version, path, state, error)
        select distinct on (1, 2, 3, 4) me, e->>'engine', coalesce(e->>'version', ''), coalesce(e->>'path', ''), coalesce(e->>'state', 'installed'), e->>'error'
        from llmgw_core.list_of(p_engines, 200, 'engines') e;
    perform nextval('llmgw_core.change');
end $$;
comment on function agent.report_engines(text, jsonb) is 'Replaces the engines of the calling node.';

create or replace function agent.report_disks(p_token text, p_disks jsonb) returns void
language plpgsql security definer set search_path = llmgw_core, pg_temp as $$
declare
    me text := llmgw_core.node_of(p_token);
begin
    delete from llmgw_core.disk where node_id = me;
    insert into llmgw_core.disk (node_id, mount, filesystem, kind, total_mib, free_mib, holds_weights)
        select distinct on (2) me, e->>'mount', e->>'filesystem', e->>'kind', (e->>'total_mib')::bigint, (e->>'free_mib')::bigint,
            coalesce((e->>'holds_weights')::boolean, false)
        from llmgw_core.list_of(p_disks, 500, 'disks') e;
end $$;
comment on function agent.report_disks(text, jsonb) is 'Replaces the filesystems of the calling node.';

create or replace function agent.report_weights(p_token text, p_weights jsonb) returns void
language plpgsql security definer set search_path = llmgw_core, pg_temp as $$
declare
    me text := llmgw_core.node_of(p_token);
begin
    delete from llmgw_core.weight where node_id = me;
    insert into llmgw_core.weight (node_id, source, path, bytes, complete)
        select distinct on (3) me, e->>'source', e->>'path', (e->>'bytes')::bigint, coalesce((e->>'complete')::boolean, false)
        from llmgw_core.list_of(p_weights, 2000, 'weights') e;
end $$;
comment on function agent.report_weights(text, jsonb) is 'Replaces the list of weights on the calling node''s disks.';

create or replace function agent.report_log(p_token text, p_ask bigint, p_text text, p_offset bigint) returns void
language plpgsql security definer set search_path = llmgw_core, pg_temp as $$
declare
    me text := llmgw_core.node_of(p_token);
begin
    update llmgw_core.ask set answer = right(p_text, 262144), answer_offset = p_offset, answered_at = clock_timestamp()
        where id = p_ask and node_id = me and answered_at is null;
end $$;
comment on function agent.report_log(text, bigint, text, bigint) is 'Answers a question for a log; offset is where the next part begins.';

grant execute on function agent.enroll(text, text, text), agent.sync(text, bigint, jsonb), agent.report_host(text, jsonb),
    agent.report_gpus(text, jsonb), agent.report_engines(text, jsonb), agent.report_disks(text, jsonb),
    agent.report_weights(text, jsonb), agent.report_log(text, bigint, text, bigint) to llmgw_agent;
