-- What people do to budgets and limits. A bound sits on a scope or on a key, and holds for all below it.

create or replace function llmgw_core.bound_at(p_scope text, p_key text) returns bigint
language plpgsql stable security definer set search_path = llmgw_core, pg_temp as $$
begin
    if num_nonnulls(p_scope, p_key) <> 1 then
        raise exception 'a budget or limit sits on a scope or on a key: name one of the two' using errcode = 'LG003';
    elsif p_key is not null and not exists (select 1 from llmgw_core.api_key where id = p_key and revoked_at is null) then
        raise exception 'there is no key %', p_key using errcode = 'LG005', hint = 'select id, name from llmgw.keys';
    end if;
    return case when p_scope is not null then llmgw_core.scope_of(p_scope) end;
end $$;
comment on function llmgw_core.bound_at(text, text) is 'The scope that a bound sits on, by its id or path; null for a bound on a key. Refuses what is not there.';

create or replace function llmgw_core.period_known(p_period text, p_zone text) returns text
language plpgsql stable set search_path = llmgw_core, pg_temp as $$
begin
    if p_period in ('day', 'week', 'month') then
        if not exists (select 1 from pg_timezone_names where name = coalesce(p_zone, 'UTC')) then
            raise exception 'there is no time zone %', p_zone using errcode = 'LG003', hint = 'Write it as Europe/Berlin: select name from pg_timezone_names';
        end if;
        return coalesce(p_zone, 'UTC');
    elsif p_period in ('24h', '7d', '30d') then
        if p_zone is not null then
            raise exception 'a period of % rolls: it begins at no midnight, so a time zone would say nothing', p_period using errcode = 'LG003',
                hint = 'Leave the zone out, or take day, week or month.';
        end if;
        return null;
    end if;
    raise exception 'there is no period %: it is day, week or month (from midnight in the budget''s time zone) or 24h, 7d or 30d (rolling)', p_period
        using errcode = 'LG003';
end $$;
comment on function llmgw_core.period_known(text, text) is 'The zone of a period (UTC unless told); refuses other words, and a zone that would change nothing.';

create or replace function llmgw_core.zone_moved(p_was llmgw_core.budget, p_zone text) returns void
language plpgsql security definer set search_path = llmgw_core, pg_temp as $$
declare
    at timestamptz := clock_timestamp();
    since timestamptz := llmgw_core.period_from(p_was.period, p_was.zone, at);
    begins timestamptz := llmgw_core.period_from(p_was.period, p_zone, at);
    spent numeric := llmgw_core.budget_spent(p_was.id, p_was.period, p_was.zone, at);
begin
    delete from llmgw_core.budget_bucket where budget_id = p_was.id and starts_at >= least(since, begins);
    insert into llmgw_core.budget_bucket (budget_id, starts_at, spent) values (p_was.id, begins, spent);
end $$;
comment on function llmgw_core.zone_moved(llmgw_core.budget, text) is 'What is spent in the present period stays spent, though it began at another moment now. The caller holds the budget''s row.';

create or replace function llmgw.budget_put_v1(p_actor text, p_scope text, p_key text, p_micros bigint, p_period text, p_zone text, p_warn numeric[])
returns bigint language plpgsql security definer set search_path = llmgw_core, pg_temp as $$
declare
    on_scope bigint := llmgw_core.bound_at(p_scope, p_key);
    in_zone text := llmgw_core.period_known(p_period, p_zone);
    thresholds numeric[] := coalesce(p_warn, '{0.8,1}');
    was llmgw_core.budget;
    put bigint;
begin
    if p_micros is null or p_micros not between 1 and 1000000000000000 then
        raise exception 'a budget of % micros: it is from 1 to 10^15; revoke keys to allow nothing', coalesce(p_micros::text, 'unknown') using errcode = 'LG003';
    elsif cardinality(thresholds) > 10 or exists (select 1 from unnest(thresholds) t where t is null or t <= 0 or t > 1 or t = 'NaN') then
        raise exception 'warnings are up to ten fractions above 0 and up to 1, not %', thresholds using errcode = 'LG003';
    end if;
    select * into was from llmgw_core.budget b where (b.scope_id = on_scope or b.key_id = p_key) and b.period = p_period and b.deleted_at is null for update;
    if found then
        if was.zone is distinct from in_zone then
            perform llmgw_core.zone_moved(was, in_zone);
        end if;
        update llmgw_core.budget set micros = p_micros, zone = in_zone, warn = thresholds, changed = pg_current_xact_id() where id = was.id returning id into put;
    else
        insert into llmgw_core.budget (scope_id, key_id, micros, period, zone, warn, created_by)
            values (on_scope, p_key, p_micros, p_period, in_zone, thresholds, p_actor) returning id into put;
    end if;
    perform llmgw_core.audited(p_actor, 'set', 'budget ' || put, jsonb_strip_nulls(jsonb_build_object('scope', on_scope, 'key', p_key, 'micros', p_micros,
        'period', p_period, 'zone', in_zone, 'warn', thresholds, 'was', was.micros)));
    perform llmgw_core.notify('keys');
    return put;
end $$;
comment on function llmgw.budget_put_v1(text, text, text, bigint, text, text, numeric[]) is 'Sets what a scope or key may spend in a period, from now on: a new budget begins with nothing spent, a changed one keeps what is. Returns its id.';

create or replace function llmgw.limit_put_v1(p_actor text, p_scope text, p_key text, p_model text, p_requests bigint, p_tokens bigint, p_parallel bigint)
returns bigint language plpgsql security definer set search_path = llmgw_core, pg_temp as $$
declare
    on_scope bigint := llmgw_core.bound_at(p_scope, p_key);
    of_model text := (select n.model from llmgw_core.model_name n where n.name = p_model);
    put bigint;
begin
    if p_model is not null and of_model is null then
        raise exception '%', llmgw_core.no_model(p_model) using errcode = 'LG003', hint = 'select name from llmgw.models';
    elsif num_nonnulls(p_requests, p_tokens, p_parallel) = 0 then
        raise exception 'a limit bounds requests or tokens per minute or parallel requests: give one of them' using errcode = 'LG003';
    elsif p_requests not between 1 and 1000000000 or p_tokens not between 1 and 1000000000000 or p_parallel not between 1 and 1000000 then
        raise exception 'limits are whole numbers from 1 to 10^9 requests, 10^12 tokens and 10^6 parallel requests' using errcode = 'LG003';
    end if;
    update llmgw_core.rate_limit set requests_per_min = p_requests, tokens_per_min = p_tokens, parallel = p_parallel, changed = pg_current_xact_id()
        where (scope_id = on_scope or key_id = p_key) and model is not distinct from of_model and deleted_at is null returning id into put;
    if not found then
        insert into llmgw_core.rate_limit (scope_id, key_id, model, requests_per_min, tokens_per_min, parallel, created_by)
            values (on_scope, p_key, of_model, p_requests, p_tokens, p_parallel, p_actor) returning id into put;
    end if;
    perform llmgw_core.audited(p_actor, 'set', 'limit ' || put, jsonb_strip_nulls(jsonb_build_object('scope', on_scope, 'key', p_key, 'model', of_model,
        'requests_per_min', p_requests, 'tokens_per_min', p_tokens, 'parallel', p_parallel)));
    perform llmgw_core.notify('keys');
    return put;
end $$;
comment on function llmgw.limit_put_v1(text, text, text, text, bigint, bigint, bigint) is 'Sets what a scope or key may ask for, of one model (an alias is resolved) or of all together; null is without bound. Returns the limit''s id.';

create or replace function llmgw.budget_remove_v1(p_actor text, p_id bigint) returns void
language plpgsql security definer set search_path = llmgw_core, pg_temp as $$
begin
    update llmgw_core.budget set deleted_at = clock_timestamp(), changed = pg_current_xact_id() where id = p_id and deleted_at is null;
    if not found then
        raise exception 'there is no budget %', p_id using errcode = 'LG005', hint = 'select id from llmgw.budgets';
    end if;
    perform llmgw_core.audited(p_actor, 'remove', 'budget ' || p_id);
    perform llmgw_core.notify('keys');
end $$;
comment on function llmgw.budget_remove_v1(text, bigint) is 'Spending is bounded by this budget no more; what was spent of it is kept.';

create or replace function llmgw.limit_remove_v1(p_actor text, p_id bigint) returns void
language plpgsql security definer set search_path = llmgw_core, pg_temp as $$
begin
    update llmgw_core.rate_limit set deleted_at = clock_timestamp(), changed = pg_current_xact_id() where id = p_id and deleted_at is null;
    if not found then
        raise exception 'there is no limit %', p_id using errcode = 'LG005', hint = 'select id from llmgw.limits';
    end if;
    perform llmgw_core.audited(p_actor, 'remove', 'limit ' || p_id);
    perform llmgw_core.notify('keys');
end $$;
comment on function llmgw.limit_remove_v1(text, bigint) is 'The limit holds no more.';

grant execute on function llmgw.budget_put_v1(text, text, text, bigint, text, text, numeric[]), llmgw.budget_remove_v1(text, bigint),
    llmgw.limit_put_v1(text, text, text, text, bigint, bigint, bigint), llmgw.limit_remove_v1(text, bigint) to llmgw_controller;
