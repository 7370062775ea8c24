-- Health of cards and the history of devices: triggers, so that whatever writes a row, the rules hold.

create or replace function llmgw_core.event(p_node text, p_kind text, p_object text, p_was text, p_now text, p_evidence jsonb default null)
returns void language sql security definer set search_path = llmgw_core, pg_temp as $$
    insert into llmgw_core.node_event (node_id, kind, object, was, now, evidence) values (p_node, p_kind, p_object, p_was, p_now, p_evidence)
$$;
comment on function llmgw_core.event(text, text, text, text, text, jsonb) is 'Writes one change of a device into the history.';

create or replace function llmgw_core.grave_codes(p_findings jsonb) returns text[]
language sql immutable set search_path = llmgw_core, pg_temp as $$
    select coalesce(array_agg(distinct f->>'code' order by f->>'code'), '{}') from jsonb_array_elements(p_findings) f
    where coalesce((f->>'unhealthy')::boolean, true)
$$;
comment on function llmgw_core.grave_codes(jsonb) is 'Codes of the findings that keep a card out of placement.';

create or replace function llmgw_core.judge_gpu() returns trigger
language plpgsql security definer set search_path = llmgw_core, pg_temp as $$
declare
    grave text[];
begin
    if new.missing_since is not null then
        new.findings := jsonb_build_array(jsonb_build_object('code', 'missing', 'kind', 'reset', 'unhealthy', true,
            'text', case when new.parent is null then 'missing: its agent does not see the card any more'
                         else 'device gone: the MIG layout of the card has changed' end));
    end if;
    grave := llmgw_core.grave_codes(new.findings);
    -- An operator's "healthy" is about what was known then: a new finding ends it.
    if new.mark = 'healthy' and not grave <@ new.mark_accepts then
        perform llmgw_core.event(new.node_id, 'gpu mark', new.uuid, 'healthy', null, jsonb_build_object(
            'because', 'a finding that the mark did not know', 'findings', new.findings));
        new.mark := null; new.mark_reason := null; new.mark_actor := null; new.mark_at := null; new.mark_accepts := null;
    end if;
    new.healthy := case new.mark when 'unhealthy' then false when 'healthy' then true else grave = '{}' end;
    new.problems := array(
        select format('marked unhealthy by %s: %s', new.mark_actor, new.mark_reason) where new.mark = 'unhealthy'
        union all select left(f->>'text', 500) from jsonb_array_elements(new.findings) f
        union all select format('marked healthy by %s: %s', new.mark_actor, new.mark_reason) where new.mark = 'healthy');
    return new;
end $$;
comment on function llmgw_core.judge_gpu() is 'Health of a card: the operator''s mark, else whether a finding keeps it out.';

create or replace trigger gpu_judged before insert or update of findings, mark, missing_since on llmgw_core.gpu
    for each row execute function llmgw_core.judge_gpu();

create or replace function llmgw_core.codes_of(p_findings jsonb) returns text
language sql immutable set search_path = llmgw_core, pg_temp as $$
    select string_agg(distinct f->>'code', ', ' order by f->>'code') from jsonb_array_elements(p_findings) f
$$;
comment on function llmgw_core.codes_of(jsonb) is 'Codes of findings as text; null when there are none.';

create or replace function llmgw_core.tell_gpu() returns trigger
language plpgsql security definer set search_path = llmgw_core, pg_temp as $$
declare
    was text;
    is_now text := concat_ws(': ', case when new.healthy then 'healthy' else 'unhealthy' end, llmgw_core.codes_of(new.findings));
begin
    if tg_op = 'INSERT' then
        perform llmgw_core.event(new.node_id, 'gpu appeared', new.uuid, null, is_now,
            jsonb_build_object('index', new.index, 'class', new.class, 'pci_bus_id', new.pci_bus_id, 'findings', new.findings));
        return null;
    end if;
    was := concat_ws(': ', case when old.healthy then 'healthy' else 'unhealthy' end, llmgw_core.codes_of(old.findings));
    if was <> is_now then
        perform llmgw_core.event(new.node_id, 'gpu health', new.uuid, was, is_now, jsonb_build_object('index', new.index, 'findings', new.findings));
    end if;
    if (old.fabric_state, old.cluster_uuid, old.clique, old.bandwidth) is distinct from (new.fabric_state, new.cluster_uuid, new.clique, new.bandwidth) then
        perform llmgw_core.event(new.node_id, 'gpu fabric', new.uuid,
            concat_ws(' ', old.fabric_state, old.cluster_uuid || '.' || old.clique, old.bandwidth),
            concat_ws(' ', new.fabric_state, new.cluster_uuid || '.' || new.clique, new.bandwidth), jsonb_build_object('index', new.index));
    end if;
    return null;
end $$;
comment on function llmgw_core.tell_gpu() is 'Every change of a card''s health or fabric becomes an event.';

create or replace trigger gpu_told after insert or update on llmgw_core.gpu
    for each row execute function llmgw_core.tell_gpu();

create or replace function llmgw_core.tell_gpu_gone() returns trigger
language plpgsql security definer set search_path = llmgw_core, pg_temp as $$
begin
    if exists (select 1 from llmgw_core.node where id = old.node_id) then  -- not when the node itself goes
        perform llmgw_core.event(old.node_id, 'gpu removed', old.uuid, case when old.healthy then 'healthy' else 'unhealthy' end, null,
            jsonb_build_object('index', old.index, 'class', old.class, 'pci_bus_id', old.pci_bus_id));
    end if;
    return null;
end $$;
comment on function llmgw_core.tell_gpu_gone() is 'A card''s row that goes leaves an event.';

create or replace trigger gpu_gone_told after delete on llmgw_core.gpu
    for each row execute function llmgw_core.tell_gpu_gone();

create or replace function llmgw_core.tell_node() returns trigger
language plpgsql security definer set search_path = llmgw_core, pg_temp as $$
begin
    if (old.nvlink_state, old.nvlink_domain) is distinct from (new.nvlink_state, new.nvlink_domain) then
        perform llmgw_core.event(new.id, 'nvlink domain', 'nvlink', concat_ws(' ', old.nvlink_state, old.nvlink_domain),
            concat_ws(' ', new.nvlink_state, new.nvlink_domain), jsonb_strip_nulls(jsonb_build_object('reason', new.nvlink_reason)));
    end if;
    if (old.imex->>'state', old.imex->>'domain_state', old.imex->>'owner', old.imex_channels)
            is distinct from (new.imex->>'state', new.imex->>'domain_state', new.imex->>'owner', new.imex_channels) then
        perform llmgw_core.event(new.id, 'imex', 'imex',
            concat_ws(', ', old.imex->>'state', old.imex->>'domain_state', old.imex_channels || ' channels'),
            concat_ws(', ', new.imex->>'state', new.imex->>'domain_state', new.imex_channels || ' channels'),
            jsonb_strip_nulls(jsonb_build_object('owner', new.imex->>'owner', 'error', new.imex->>'error')));
    end if;
    return null;
end $$;
comment on function llmgw_core.tell_node() is 'Every change of a node''s NVLink domain or IMEX service becomes an event.';

create or replace trigger node_told after update of nvlink_state, nvlink_domain, imex, imex_channels on llmgw_core.node
    for each row execute function llmgw_core.tell_node();

create or replace function llmgw_core.tell_port() returns trigger
language plpgsql security definer set search_path = llmgw_core, pg_temp as $$
declare
    object text;
begin
    if tg_op = 'DELETE' then
        if exists (select 1 from llmgw_core.node where id = old.node_id) then
            perform llmgw_core.event(old.node_id, 'port removed', old.hca || '/' || old.port, old.state, null);
        end if;
        return null;
    end if;
    object := new.hca || '/' || new.port;
    if tg_op = 'INSERT' then
        perform llmgw_core.event(new.node_id, 'port appeared', object, null, concat_ws(', ', new.state, new.phys_state, new.link_layer));
        return null;
    end if;
    if (old.state, old.phys_state, old.rate_gbps) is distinct from (new.state, new.phys_state, new.rate_gbps) then
        perform llmgw_core.event(new.node_id, 'port state', object, concat_ws(', ', old.state, old.phys_state, old.rate_gbps || ' Gb/s'),
            concat_ws(', ', new.state, new.phys_state, new.rate_gbps || ' Gb/s'));
    end if;
    if old.sm_guid is distinct from new.sm_guid and (old.sm_guid is not null or new.sm_guid is not null) then
        perform llmgw_core.event(new.node_id, 'subnet manager', object, old.sm_guid, new.sm_guid,
            jsonb_strip_nulls(jsonb_build_object('lid', new.sm_lid, 'error', new.sm_error)));
    end if;
    return null;
end $$;
comment on function llmgw_core.tell_port() is 'Every change of a port''s state or subnet manager becomes an event.';

create or replace trigger port_told after insert or update or delete on llmgw_core.ib_port
    for each row execute function llmgw_core.tell_port();
