-- Reports of what was used: from sums, never from single rows.

create or replace function llmgw_core.usage_span(p_since timestamptz, p_until timestamptz, out lo timestamptz, out hi timestamptz, out first_day timestamptz, out last_day timestamptz)
language plpgsql stable security definer set search_path = llmgw_core, pg_temp set timezone = 'UTC' as $$
declare
    kept timestamptz := llmgw_core.first_partition('usage_minute');
begin
    lo := date_trunc(case when p_since < kept then 'day' else 'minute' end, p_since);
    -- To the end of the minute or day that has begun: what is going on now belongs to it.
    hi := case when p_until is null or p_until >= clock_timestamp() then 'infinity'
        when p_until < kept then date_trunc('day', p_until + interval '1 day' - interval '1 microsecond')
        else date_trunc('minute', p_until + interval '1 minute' - interval '1 microsecond') end;
    first_day := case when lo = date_trunc('day', lo) then lo else date_trunc('day', lo) + interval '1 day' end;
    last_day := greatest(case when hi = 'infinity' then hi else date_trunc('day', hi) end, first_day);
    first_day := least(first_day, hi);
end $$;
comment on function llmgw_core.usage_span(timestamptz, timestamptz) is 'Where sums of a span come from: whole days from first_day to before last_day, minutes from lo to before first_day and from last_day to before hi. A span counts whole minutes (UTC), and whole days where sums of minutes are not kept any more; until null: until now.';

create or replace function llmgw_core.scope_told(p_scope text) returns bigint
language plpgsql stable security definer set search_path = llmgw_core, pg_temp as $$
begin
    if p_scope ~ '^[0-9]{1,18}$' and exists (select 1 from llmgw_core.scope where id = p_scope::bigint) then
        return p_scope::bigint;
    end if;
    return case when p_scope is not null then llmgw_core.scope_of(p_scope) end;
end $$;
comment on function llmgw_core.scope_told(text) is 'The scope of an id, deleted or not, or of a path; null for null, LG005 when there is none. For reports: what is deleted has a history.';

create or replace function llmgw_core.budgets_now() returns table (scope_id bigint, key_id text, micros bigint, period text, fraction numeric)
language plpgsql stable security definer set search_path = llmgw_core, pg_temp as $$
#variable_conflict use_column
begin
    return query select distinct on (b.scope_id, b.key_id) b.scope_id, b.key_id, b.micros, b.period, round(s.spent / b.micros, 6)
        from llmgw_core.budget b cross join lateral (select llmgw_core.budget_spent(b.id, b.period, b.zone, clock_timestamp()) as spent) s
        where b.deleted_at is null order by b.scope_id, b.key_id, s.spent / b.micros desc;
end $$;
comment on function llmgw_core.budgets_now() is 'Of each scope or key with budgets the one that is nearest to its end.';

create or replace function llmgw.usage_by(p_scope text, p_since timestamptz default clock_timestamp() - interval '24 hours', p_until timestamptz default null,
    p_within text default null)
returns table (scope text, id text, name text, keys bigint, requests bigint, prompt_tokens numeric, cached_tokens numeric, completion_tokens numeric,
    reasoning_tokens numeric, cost_micros numeric, errors bigint, unpriced bigint, estimated bigint, degraded bigint, last_at timestamptz,
    budget_micros bigint, budget_period text, fraction numeric)
language plpgsql stable security definer set search_path = llmgw_core, pg_temp as $$
#variable_conflict use_column
declare
    below bigint := llmgw_core.scope_told(p_within);
    span record;
begin
    if p_scope is null or p_scope not in ('org', 'team', 'user', 'key', 'model') then
        raise exception 'there is no use by %: it is told by org, team, user, key or model', coalesce(p_scope, 'nothing') using errcode = 'LG003';
    end if;
    if p_until <= p_since then
        raise exception 'a span from % until % holds no time: until is after since', p_since, p_until using errcode = 'LG003';
    end if;
    select * into span from llmgw_core.usage_span(p_since, p_until);
    return query
        with sums as (
            select d.key_id, d.model, d.org_id, d.team_id, d.user_id, d.requests, d.errors, d.prompt_tokens, d.cached_tokens, d.completion_tokens,
                d.reasoning_tokens, d.cost_micros, d.unpriced, d.estimated, d.degraded, d.last_at
            from llmgw_core.usage_day d
            where d.day >= (span.first_day at time zone 'UTC')::date and d.day < (span.last_day at time zone 'UTC')::date and span.first_day < span.hi
            union all
            select m.key_id, m.model, m.org_id, m.team_id, m.user_id, m.requests, m.errors, m.prompt_tokens, m.cached_tokens, m.completion_tokens,
                m.reasoning_tokens, m.cost_micros, m.unpriced, m.estimated, m.degraded, m.last_at
            from llmgw_core.usage_minute m where m.minute >= span.lo and m.minute < span.first_day
            union all
            select m.key_id, m.model, m.org_id, m.team_id, m.user_id, m.requests, m.errors, m.prompt_tokens, m.cached_tokens, m.completion_tokens,
                m.reasoning_tokens, m.cost_micros, m.unpriced, m.estimated, m.degraded, m.last_at
            from llmgw_core.usage_minute m where m.minute >= span.last_day and m.minute < span.hi),
        -- By key first: to count distinct ones of each group would sort all rows.
        by_key as (
            select case p_scope when 'org' then s.org_id::text when 'team' then s.team_id::text when 'user' then s.user_id::text
                    when 'key' then s.key_id else s.model end as id, s.key_id,
                sum(s.requests) as requests, sum(s.prompt_tokens) as prompt_tokens, sum(s.cached_tokens) as cached_tokens,
                sum(s.completion_tokens) as completion_tokens, sum(s.reasoning_tokens) as reasoning_tokens, sum(s.cost_micros) as cost_micros,
                sum(s.errors) as errors, sum(s.unpriced) as unpriced, sum(s.estimated) as estimated, sum(s.degraded) as degraded, max(s.last_at) as last_at
            from sums s where below is null or below in (s.org_id, s.team_id, s.user_id)
            group by 1, 2),
        used as (
            select coalesce(k.id, '-') as id, count(k.key_id) as keys, sum(k.requests)::bigint as requests, sum(k.prompt_tokens) as prompt_tokens,
                sum(k.cached_tokens) as cached_tokens, sum(k.completion_tokens) as completion_tokens, sum(k.reasoning_tokens) as reasoning_tokens,
                sum(k.cost_micros) as cost_micros, sum(k.errors)::bigint as errors, sum(k.unpriced)::bigint as unpriced,
                sum(k.estimated)::bigint as estimated, sum(k.degraded)::bigint as degraded, max(k.last_at) as last_at
            from by_key k group by 1)
        select p_scope, u.id, coalesce(l.path, k.name, case when u.id = '-' then 'no ' || p_scope else u.id end), u.keys, u.requests, u.prompt_tokens, u.cached_tokens,
            u.completion_tokens, u.reasoning_tokens, u.cost_micros, u.errors, u.unpriced, u.estimated, u.degraded, u.last_at, b.micros, b.period, b.fraction
        from used u
        left join llmgw_core.scope_line l on p_scope in ('org', 'team', 'user') and l.id::text = u.id
        left join llmgw_core.api_key k on p_scope = 'key' and k.id = u.id
        left join llmgw_core.budgets_now() b on b.scope_id = l.id or b.key_id = k.id
        order by u.cost_micros desc, u.requests desc, u.id;
end $$;
comment on function llmgw.usage_by(text, timestamptz, timestamptz, text) is 'What each org, team, user, key or model used in a span, dearest first; within: of this scope (id or path) only. Use of keys that are in no such scope is one row with the id -, so that rows add up. cost_micros is exact, of requests that have a price; unpriced tells how many have none. budget_micros, budget_period and fraction only where that very scope or key has a budget: the one nearest to its end, in its present period.';

grant execute on function llmgw.usage_by(text, timestamptz, timestamptz, text) to llmgw_controller, llmgw_read;
grant execute on function llmgw_core.scope_told(text) to llmgw_controller;
