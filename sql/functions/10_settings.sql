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
    -- The admin API says whose address it was; anybody else is at the other end of this connection (none: a local socket).
    insert into llmgw_core.audit (actor, action, object, detail, source)
        values (p_actor, p_action, p_object, p_detail, coalesce(nullif(current_setting('llmgw.source', true), ''), host(inet_client_addr())))
$$;
comment on function llmgw_core.audited(text, text, text, jsonb) is 'Writes one row of who did what, and from where.';

create or replace function llmgw_core.check_setting() returns trigger
language plpgsql security definer set search_path = llmgw_core, pg_temp as $$
declare
    low double precision;
    high double precision;
begin
    if tg_op = 'DELETE' or tg_op = 'UPDATE' and new.name <> old.name then
        raise exception 'setting % is needed: give it another value instead', old.name using errcode = 'LG003';
    end if;
    select b.low, b.high into low, high from (values
        ('lease_ttl', 1, 3600), ('poll_busy', 10, 60000), ('poll_idle', 10, 60000), ('syncs_per_second', 1, 1e6),
        ('unreachable_after', 1, 1e9), ('lost_after', 1, 1e9), ('silent_share_max', 0, 1), ('concurrency', 0.01, 1e6), ('depth', 1, 1e6),
        ('budget_lease', 5, 86400), ('slot_lease', 5, 3600), ('start_deadline', 1, 1e9), ('load_stale', 1, 1e9), ('demand_stale', 1, 1e9),
        ('decision_days', 1, 36500), ('event_days', 1, 36500), ('usage_days', 1, 36500), ('usage_minute_days', 1, 36500), ('usage_day_days', 1, 36500),
        ('login_failures', 1, 1e6), ('login_window', 1, 1e6), ('session_ttl', 60, 1e8), ('session_idle', 60, 1e8)) b (name, low, high) where b.name = new.name;
    -- NaN is greater than every number here.
    if new.value not between coalesce(low, 0) and coalesce(high, 1e9) then
        raise exception 'setting % may not be %: it is from % to % %', new.name, new.value, coalesce(low, 0), coalesce(high, 1e9), new.unit
            using errcode = 'LG003';
    end if;
    return new;
end $$;
comment on function llmgw_core.check_setting() is 'Keeps settings within what statements can compute with: one odd number would stop every agent or every tick (LG003).';

create or replace trigger setting_sane before insert or update or delete on llmgw_core.setting
    for each row execute function llmgw_core.check_setting();
