-- A rolling restart that an operator asks for, as when profiles were edited. The leader's tick does the rest.

create or replace function llmgw.replace_v1(p_actor text, p_model text, p_replica bigint, p_force boolean default false,
    p_stale boolean default false, p_cancel boolean default false)
returns jsonb language plpgsql security definer set search_path = llmgw_core, pg_temp as $$
declare
    r llmgw_core.replica;
    chosen bigint[];
begin
    if p_replica is not null then
        select * into r from llmgw_core.replica where id = p_replica and state <> 'gone';
        if r.id is null then
            raise exception 'there is no replica %, or it is gone', p_replica using errcode = 'LG005', hint = 'select id, model from llmgw.replicas';
        elsif r.state not in ('starting', 'ready') and not p_cancel then
            raise exception 'replica % of % is %: %', r.id, r.model, r.state,
                case when r.state in ('draining', 'stopping') then 'it is leaving already'
                     else 'nothing of it runs, and it starts by the profile as it is now' end using errcode = 'LG003';
        end if;
    elsif not exists (select 1 from llmgw_core.model where name = p_model)
            and not exists (select 1 from llmgw_core.replica where model = p_model and state <> 'gone') then
        raise exception '%', llmgw_core.no_model(p_model) using errcode = 'LG005', hint = 'select name from llmgw.models';
    end if;
    select array_agg(x.id order by x.id) into chosen from (
        select c.id from llmgw_core.replica c
        left join llmgw_core.profile p on p.model = c.model and p.name = c.profile
        where (c.id = p_replica or p_replica is null and c.model = p_model)
          and case when p_cancel then c.replace_asked is not null and c.state in ('starting', 'ready', 'failed', 'pending')
                   else c.state in ('starting', 'ready') and (not p_stale or p.fingerprint is distinct from c.fingerprint) end
        order by c.id for no key update of c) x;
    update llmgw_core.replica set replace_asked = case when not p_cancel then clock_timestamp() end,
        replace_actor = case when not p_cancel then p_actor end, replace_force = p_force and not p_cancel
        where id = any (chosen);
    perform llmgw_core.audited(p_actor, case when p_cancel then 'cancel replace' else 'replace' end,
        case when p_replica is null then 'model ' || p_model else 'replica ' || p_replica end,
        jsonb_build_object('replicas', coalesce(to_jsonb(chosen), '[]'), 'force', p_force, 'stale', p_stale));
    perform nextval('llmgw_core.change');
    perform llmgw_core.notify('plan');
    return jsonb_build_object('model', coalesce(r.model, p_model), 'replicas', coalesce(to_jsonb(chosen), '[]'), 'force', p_force, 'cancelled', p_cancel);
end $$;
comment on function llmgw.replace_v1(text, text, bigint, boolean, boolean, boolean) is 'Marks a replica, or those of a model (p_stale: only those whose profile was edited since), to be replaced: each by another that is ready first, one at a time; p_force lets one stop first where there is no room for both; p_cancel takes the mark back. Returns who is marked.';

create or replace function llmgw.replace(p_model text) returns jsonb
language sql security definer set search_path = llmgw_core, pg_temp as $$ select llmgw.replace_v1(session_user, p_model, null) $$;
comment on function llmgw.replace(text) is 'Replaces all replicas of a model, one at a time, each by another that is ready first.';

grant execute on function llmgw.replace_v1(text, text, bigint, boolean, boolean, boolean), llmgw.replace(text) to llmgw_controller;
