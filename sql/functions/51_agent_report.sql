-- Slow facts: inventory, when it changed and at times. Cards are in 52_agent_gpus.sql, ports in 53_agent_ports.sql.

create or replace function llmgw_core.object_of(p_value jsonb, p_most int) returns jsonb
language sql immutable set search_path = llmgw_core, pg_temp as $$
    select case when jsonb_typeof(p_value) = 'object' and pg_column_size(p_value) <= p_most then p_value end
$$;
comment on function llmgw_core.object_of(jsonb, int) is 'A reported object of at most so many bytes; null for anything else.';

-- Not "set search_path": only so it becomes part of the queries that ask for 5,000 nodes.
create or replace function llmgw_core.imex_fault(p_imex jsonb, p_channels int) returns text
language sql immutable parallel safe as $$
    select case
        when p_imex is null then 'no IMEX service'
        when p_imex->>'state' = 'READY' and p_channels > 0 and p_imex->'owners'->1 is null then null
        else concat_ws('; ',
            case when p_imex->>'state' is distinct from 'READY' then 'IMEX is ' || coalesce(p_imex->>'state', 'in an unknown state') end,
            case when p_imex->'owners'->1 is not null then coalesce(left(p_imex->>'error', 500), 'IMEX has more than one owner')
                 when p_imex->>'state' is distinct from 'READY' then left(p_imex->>'error', 500) end,
            case when p_channels = 0 then 'no IMEX channel device' when p_channels is null then 'IMEX channels unknown' end) end
$$;
comment on function llmgw_core.imex_fault(jsonb, int) is 'Why cards of the node cannot share memory with those of others over IMEX, by what its agent reported; null when they can. Two owners of IMEX make jobs hang (E17).';

create or replace function agent.report_host(p_token text, p_host jsonb) returns void
language plpgsql security definer set search_path = llmgw_core, pg_temp as $$
declare
    me text := llmgw_core.node_of(p_token);
begin
    if jsonb_typeof(p_host) is distinct from 'object' or pg_column_size(p_host) > 131072 then
        raise exception 'the host facts of node % are not an object of at most 128 KiB', me using errcode = 'LG003';
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
        machine = coalesce(llmgw_core.object_of(p_host->'machine', 32768), '{}'),
        nvlink_state = p_host->'nvlink'->>'state', nvlink_domain = left(p_host->'nvlink'->>'domain', 100),
        nvlink_reason = left(p_host->'nvlink'->>'reason', 500),
        imex = llmgw_core.object_of(p_host->'imex', 65536),
        imex_channels = llmgw_core.number_of(p_host->'imex'->'channels')::int,
        host_reported_at = clock_timestamp()
        where id = me;
    perform nextval('llmgw_core.change');
end $$;
comment on function agent.report_host(text, jsonb) is 'Replaces the host facts of the calling node; a missing field becomes unknown.';

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
    insert into llmgw_core.disk (node_id, mount, filesystem, kind, total_mib, free_mib, holds_weights, source)
        select distinct on (2) me, e->>'mount', e->>'filesystem', e->>'kind', (e->>'total_mib')::bigint, (e->>'free_mib')::bigint,
            coalesce((e->>'holds_weights')::boolean, false), left(e->>'source', 500)
        from llmgw_core.list_of(p_disks, 500, 'disks') e;
end $$;
comment on function agent.report_disks(text, jsonb) is 'Replaces the filesystems of the calling node.';

create or replace function llmgw_core.file_path(p_source text) returns text
language sql immutable as $$ select case when p_source like 'file:%' then regexp_replace(p_source, '^file:(//[^/]*)?', '') end $$;
comment on function llmgw_core.file_path(text) is 'The path in a source such as file:/models/x or file:///models/x; null for others.';

create or replace function llmgw_core.file_source(p_path text) returns text
language sql stable security definer set search_path = llmgw_core, pg_temp as $$
    -- A filer's folder is found by a scan, without the name that a model gives it.
    select min(m.source) from llmgw_core.model m where m.source like 'file:%' and llmgw_core.file_path(m.source) = p_path
$$;
comment on function llmgw_core.file_source(text) is 'The source of the model that names this path; null when none does.';

create or replace function agent.report_weights(p_token text, p_weights jsonb) returns void
language plpgsql security definer set search_path = llmgw_core, pg_temp as $$
declare
    me text := llmgw_core.node_of(p_token);
begin
    delete from llmgw_core.weight where node_id = me;
    insert into llmgw_core.weight (node_id, source, path, bytes, complete, name, revision, format, reason, shared, filer, facts, managed, filer_path, shared_bytes)
        select distinct on (3) me, coalesce(e->>'source', llmgw_core.file_source(e->>'path')), e->>'path', (e->>'bytes')::bigint, coalesce((e->>'complete')::boolean, false),
            left(e->>'name', 300), left(e->>'revision', 100), left(e->>'format', 40), left(e->>'reason', 500),
            coalesce((e->>'shared')::boolean, false), left(e->>'filer', 500), llmgw_core.object_of(e->'facts', 16384),
            -- Agents of version 0.1 list their own downloads only.
            coalesce((e->>'managed')::boolean, true), left(e->>'filer_path', 4096), (e->>'shared_bytes')::bigint
        from llmgw_core.list_of(p_weights, 2000, 'weights') e;
end $$;
comment on function agent.report_weights(text, jsonb) is 'Replaces the list of weights on the calling node''s disks.';

create or replace function agent.report_checks(p_token text, p_checks jsonb) returns void
language plpgsql security definer set search_path = llmgw_core, pg_temp as $$
declare
    me text := llmgw_core.node_of(p_token);
begin
    delete from llmgw_core.node_check where node_id = me;
    insert into llmgw_core.node_check (node_id, name, position, result, evidence, remedy)
        select distinct on (2) me, e->>'name', ord, e->>'result', left(e->>'evidence', 2000), left(e->>'remedy', 2000)
        from jsonb_array_elements((select jsonb_agg(x) from llmgw_core.list_of(p_checks, 100, 'checks') x)) with ordinality as c(e, ord);
end $$;
comment on function agent.report_checks(text, jsonb) is 'Replaces what the calling node''s check of itself came to.';

create or replace function agent.report_events(p_token text, p_events jsonb) returns void
language plpgsql security definer set search_path = llmgw_core, pg_temp as $$
declare
    me text := llmgw_core.node_of(p_token);
begin
    insert into llmgw_core.node_event (node_id, kind, object, now, evidence)
        select me, left(e->>'kind', 40), left(e->>'object', 100), left(e->>'now', 100), llmgw_core.object_of(e->'evidence', 8192)
        from llmgw_core.list_of(p_events, 200, 'events') e;
end $$;
comment on function agent.report_events(text, jsonb) is 'Adds error events of the calling node''s cards (XIDs and the like) to the history.';

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
    agent.report_engines(text, jsonb), agent.report_disks(text, jsonb), agent.report_weights(text, jsonb),
    agent.report_checks(text, jsonb), agent.report_events(text, jsonb), agent.report_log(text, bigint, text, bigint) to llmgw_agent;
