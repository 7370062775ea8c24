-- What moves by itself, and how often it is written.

create or replace function llmgw_core.beat_every() returns interval
language sql stable security definer set search_path = llmgw_core, pg_temp as $$
    -- A third: the node is heard twice more before anybody calls it silent, or its figures stale.
    select make_interval(secs => least(10, min(value) / 3)) from llmgw_core.setting where name in ('unreachable_after', 'lost_after', 'load_stale')
$$;
comment on function llmgw_core.beat_every() is 'How old the written word of an agent that keeps its pace may become: 10 s, or less where silence is judged sooner. Not written with each sync, since no version can be removed while somebody holds an old snapshot, and every sync passes all of them (F16).';

create or replace function llmgw_core.sync_load(p_node text, p_report jsonb) returns void
language sql security definer set search_path = llmgw_core, pg_temp as $$
    insert into llmgw_core.node_load as l (node_id, at, cpu_percent, load1, load5, load15, memory_used_mib, gpus, ports, pressure)
    select p_node, clock_timestamp(), number_of(p_report->'load'->'cpu_percent')::real, number_of(p_report->'load'->'load1')::real,
        number_of(p_report->'load'->'load5')::real, number_of(p_report->'load'->'load15')::real,
        number_of(p_report->'load'->'memory_used_mib')::bigint,
        -- Numbers only: views compute with them.
        (select jsonb_object_agg(g->>'uuid', jsonb_strip_nulls(jsonb_build_object(
            'memory_used_mib', number_of(g->'memory_used_mib')::bigint, 'memory_foreign_mib', number_of(g->'memory_foreign_mib')::bigint,
            'utilization_percent', number_of(g->'utilization_percent'), 'temperature_c', number_of(g->'temperature_c'),
            'power_w', number_of(g->'power_w'), 'foreign_pids', case when jsonb_typeof(g->'foreign_pids') = 'array'
                and jsonb_array_length(g->'foreign_pids') <= 8 then g->'foreign_pids' end)))
         from jsonb_array_elements(list_or_empty(p_report->'gpus')) g where g->>'uuid' is not null),
        (select jsonb_object_agg(concat_ws('/', p->>'hca', p->>'port'), jsonb_strip_nulls(jsonb_build_object(
            'tx_bytes', number_of(p->'tx_bytes')::bigint, 'rx_bytes', number_of(p->'rx_bytes')::bigint,
            'errors', case jsonb_typeof(p->'errors') when 'object' then (
                select jsonb_object_agg(left(c, 60), number_of(n)::bigint) from jsonb_each(p->'errors') x(c, n) where number_of(n) > 0) end)))
         from (select p from jsonb_array_elements(list_or_empty(p_report->'ports')) p limit 128) listed where p->>'hca' is not null),
        (select jsonb_object_agg(name, number_of(n)) from jsonb_each(case jsonb_typeof(p_report->'load'->'pressure')
            when 'object' then p_report->'load'->'pressure' else '{}' end) x(name, n)
         where name in ('cpu_some', 'memory_some', 'memory_full', 'io_some', 'io_full') and number_of(n) is not null)
    on conflict (node_id) do update set at = excluded.at, cpu_percent = excluded.cpu_percent, load1 = excluded.load1,
        load5 = excluded.load5, load15 = excluded.load15, memory_used_mib = excluded.memory_used_mib, gpus = excluded.gpus, ports = excluded.ports, pressure = excluded.pressure
        where clock_timestamp() - l.at not between interval '0' and llmgw_core.beat_every()
            -- Whether a card may be given (see gpu_state) does not wait.
            or jsonb_path_query_array(l.gpus, '$.keyvalue() ? (exists (@.value.memory_foreign_mib)).key')
                is distinct from jsonb_path_query_array(excluded.gpus, '$.keyvalue() ? (exists (@.value.memory_foreign_mib)).key')
            or jsonb_path_query_array(l.gpus, '$.keyvalue() ? (@.value.memory_foreign_mib > 512).key')
                is distinct from jsonb_path_query_array(excluded.gpus, '$.keyvalue() ? (@.value.memory_foreign_mib > 512).key')
$$;
comment on function llmgw_core.sync_load(text, jsonb) is 'Keeps the fast facts of a node, when the last ones are as old as a beat may be or cards came free or were taken by others.';
