-- Cards and MIG slices as the agent lists them.

create or replace function llmgw_core.findings_of(p_card jsonb) returns jsonb
language sql immutable set search_path = llmgw_core, pg_temp as $$
    -- Agents of version 0.1 say healthy and problems instead: an agent may be older than the schema.
    select case when not p_card ? 'findings' and p_card->>'healthy' = 'false' then (
        select jsonb_agg(jsonb_build_object('code', 'reported', 'kind', 'passing', 'text', p, 'unhealthy', true)) from unnest(
            coalesce(nullif(llmgw_core.strings_of(p_card->'problems'), '{}'), array['no cause reported'])) p)
    else (select coalesce(jsonb_agg(f), '[]') from (
        select jsonb_strip_nulls(jsonb_build_object('code', left(f->>'code', 60), 'kind', left(f->>'kind', 20), 'text', left(f->>'text', 500),
            'evidence', left(f->>'evidence', 500), 'unhealthy', coalesce((f->>'unhealthy')::boolean, true))) as f
        from jsonb_array_elements(llmgw_core.list_or_empty(p_card->'findings')) f where f->>'code' is not null limit 50) listed) end
$$;
comment on function llmgw_core.findings_of(jsonb) is 'The findings of a reported card, bounded.';

create or replace function llmgw_core.known_uuid(p_node text, p_card jsonb) returns text
language sql stable set search_path = llmgw_core, pg_temp as $$
    -- A card that fell off the bus has lost its UUID too; its address tells which one it was.
    select coalesce((select g.uuid from llmgw_core.gpu g
        where p_card->>'uuid' like 'PCI-%' and g.node_id = p_node and g.pci_bus_id = p_card->>'pci_bus_id'
          and g.uuid not like 'PCI-%' and g.parent is null
        order by g.missing_since nulls first limit 1), p_card->>'uuid')
$$;
comment on function llmgw_core.known_uuid(text, jsonb) is 'Under which UUID a reported card is filed.';

create or replace function llmgw_core.sync_gpus(p_node text, p_gpus jsonb) returns text[]
language plpgsql security definer set search_path = llmgw_core, pg_temp as $$
declare
    said text[];
begin
    with told as (
        select distinct on (1) llmgw_core.known_uuid(p_node, e) as uuid, e from llmgw_core.list_of(p_gpus, 128, 'gpus') e order by 1),
    kept as (
        insert into llmgw_core.gpu as g (node_id, uuid, index, name, class, memory_mib, pci_bus_id, numa, driver_version, cuda_version, vendor,
                memory_kind, parent, mig_profile, partitioned, fabric_state, cluster_uuid, clique, bandwidth, nearest_nic, nic_path, paths, detail, findings, island)
            select p_node, t.uuid, (e->>'index')::int, coalesce(e->>'name', 'unknown'), coalesce(e->>'class', 'unknown'), (e->>'memory_mib')::bigint,
                e->>'pci_bus_id', (e->>'numa')::int, e->>'driver_version', e->>'cuda_version', e->>'vendor', e->>'memory_kind',
                e->>'parent', e->>'mig_profile', coalesce((e->>'partitioned')::boolean, false), e->>'fabric_state', e->>'cluster_uuid',
                (e->>'clique')::bigint, e->>'bandwidth', e->>'nearest_nic', e->>'nic_path',
                llmgw_core.object_of(e->'paths', 16384), llmgw_core.object_of(e->'detail', 32768), llmgw_core.findings_of(e),
                (e->>'island')::int
            from told t
        on conflict (node_id, uuid) do update set index = excluded.index, memory_mib = excluded.memory_mib,
            -- A lost card cannot say what it is: what was known of it stays.
            name = case when excluded.name = 'unknown' then g.name else excluded.name end,
            class = case when excluded.class = 'unknown' then g.class else excluded.class end,
            pci_bus_id = coalesce(excluded.pci_bus_id, g.pci_bus_id), numa = excluded.numa, driver_version = excluded.driver_version,
            cuda_version = excluded.cuda_version, vendor = excluded.vendor, memory_kind = excluded.memory_kind, parent = excluded.parent,
            mig_profile = excluded.mig_profile, partitioned = excluded.partitioned, fabric_state = excluded.fabric_state,
            cluster_uuid = excluded.cluster_uuid, clique = excluded.clique, bandwidth = excluded.bandwidth, nearest_nic = excluded.nearest_nic,
            nic_path = excluded.nic_path, paths = excluded.paths, detail = excluded.detail, findings = excluded.findings,
            island = excluded.island, missing_since = null, reported_at = clock_timestamp()
        returning g.uuid)
    select coalesce(array_agg(uuid), '{}') into said from kept;
    return said;
end $$;
comment on function llmgw_core.sync_gpus(text, jsonb) is 'Keeps the reported cards; returns under which UUIDs.';

create or replace function agent.report_gpus(p_token text, p_gpus jsonb) returns void
language plpgsql security definer set search_path = llmgw_core, pg_temp as $$
declare
    me text := llmgw_core.node_of(p_token);
    said text[];
begin
    perform 1 from llmgw_core.node where id = me for no key update;  -- as commit_plan does before it claims cards
    said := llmgw_core.sync_gpus(me, p_gpus);
    -- Gone for good and nobody's: slices of an old layout, cards without a UUID, and cards in whose place another sits.
    delete from llmgw_core.gpu g where g.node_id = me and g.uuid <> all (said)
        and not exists (select 1 from llmgw_core.gpu_claim c where c.node_id = me and c.gpu_uuid = g.uuid)
        and (g.parent is not null or g.uuid like 'PCI-%'
             or exists (select 1 from llmgw_core.gpu x where x.node_id = me and x.uuid = any (said) and x.parent is null and x.pci_bus_id = g.pci_bus_id));
    -- Any other card that is not seen any more must stay visible, and out of placement (E20).
    update llmgw_core.gpu g set missing_since = clock_timestamp()
        where g.node_id = me and g.uuid <> all (said) and g.missing_since is null;
    perform nextval('llmgw_core.change');
end $$;
comment on function agent.report_gpus(text, jsonb) is 'Replaces the cards of the calling node.';

grant execute on function agent.report_gpus(text, jsonb) to llmgw_agent;
