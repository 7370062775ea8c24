-- Fabric ports, and the answers to fabric scans.

create or replace function agent.report_ports(p_token text, p_ports jsonb) returns void
language plpgsql security definer set search_path = llmgw_core, pg_temp as $$
declare
    me text := llmgw_core.node_of(p_token);
begin
    perform 1 from llmgw_core.node where id = me for no key update;
    delete from llmgw_core.ib_port p where p.node_id = me and not exists (
        select 1 from llmgw_core.list_of(p_ports, 128, 'ports') e where e->>'hca' = p.hca and (e->>'port')::int = p.port);
    insert into llmgw_core.ib_port as p (node_id, hca, port, link_layer, state, phys_state, rate_gbps, active, node_guid, port_guid, lid, sm_lid,
            gid_prefix, netdev, numa, pci_bus_id, board, firmware, network, vlan, fabric, key, sm_guid, sm_error, errors)
        select distinct on (2, 3) me, e->>'hca', (e->>'port')::int, e->>'link_layer', e->>'state', e->>'phys_state', (e->>'rate_gbps')::real,
            coalesce((e->>'active')::boolean, false), e->>'node_guid', e->>'port_guid', (e->>'lid')::int, (e->>'sm_lid')::int, e->>'gid_prefix',
            e->>'netdev', (e->>'numa')::int, e->>'pci_bus_id', left(e->>'board', 100), left(e->>'firmware', 100), left(e->>'network', 100),
            (e->>'vlan')::int, left(e->>'fabric', 100), left(e->>'key', 200), e->>'sm_guid', left(e->>'sm_error', 500),
            coalesce(llmgw_core.object_of(e->'errors', 8192), '{}')
        from llmgw_core.list_of(p_ports, 128, 'ports') e
        on conflict (node_id, hca, port) do update set link_layer = excluded.link_layer, state = excluded.state, phys_state = excluded.phys_state,
            rate_gbps = excluded.rate_gbps, active = excluded.active, node_guid = excluded.node_guid, port_guid = excluded.port_guid,
            lid = excluded.lid, sm_lid = excluded.sm_lid, gid_prefix = excluded.gid_prefix, netdev = excluded.netdev, numa = excluded.numa,
            pci_bus_id = excluded.pci_bus_id, board = excluded.board, firmware = excluded.firmware, network = excluded.network,
            vlan = excluded.vlan, fabric = excluded.fabric, key = excluded.key, sm_guid = excluded.sm_guid, sm_error = excluded.sm_error,
            errors = excluded.errors, reported_at = clock_timestamp();
    perform nextval('llmgw_core.change');
end $$;
comment on function agent.report_ports(text, jsonb) is 'Replaces the fabric ports of the calling node.';

create or replace function agent.report_scan(p_token text, p_ask bigint, p_text text, p_took_ms bigint, p_error text) returns void
language plpgsql security definer set search_path = llmgw_core, pg_temp as $$
declare
    me text := llmgw_core.node_of(p_token);
    asked llmgw_core.ask;
begin
    update llmgw_core.ask set answered_at = clock_timestamp() where id = p_ask and node_id = me and kind = 'scan' and answered_at is null
        returning * into asked;
    if asked.id is null then
        return;  -- not asked, or asked so long ago that somebody else was
    elsif octet_length(p_text) > 33554432 then
        raise exception 'the scan of fabric % by node % is over 32 MiB', asked.fabric, me using errcode = 'LG003';
    end if;
    update llmgw_core.fabric_scan set scanned_at = clock_timestamp(), took_ms = p_took_ms, error = left(p_error, 2000),
        -- A failed scan keeps the map of the one before.
        output = coalesce(nullif(p_text, ''), output), output_at = case when coalesce(p_text, '') <> '' then clock_timestamp() else output_at end
        where key = asked.fabric and scanner = me;
end $$;
comment on function agent.report_scan(text, bigint, text, bigint, text) is 'Answers a question for a fabric scan with what ibnetdiscover printed, how long it took and what went wrong.';

grant execute on function agent.report_ports(text, jsonb), agent.report_scan(text, bigint, text, bigint, text) to llmgw_agent;
