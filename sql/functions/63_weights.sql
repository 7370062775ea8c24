-- Removing downloads that nobody needs: asked here, judged again and done by each node's agent.

create or replace function llmgw_core.weight_use(p_node text, p_path text) returns text
language sql stable security definer set search_path = llmgw_core, pg_temp as $$
    select coalesce(
        (select format('model %s of the catalog uses it, by the source %s', m.name, m.source) from llmgw_core.weight w
         join llmgw_core.model m on m.source = w.source or position(w.path in m.source) > 0
         where w.path = p_path and (p_node is null or w.node_id = p_node) order by m.name limit 1),
        (select format('shard %s on node %s uses it', s.id, s.node_id) from llmgw_core.weight w
         join llmgw_core.shard s on s.state not in ('stopped', 'failed')
            and (s.spec->>'source' = w.source or position(w.path in s.spec->>'source') > 0)
         where w.path = p_path and (p_node is null or w.node_id = p_node) order by s.id limit 1),
        'it is not a download of an agent')
$$;
comment on function llmgw_core.weight_use(text, text) is 'Why weights that are on a disk are no orphan.';

create or replace function llmgw_core.orphans_only(p_node text, p_paths text[]) returns void
language plpgsql stable security definer set search_path = llmgw_core, pg_temp as $$
declare
    odd text;
begin
    select p into odd from unnest(p_paths) p where not exists (
        select 1 from llmgw.weight_orphans o where o.path = p and (p_node is null or o.node = p_node)) order by p limit 1;
    if odd is null then
        return;
    elsif not exists (select 1 from llmgw_core.weight w where w.path = odd and (p_node is null or w.node_id = p_node)) then
        raise exception 'nothing was removed: no weights lie at % on %', odd, coalesce('node ' || p_node, 'any node')
            using errcode = 'LG005', hint = 'select node, path from llmgw.weight_orphans';
    end if;
    raise exception 'nothing was removed: % is no orphan: %', odd, llmgw_core.weight_use(p_node, odd)
        using errcode = 'LG003', hint = 'select node, path from llmgw.weight_orphans';
end $$;
comment on function llmgw_core.orphans_only(text, text[]) is 'Refuses paths that are no orphans of the node (null: of any): a mistyped one removes nothing.';

create or replace function llmgw.weights_collect_v1(p_actor text, p_node text, p_paths text[], p_most int default 200) returns jsonb
language plpgsql security definer set search_path = llmgw_core, pg_temp as $$
declare
    n record;
    number bigint;
    answers jsonb := '[]';
begin
    if p_node is not null and not exists (select 1 from llmgw_core.node where id = p_node) then
        raise exception 'there is no node %', p_node using errcode = 'LG005', hint = 'select id from llmgw.nodes';
    end if;
    perform llmgw_core.orphans_only(p_node, p_paths);
    delete from llmgw_core.ask where asked_at < clock_timestamp() - interval '10 min';
    for n in
        with wanted as (
            select o.node, o.path, s.state, s.state_reason,
                -- What many nodes mount is removed once, by the first that can be asked.
                row_number() over (partition by case when o.shared and o.filer_path is not null then jsonb_build_array(o.filer, o.filer_path)
                    else jsonb_build_array(o.node, null, o.path) end order by s.state in ('unreachable', 'lost'), o.node) as turn
            from llmgw.weight_orphans o join llmgw_core.node_state s on s.node_id = o.node
            where (p_node is null or o.node = p_node) and (p_paths is null or o.path = any (p_paths)))
        select w.node, w.state, w.state_reason, array_agg(w.path order by w.path) as paths from wanted w where w.turn = 1
        group by w.node, w.state, w.state_reason order by w.node
    loop
        if n.state in ('unreachable', 'lost') then
            answers := answers || jsonb_build_object('node', n.node, 'error',
                format('node %s is %s (%s), so its agent cannot be asked', n.node, n.state, n.state_reason));
            continue;
        elsif (select count(*) from llmgw_core.ask where node_id = n.node and answered_at is null) >= 20 then
            answers := answers || jsonb_build_object('node', n.node, 'error', format('node %s has 20 unanswered questions: its agent seems away', n.node));
            continue;
        end if;
        insert into llmgw_core.ask (node_id, kind, paths) values (n.node, 'collect', to_jsonb(n.paths[1:p_most])) returning id into number;
        perform llmgw_core.audited(p_actor, 'collect weights', 'node ' || n.node, jsonb_build_object('ask', number, 'paths', n.paths[1:p_most]));
        answers := answers || jsonb_build_object('node', n.node, 'ask', number, 'left', greatest(0, cardinality(n.paths) - p_most));
    end loop;
    return answers;
end $$;
comment on function llmgw.weights_collect_v1(text, text, text[], int) is 'Asks agents to remove orphans: of one node or (null) all, these paths or (null) all, at most p_most of each node. The answers appear in llmgw_core.ask; a path that is no orphan refuses the whole call.';

create or replace function llmgw_core.ask_withdraw_v1(p_asks bigint[]) returns bigint[]
language sql security definer set search_path = llmgw_core, pg_temp as $$
    with gone as (delete from llmgw_core.ask where id = any (p_asks) and answered_at is null returning id)
    select coalesce(array_agg(id order by id), '{}') from gone
$$;
comment on function llmgw_core.ask_withdraw_v1(bigint[]) is 'Takes questions back that nobody has answered: an agent that comes back late must not act on them. Returns which.';

create or replace function agent.report_collect(p_token text, p_ask bigint, p_answer jsonb) returns void
language plpgsql security definer set search_path = llmgw_core, pg_temp as $$
declare
    me text := llmgw_core.node_of(p_token);
    asked llmgw_core.ask;
    freed jsonb := llmgw_core.list_or_empty(p_answer->'freed');
begin
    if jsonb_typeof(p_answer) is distinct from 'object' or pg_column_size(p_answer) > 1048576 then
        raise exception 'the answer of node % is not an object of at most 1 MiB', me using errcode = 'LG003';
    end if;
    update llmgw_core.ask set answer = p_answer::text, answered_at = clock_timestamp()
        where id = p_ask and node_id = me and kind = 'collect' and answered_at is null returning * into asked;
    if asked.id is null then
        return;  -- not asked, or taken back meanwhile
    end if;
    delete from llmgw_core.weight w where w.node_id = me and asked.paths ? w.path
        and exists (select 1 from jsonb_array_elements(freed) f where f->>'path' = w.path);
    perform llmgw_core.audited('node ' || me, 'weights collected', 'node ' || me, jsonb_build_object('ask', p_ask,
        'freed', jsonb_array_length(freed), 'freed_bytes', (select sum(llmgw_core.number_of(f->'bytes')) from jsonb_array_elements(freed) f),
        'kept', jsonb_array_length(llmgw_core.list_or_empty(p_answer->'kept'))));
end $$;
comment on function agent.report_collect(text, bigint, jsonb) is 'Answers a question to remove downloads: what came free and what was kept, and why.';

grant execute on function llmgw.weights_collect_v1(text, text, text[], int), llmgw_core.ask_withdraw_v1(bigint[]) to llmgw_controller;
grant execute on function agent.report_collect(text, bigint, jsonb) to llmgw_agent;
