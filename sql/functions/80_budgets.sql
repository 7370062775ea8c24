-- Periods of budgets, and what is spent of them.

create or replace function llmgw_core.day_start(p_local timestamp, p_zone text) returns timestamptz
language sql stable set search_path = llmgw_core, pg_temp as $$
    -- A midnight that comes twice (clocks go back over it) begins with the first, one that does not come with what follows it.
    select min(x.c - s) from (select p_local at time zone p_zone as c) x, unnest('{0,30min,1h,2h}'::interval[]) s
    where (x.c - s) at time zone p_zone >= p_local
$$;
comment on function llmgw_core.day_start(timestamp, text) is 'The first moment at which clocks in a zone show this or more.';

create or replace function llmgw_core.slice_of(p_period text) returns interval
language sql immutable parallel safe as $$
    select case p_period when '24h' then interval '10 min' when '7d' then interval '1 h' when '30d' then interval '6 h' end
$$;
comment on function llmgw_core.slice_of(text) is 'In what slices a rolling period is counted; null for those of the calendar.';

create or replace function llmgw_core.span_of(p_period text) returns interval
language sql immutable parallel safe as $$
    -- Lengths, whatever a zone makes of its days.
    select case p_period when '24h' then interval '24 h' when '7d' then interval '168 h' when '30d' then interval '720 h' end
$$;
comment on function llmgw_core.span_of(text) is 'How long a rolling period is; null for those of the calendar.';

create or replace function llmgw_core.bucket_start(p_period text, p_zone text, p_at timestamptz) returns timestamptz
language plpgsql stable set search_path = llmgw_core, pg_temp as $$
begin
    if p_zone is null then
        return date_bin(llmgw_core.slice_of(p_period), p_at, 'epoch');
    end if;
    return llmgw_core.day_start(date_trunc(p_period, p_at at time zone p_zone), p_zone);
exception
    -- A zone that the system's tables have no more: money is counted all the same.
    when invalid_parameter_value then return date_trunc(p_period, p_at, 'UTC');
end $$;
comment on function llmgw_core.bucket_start(text, text, timestamptz) is 'Start of the row of budget_bucket that a moment belongs to. Weeks begin on Monday.';

create or replace function llmgw_core.period_from(p_period text, p_zone text, p_at timestamptz) returns timestamptz
language sql stable set search_path = llmgw_core, pg_temp as $$
    -- The slice that is half in counts whole.
    select llmgw_core.bucket_start(p_period, p_zone, p_at - coalesce(llmgw_core.span_of(p_period), '0'))
$$;
comment on function llmgw_core.period_from(text, text, timestamptz) is 'What was spent from here on counts at a moment.';

create or replace function llmgw_core.period_ends(p_period text, p_zone text, p_at timestamptz) returns timestamptz
language plpgsql stable set search_path = llmgw_core, pg_temp as $$
begin
    if p_zone is null then
        return null;
    end if;
    return llmgw_core.day_start(date_trunc(p_period, p_at at time zone p_zone) + ('1 ' || p_period)::interval, p_zone);
exception
    when invalid_parameter_value then return date_trunc(p_period, p_at, 'UTC') + ('1 ' || p_period)::interval;
end $$;
comment on function llmgw_core.period_ends(text, text, timestamptz) is 'When a calendar period begins anew; null for rolling ones, which have no such moment.';

create or replace function llmgw_core.budget_spent(p_id bigint, p_period text, p_zone text, p_at timestamptz) returns numeric
language sql stable security definer set search_path = llmgw_core, pg_temp as $$
    select coalesce(sum(b.spent), 0) from llmgw_core.budget_bucket b
    where b.budget_id = p_id and b.starts_at >= (select llmgw_core.period_from(p_period, p_zone, p_at))
$$;
comment on function llmgw_core.budget_spent(bigint, text, text, timestamptz) is 'What counts as spent of a budget at a moment, in micros.';

create or replace function llmgw_core.budget_frees_at(p_id bigint, p_period text, p_zone text, p_at timestamptz) returns timestamptz
language sql stable security definer set search_path = llmgw_core, pg_temp as $$
    select coalesce(llmgw_core.period_ends(p_period, p_zone, p_at), (
        select min(b.starts_at) + llmgw_core.slice_of(p_period) + llmgw_core.span_of(p_period)
        from llmgw_core.budget_bucket b where b.budget_id = p_id and b.spent > 0
            and b.starts_at >= (select llmgw_core.period_from(p_period, p_zone, p_at))))
$$;
comment on function llmgw_core.budget_frees_at(bigint, text, text, timestamptz) is 'When the next money comes free: all at the end of a calendar period, of a rolling one the oldest slice; null when nothing is spent of a rolling one.';

create or replace function llmgw_core.warn_of(p_budgets bigint[]) returns void
language sql security definer set search_path = llmgw_core, pg_temp as $$
    insert into llmgw_core.budget_event (budget_id, threshold, spent, micros)
    select b.id, w.threshold, s.spent, b.micros
    from llmgw_core.budget b
    cross join lateral (select llmgw_core.budget_spent(b.id, b.period, b.zone, clock_timestamp()) as spent,
        llmgw_core.period_from(b.period, b.zone, clock_timestamp()) as since) s
    cross join unnest(b.warn) w (threshold)
    where b.id = any (p_budgets) and s.spent >= w.threshold * b.micros
        and not exists (select 1 from llmgw_core.budget_event e where e.budget_id = b.id and e.threshold = w.threshold and e.at >= s.since)
    order by b.id, w.threshold
$$;
comment on function llmgw_core.warn_of(bigint[]) is 'Writes an event for each threshold that was passed and not told of in this period. The caller holds the budgets'' rows.';

create or replace function llmgw_core.spend(p_router uuid, p_rows llmgw_core.usage_event[]) returns void
language plpgsql security definer set search_path = llmgw_core, pg_temp as $$
declare
    costs jsonb;
    ids bigint[];
begin
    if not exists (select 1 from llmgw_core.budget where deleted_at is null) then
        return;
    end if;
    -- Few groups of many rows; no zone's midnight lies within five minutes.
    with used as (
        select r.key_id, array[r.org_id, r.team_id, r.user_id] as scopes, date_bin('5 min', r.at, 'epoch') as at, sum(r.cost_micros) as micros
        from unnest(p_rows) r where r.cost_micros > 0 group by 1, 2, 3),
    charged as (
        select b.id, llmgw_core.bucket_start(b.period, b.zone, u.at) as starts_at, sum(u.micros) as micros
        from used u
        join lateral (
            select x.id, x.period, x.zone from llmgw_core.budget x where x.key_id = u.key_id and x.deleted_at is null
            union all
            select x.id, x.period, x.zone from llmgw_core.budget x where x.scope_id = any (u.scopes) and x.deleted_at is null) b on true
        group by 1, 2)
    select jsonb_agg(jsonb_build_array(c.id, c.starts_at, c.micros)), array_agg(distinct c.id order by c.id) into costs, ids from charged c;
    if ids is null then
        return;
    end if;
    -- The same rows in the same order as allowances_v1: nobody sees what is spent before it has left what is held.
    perform 1 from llmgw_core.budget where id = any (ids) order by id for update;
    insert into llmgw_core.budget_bucket as b (budget_id, starts_at, spent)
        select (c->>0)::bigint, (c->>1)::timestamptz, (c->>2)::numeric from jsonb_array_elements(costs) c order by 1, 2
        on conflict (budget_id, starts_at) do update set spent = b.spent + excluded.spent;
    update llmgw_core.allowance a set amount = greatest(0, a.amount - c.micros), hold = greatest(0, a.hold - c.micros)
        from (select (c->>0)::bigint as id, sum((c->>2)::numeric) as micros from jsonb_array_elements(costs) c group by 1) c
        where a.kind = 'money' and a.object_id = c.id and a.router_id = p_router;
    perform llmgw_core.warn_of(ids);
end $$;
comment on function llmgw_core.spend(uuid, llmgw_core.usage_event[]) is 'Charges new usage rows to every budget above their keys, by the rows'' own times, and takes it from what their router holds. Part of a flush''s transaction.';
