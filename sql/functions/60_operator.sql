-- What people do to nodes. Works from psql too: select llmgw.cordon('n1', 'new power supply').

create or replace function llmgw.set_node_intent(p_node text, p_intent text, p_reason text default null, p_actor text default null)
returns text language plpgsql security definer set search_path = llmgw_core, pg_temp as $$
begin
    if p_intent not in ('ready', 'cordoned', 'draining') then
        raise exception 'a node may be ready, cordoned or draining, not %', p_intent using errcode = 'LG003';
    end if;
    update llmgw_core.node set intent = p_intent, intent_reason = case when p_intent = 'ready' then null else p_reason end,
        intent_actor = coalesce(p_actor, session_user), intent_at = clock_timestamp(), alloc_gen = alloc_gen + 1
        where id = p_node;
    if not found then
        raise exception 'there is no node %', p_node using errcode = 'LG005', hint = 'select id from llmgw.nodes';
    end if;
    perform llmgw_core.audited(coalesce(p_actor, session_user), p_intent, 'node ' || p_node, jsonb_build_object('reason', p_reason));
    perform nextval('llmgw_core.change');
    perform llmgw_core.notify('nodes');
    return p_intent;
end $$;
comment on function llmgw.set_node_intent(text, text, text, text) is 'Sets what the operator wants of a node: ready, cordoned (nothing new) or draining (nothing new, and replicas move away). LG005 when there is no such node.';

create or replace function llmgw.cordon(p_node text, p_reason text default null) returns text
language sql security definer set search_path = llmgw_core, pg_temp as $$ select llmgw.set_node_intent(p_node, 'cordoned', p_reason) $$;
comment on function llmgw.cordon(text, text) is 'Nothing new is placed on the node; what runs goes on.';

create or replace function llmgw.drain(p_node text, p_reason text default null) returns text
language sql security definer set search_path = llmgw_core, pg_temp as $$ select llmgw.set_node_intent(p_node, 'draining', p_reason) $$;
comment on function llmgw.drain(text, text) is 'Moves replicas away one at a time, each replacement ready before the original stops.';

create or replace function llmgw.uncordon(p_node text) returns text
language sql security definer set search_path = llmgw_core, pg_temp as $$ select llmgw.set_node_intent(p_node, 'ready') $$;
comment on function llmgw.uncordon(text) is 'The node may be used again; a drain under way is given up.';

create or replace function llmgw.node_enroll_v1(p_actor text, p_node text, p_token_hash bytea, p_uses int, p_ttl_s double precision)
returns timestamptz language plpgsql security definer set search_path = llmgw_core, pg_temp as $$
declare
    until timestamptz := clock_timestamp() + make_interval(secs => p_ttl_s);
begin
    if p_node is not null then
        insert into llmgw_core.node (id) values (p_node) on conflict do nothing;
    end if;
    delete from llmgw_core.enrolment where expires_at < clock_timestamp() or uses_left = 0;
    insert into llmgw_core.enrolment (token_hash, node_id, uses_left, expires_at, created_by)
        values (p_token_hash, p_node, p_uses, until, p_actor);
    perform llmgw_core.audited(p_actor, 'make enrolment token', coalesce('node ' || p_node, 'any new node'));
    return until;
end $$;
comment on function llmgw.node_enroll_v1(text, text, bytea, int, double precision) is 'Keeps the hash of an enrolment token, for one node or (null) for any new node; returns when it ends.';

create or replace function llmgw.node_revoke_v1(p_actor text, p_node text) returns void
language plpgsql security definer set search_path = llmgw_core, pg_temp as $$
begin
    update llmgw_core.node set secret_hash = null where id = p_node;
    if not found then
        raise exception 'there is no node %', p_node using errcode = 'LG005';
    end if;
    delete from llmgw_core.enrolment where node_id = p_node;
    perform llmgw_core.audited(p_actor, 'revoke', 'node ' || p_node);
end $$;
comment on function llmgw.node_revoke_v1(text, text) is 'The node''s agent is locked out from its next sync on; its replicas are replaced once it counts as lost.';

create or replace function llmgw_core.ask_log_v1(p_node text, p_shard bigint, p_lines int, p_offset bigint) returns bigint
language plpgsql security definer set search_path = llmgw_core, pg_temp as $$
declare
    number bigint;
begin
    delete from llmgw_core.ask where asked_at < clock_timestamp() - interval '10 min';
    if (select count(*) from llmgw_core.ask where node_id = p_node and answered_at is null) >= 20 then
        raise exception 'node % has 20 unanswered questions: its agent seems away', p_node using errcode = 'LG003';
    end if;
    insert into llmgw_core.ask (node_id, kind, shard_id, lines, from_offset) values (p_node, 'log', p_shard, p_lines, p_offset)
        returning id into number;
    return number;
exception when foreign_key_violation then
    raise exception 'there is no node %', p_node using errcode = 'LG005';
end $$;
comment on function llmgw_core.ask_log_v1(text, bigint, int, bigint) is 'Asks an agent for a log tail; the answer appears in llmgw_core.ask after its next sync.';

grant execute on function llmgw.set_node_intent(text, text, text, text), llmgw.cordon(text, text), llmgw.drain(text, text),
    llmgw.uncordon(text), llmgw.node_enroll_v1(text, text, bytea, int, double precision), llmgw.node_revoke_v1(text, text),
    llmgw_core.ask_log_v1(text, bigint, int, bigint) to llmgw_controller;
