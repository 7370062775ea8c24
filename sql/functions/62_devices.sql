-- What people say of devices: health marks, forgotten cards, fabric scans.

create or replace function llmgw_core.gpu_named(p_node text, p_gpu text) returns text
language plpgsql stable security definer set search_path = llmgw_core, pg_temp as $$
declare
    found_uuid text;
begin
    perform 1 from llmgw_core.node where id = p_node;
    if not found then
        raise exception 'there is no node %', p_node using errcode = 'LG005', hint = 'select id from llmgw.nodes';
    end if;
    select uuid into found_uuid from llmgw_core.gpu g where g.node_id = p_node and (g.uuid = p_gpu or (g.parent is null and g.index::text = p_gpu))
        order by (g.uuid = p_gpu) desc, g.missing_since nulls first limit 1;
    if found_uuid is null then
        raise exception 'node % has no gpu %', p_node, p_gpu using errcode = 'LG005', hint = 'Give an index or UUID of llmgwctl node ' || p_node;
    end if;
    return found_uuid;
end $$;
comment on function llmgw_core.gpu_named(text, text) is 'The UUID of a node''s card by its UUID or index; LG005 when there is none.';

create or replace function llmgw.gpu_mark_v1(p_actor text, p_node text, p_gpu text, p_mark text, p_reason text) returns jsonb
language plpgsql security definer set search_path = llmgw_core, pg_temp as $$
declare
    card_uuid text := llmgw_core.gpu_named(p_node, p_gpu);
    card llmgw_core.gpu;
    wanted text;
begin
    if p_mark is null or p_mark not in ('healthy', 'unhealthy') then
        raise exception 'a gpu may be marked healthy or unhealthy, not %', p_mark using errcode = 'LG003';
    elsif coalesce(trim(p_reason), '') = '' then
        raise exception 'a mark on gpu % of node % needs a reason', p_gpu, p_node using errcode = 'LG003';
    end if;
    select * into card from llmgw_core.gpu where node_id = p_node and uuid = card_uuid for update;
    -- Healthy on a card without findings only takes a mark back.
    wanted := case when p_mark = 'healthy' and llmgw_core.grave_codes(card.findings) = '{}' then null else p_mark end;
    update llmgw_core.gpu set mark = wanted, mark_reason = case when wanted is not null then left(p_reason, 500) end,
        mark_actor = case when wanted is not null then p_actor end, mark_at = case when wanted is not null then clock_timestamp() end,
        mark_accepts = case when wanted = 'healthy' then llmgw_core.grave_codes(findings) end
        where node_id = p_node and uuid = card_uuid returning * into card;
    perform llmgw_core.event(p_node, 'gpu mark', card_uuid, null, p_mark, jsonb_build_object('actor', p_actor, 'reason', p_reason));
    perform llmgw_core.audited(p_actor, 'mark ' || p_mark, format('gpu %s of node %s', p_gpu, p_node), jsonb_build_object('reason', p_reason, 'uuid', card_uuid));
    perform nextval('llmgw_core.change');
    return jsonb_strip_nulls(jsonb_build_object('node', p_node, 'uuid', card_uuid, 'index', card.index, 'healthy', card.healthy,
        'problems', nullif(to_jsonb(card.problems), '[]')));
end $$;
comment on function llmgw.gpu_mark_v1(text, text, text, text, text) is 'The operator''s word on a card: unhealthy keeps it out of placement; healthy overrides the findings of now, until a new one comes, and takes an unhealthy mark back.';

create or replace function llmgw.gpu_forget_v1(p_actor text, p_node text, p_gpu text) returns jsonb
language plpgsql security definer set search_path = llmgw_core, pg_temp as $$
declare
    card_uuid text := llmgw_core.gpu_named(p_node, p_gpu);
begin
    delete from llmgw_core.gpu where node_id = p_node and uuid = card_uuid and missing_since is not null;
    if not found then
        raise exception 'gpu % of node % is still seen by its agent: only a missing card can be forgotten', p_gpu, p_node using errcode = 'LG003';
    end if;
    perform llmgw_core.audited(p_actor, 'forget', format('gpu %s of node %s', p_gpu, p_node), jsonb_build_object('uuid', card_uuid));
    perform nextval('llmgw_core.change');
    return jsonb_build_object('node', p_node, 'uuid', card_uuid, 'forgotten', true);
exception when foreign_key_violation then
    raise exception 'gpu % of node % is held by a live shard', p_gpu, p_node using errcode = 'LG003';
end $$;
comment on function llmgw.gpu_forget_v1(text, text, text) is 'Removes the row of a card that was taken out of its machine.';

create or replace function llmgw_core.fabric_key(p_id text) returns text
language sql stable security definer set search_path = llmgw_core, pg_temp as $$
    select k.key from (select distinct key from llmgw_core.ib_port where key is not null
        union select key from llmgw_core.fabric_scan) k
    where k.key = p_id or translate(k.key, ':/', '-_') = p_id limit 1
$$;
comment on function llmgw_core.fabric_key(text) is 'The key of a physical fabric by its id in URLs; null when there is none.';

create or replace function llmgw_core.expire_scans() returns int
language plpgsql security definer set search_path = llmgw_core, pg_temp as $$
declare
    late int;
begin
    with overdue as (
        update llmgw_core.fabric_scan set scanned_at = clock_timestamp(), took_ms = null,
            error = format('node %s did not answer within %s s', scanner, llmgw_core.setting('scan_deadline'))
        where scanned_at is null and asked_at < clock_timestamp() - llmgw_core.seconds('scan_deadline') returning key)
    select count(*) into late from overdue;
    return late;
end $$;
comment on function llmgw_core.expire_scans() is 'Fabric scans that nobody answered in time have failed.';

create or replace function llmgw.fabric_scan_v1(p_actor text, p_fabric text) returns jsonb
language plpgsql security definer set search_path = llmgw_core, pg_temp as $$
declare
    wanted text := llmgw_core.fabric_key(p_fabric);
    known llmgw_core.fabric_scan;
    chosen record;
begin
    if wanted is null then
        raise exception 'there is no fabric %', p_fabric using errcode = 'LG005', hint = 'llmgwctl fabrics lists them';
    elsif wanted not like 'ib:%' then
        raise exception 'fabric % is RoCE: ibnetdiscover only maps InfiniBand', wanted using errcode = 'LG003';
    end if;
    perform llmgw_core.expire_scans();
    insert into llmgw_core.fabric_scan (key) values (wanted) on conflict do nothing;
    select * into known from llmgw_core.fabric_scan where key = wanted for update;  -- one scanner per fabric
    if known.asked_at is not null and known.scanned_at is null then
        return jsonb_build_object('fabric', wanted, 'scanner', known.scanner, 'asked_at', known.asked_at, 'under_way', true);
    end if;
    -- Who scanned well goes first, who failed last; else any node in reach, the same for every controller.
    select p.node_id, p.hca, p.port into chosen from llmgw_core.ib_port p join llmgw_core.node_state s on s.node_id = p.node_id
        where p.key = wanted and p.active and p.link_layer = 'InfiniBand' and s.state in ('ready', 'cordoned', 'draining')
        order by case when p.node_id is distinct from known.scanner then 1 when known.error is null then 0 else 2 end, p.node_id, p.hca, p.port limit 1;
    if chosen.node_id is null then
        raise exception 'no live node has an active port on fabric %', wanted using errcode = 'LG003';
    end if;
    update llmgw_core.fabric_scan set asked_at = clock_timestamp(), asked_by = p_actor, scanner = chosen.node_id, hca = chosen.hca,
        port = chosen.port, scanned_at = null, error = null where key = wanted returning * into known;
    insert into llmgw_core.ask (node_id, kind, fabric, hca, port) values (chosen.node_id, 'scan', wanted, chosen.hca, chosen.port);
    perform llmgw_core.audited(p_actor, 'scan', 'fabric ' || wanted, jsonb_build_object('scanner', chosen.node_id));
    return jsonb_build_object('fabric', wanted, 'scanner', known.scanner, 'asked_at', known.asked_at, 'under_way', true);
end $$;
comment on function llmgw.fabric_scan_v1(text, text) is 'Asks one live node on a physical InfiniBand fabric to map it; a scan under way is returned, not doubled.';

create or replace function llmgw_core.scans_keep() returns int
language plpgsql security definer set search_path = llmgw_core, pg_temp as $$
declare
    every interval := llmgw_core.seconds('scan_every');
    due text;
    started int := 0;
begin
    perform llmgw_core.expire_scans();
    if every > interval '0' then
        for due in select distinct p.key from llmgw_core.ib_port p left join llmgw_core.fabric_scan f on f.key = p.key
                where p.key like 'ib:%' and p.active and coalesce(f.asked_at, '-infinity') < clock_timestamp() - every loop
            begin
                perform llmgw.fabric_scan_v1('schedule', due);
                started := started + 1;
            exception when sqlstate 'LG003' then
                null;  -- nobody in reach: told when somebody asks
            end;
        end loop;
    end if;
    return started;
end $$;
comment on function llmgw_core.scans_keep() is 'Ends overdue fabric scans and starts those that setting scan_every asks for; returns how many.';

grant execute on function llmgw.gpu_mark_v1(text, text, text, text, text), llmgw.gpu_forget_v1(text, text, text),
    llmgw.fabric_scan_v1(text, text), llmgw_core.fabric_key(text) to llmgw_controller;
