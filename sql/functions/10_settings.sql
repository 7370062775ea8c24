create or replace function llmgw_core.setting(p_name text) returns double precision
language sql stable parallel safe security definer set search_path = llmgw_core, pg_temp as $$
    select value from llmgw_core.setting where name = p_name
$$;
comment on function llmgw_core.setting(text) is 'Value of a setting in its unit; null when there is none of that name.';

create or replace function llmgw_core.seconds(p_name text) returns interval
language sql stable parallel safe security definer set search_path = llmgw_core, pg_temp as $$
    select make_interval(secs => value) from llmgw_core.setting where name = p_name
$$;
comment on function llmgw_core.seconds(text) is 'A setting in seconds as an interval.';

-- Without a fixed search_path, so that Postgres can inline them; their callers have one.
create or replace function llmgw_core.number_of(p_value jsonb) returns double precision
language sql immutable parallel safe as $$
    select case jsonb_typeof(p_value) when 'number' then case when abs(p_value::numeric) < 1e15 then p_value::double precision end end
$$;
comment on function llmgw_core.number_of(jsonb) is 'A reported number; null for anything else, so that one odd field is unknown and costs nothing more (E01).';

create or replace function llmgw_core.list_or_empty(p_value jsonb) returns jsonb
language sql immutable parallel safe as $$ select case jsonb_typeof(p_value) when 'array' then p_value else '[]' end $$;
comment on function llmgw_core.list_or_empty(jsonb) is 'The value when it is a list, else an empty one.';

create or replace function llmgw_core.notify(p_topic text) returns void
language plpgsql set search_path = llmgw_core, pg_temp as $$
begin
    -- Topics only, never row content: equal payloads of one transaction merge, and 8000 bytes cannot be reached (F10).
    perform pg_notify('llmgw', p_topic);
end $$;
comment on function llmgw_core.notify(text) is 'Hints to controllers that something of this topic changed (models, plan, keys, nodes).';

create or replace function llmgw_core.audited(p_actor text, p_action text, p_object text, p_detail jsonb default null) returns void
language sql set search_path = llmgw_core, pg_temp as $$
    insert into llmgw_core.audit (actor, action, object, detail) values (p_actor, p_action, p_object, p_detail)
$$;
comment on function llmgw_core.audited(text, text, text, jsonb) is 'Writes one row of who did what.';
