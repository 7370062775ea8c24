-- What routers may use without asking: granted here, in portions, so that all together never pass a budget or a limit.

create or replace function llmgw_core.allow(p_router uuid, p_call bigint, p_kind text, p_object bigint, p_left numeric, p_routers bigint, p_hurry boolean,
    p_expires timestamptz, p_minute bigint, p_hold numeric, p_keep numeric, p_need numeric, p_least numeric, p_idle numeric,
    out amount numeric, out spare numeric, out busy numeric, out free numeric, out ahead numeric)
language plpgsql security definer set search_path = llmgw_core, pg_temp as $$
declare
    at timestamptz := clock_timestamp();
    others numeric;
    mine numeric;
    latest bigint;
    wanted numeric;
begin
    -- A router whose listening connection is gone is dead, unless it renews: after a restart of Postgres all listen anew.
    -- What it held of a budget stays its own for a while all the same: it may come back and settle what it used.
    delete from llmgw_core.allowance a where a.kind = p_kind and a.object_id = p_object
        and (a.expires_at < at or (p_kind = 'slots' and a.router_id <> p_router and a.renewed_at < at - interval '2 s'
             and not llmgw_core.present(a.router_id)));
    select coalesce(sum(a.amount) filter (where a.router_id <> p_router), 0),
        coalesce(sum(greatest(0, a.amount - a.hold)) filter (where a.router_id <> p_router), 0),
        coalesce(max(a.amount) filter (where a.router_id = p_router), 0), max(a.call) filter (where a.router_id = p_router)
        into others, spare, mine, latest
        from llmgw_core.allowance a where a.kind = p_kind and a.object_id = p_object;
    if latest >= p_call then
        return;  -- a later call of this router was here before: its answer counts
    end if;
    busy := others - spare;
    free := p_left - others - mine;
    -- Less than any of those that wait takes is of use to others only: in parts it would serve nobody.
    if mine + free < p_hold + p_least then
        p_need := 0;
    end if;
    -- Ahead of need at most a part of what is left, all routers together a quarter: near the end single requests.
    ahead := case when p_hurry then 0 else greatest(0, floor((p_left - others - p_hold - p_need) / (4 * greatest(p_routers, 1)))) end;
    -- Nothing is taken that it said it keeps: it uses that while we speak. It brings back what is more than ahead by its next call.
    wanted := p_hold + p_need + greatest(p_keep, least(p_idle, ahead));
    -- Where more is spent than allowed, as after a budget was lowered, only what runs keeps what it has.
    amount := greatest(least(p_hold + p_keep, mine), least(wanted, mine + free));
    free := p_left - others - amount;
    if amount = 0 and p_hold = 0 then
        delete from llmgw_core.allowance a where a.kind = p_kind and a.object_id = p_object and a.router_id = p_router;
    else
        insert into llmgw_core.allowance as a (kind, object_id, router_id, amount, hold, minute, call, renewed_at, expires_at)
            values (p_kind, p_object, p_router, amount, p_hold, p_minute, p_call, at, p_expires)
            on conflict (kind, object_id, router_id) do update set amount = excluded.amount, hold = excluded.hold, minute = excluded.minute,
                call = excluded.call, renewed_at = excluded.renewed_at, expires_at = excluded.expires_at;
    end if;
end $$;
comment on function llmgw_core.allow(uuid, bigint, text, bigint, numeric, bigint, boolean, timestamptz, bigint, numeric, numeric, numeric, numeric, numeric) is 'Sets what one router holds of one thing: what it uses (hold), what it keeps meanwhile (keep), what its requests wait for (need, of which one takes least or more) and something ahead (idle, at most ahead), never more than nobody holds. p_left is the whole less what is spent. The caller holds the row of the budget or limit.';

create or replace function llmgw_core.allow_money(p_router uuid, p_call bigint, p_routers bigint, p_id bigint, p_hold numeric, p_keep numeric, p_need numeric, p_least numeric, p_idle numeric)
returns jsonb language plpgsql security definer set search_path = llmgw_core, pg_temp as $$
declare
    at timestamptz := clock_timestamp();
    b llmgw_core.budget;
    spent numeric;
    got record;
begin
    select * into b from llmgw_core.budget where id = p_id and deleted_at is null;
    if not found then
        return null;
    end if;
    spent := llmgw_core.budget_spent(b.id, b.period, b.zone, at);
    got := llmgw_core.allow(p_router, p_call, 'money', b.id, b.micros - spent, p_routers, coalesce(b.short_until > at, false), at + llmgw_core.seconds('budget_lease'), 0,
        p_hold, p_keep, p_need, p_least, p_idle);
    if got.amount < p_hold + p_need and got.spare > 0 then
        update llmgw_core.budget set short_until = at + interval '2 s' where id = b.id and (short_until is null or short_until < at + interval '1 s');
    end if;
    return jsonb_build_array('money', b.id, floor(got.amount), floor(got.spare), floor(got.busy), floor(got.free), floor(got.ahead), b.micros, 0,
        llmgw_core.setting('budget_lease') / 2,
        extract(epoch from llmgw_core.budget_frees_at(b.id, b.period, b.zone, at) - at));
end $$;
comment on function llmgw_core.allow_money(uuid, bigint, bigint, bigint, numeric, numeric, numeric, numeric, numeric) is 'The answer of allowances_v1 for one budget; null when there is none of this id.';

create or replace function llmgw_core.allow_rate(p_router uuid, p_call bigint, p_routers bigint, p_kind text, p_id bigint, p_minute bigint,
    p_hold numeric, p_keep numeric, p_need numeric, p_least numeric, p_idle numeric)
returns jsonb language plpgsql security definer set search_path = llmgw_core, pg_temp as $$
declare
    at timestamptz := clock_timestamp();
    minute bigint := case when p_kind = 'slots' then 0 else floor(extract(epoch from at) / 60) end;
    ends timestamptz := case when p_kind = 'slots' then at + llmgw_core.seconds('slot_lease') else to_timestamp((minute + 1) * 60) end;
    l llmgw_core.rate_limit;
    bound bigint;
    got record;
begin
    select * into l from llmgw_core.rate_limit where id = p_id and deleted_at is null;
    bound := case p_kind when 'requests' then l.requests_per_min when 'tokens' then l.tokens_per_min when 'slots' then l.parallel end;
    if bound is null then
        return null;
    end if;
    -- What was used in another minute counts no more.
    got := llmgw_core.allow(p_router, p_call, p_kind, l.id, bound, p_routers, coalesce(l.short_until > at, false), ends, minute,
        case when minute in (0, p_minute) then p_hold else 0 end, case when minute in (0, p_minute) then p_keep else 0 end, p_need, p_least, p_idle);
    if got.amount < p_hold + p_need and got.spare > 0 then
        update llmgw_core.rate_limit set short_until = at + interval '2 s' where id = l.id and (short_until is null or short_until < at + interval '1 s');
    end if;
    return jsonb_build_array(p_kind, l.id, floor(got.amount), floor(got.spare), floor(got.busy), floor(got.free), floor(got.ahead), bound, minute,
        case when p_kind = 'slots' then llmgw_core.setting('slot_lease') / 2 else extract(epoch from ends - at) end, extract(epoch from ends - at));
end $$;
comment on function llmgw_core.allow_rate(uuid, bigint, bigint, text, bigint, bigint, numeric, numeric, numeric, numeric, numeric) is 'The answer of allowances_v1 for one kind of one limit; null when it has no such bound.';

create or replace function llmgw_core.allowances_v1(p_router uuid, p_call bigint, p_asks jsonb) returns jsonb
language plpgsql security definer set search_path = llmgw_core, pg_temp as $$
declare
    routers bigint := (select count(*) from llmgw_core.live_router);
    a record;
    one jsonb;
    answers jsonb := '[]';
begin
    -- All rows first, budgets by id and then limits by id: nobody waits in a circle.
    perform 1 from llmgw_core.budget where id in (select (x->>1)::bigint from jsonb_array_elements(p_asks) x where x->>0 = 'money') order by id for update;
    perform 1 from llmgw_core.rate_limit where id in (select (x->>1)::bigint from jsonb_array_elements(p_asks) x where x->>0 <> 'money') order by id for update;
    for a in select x->>0 as kind, (x->>1)::bigint as id, (x->>2)::bigint as minute, greatest(0, (x->>3)::numeric) as hold,
            greatest(0, (x->>4)::numeric) as keep, greatest(0, (x->>5)::numeric) as need, greatest(0, (x->>6)::numeric) as idle,
            coalesce((x->>7)::numeric, 0) as least from jsonb_array_elements(p_asks) x loop
        one := case when a.kind = 'money' then llmgw_core.allow_money(p_router, p_call, routers, a.id, a.hold, a.keep, a.need, a.least, a.idle)
            else llmgw_core.allow_rate(p_router, p_call, routers, a.kind, a.id, a.minute, a.hold, a.keep, a.need, a.least, a.idle) end;
        answers := answers || jsonb_build_array(coalesce(one, jsonb_build_array(a.kind, a.id)));
    end loop;
    return answers;
end $$;
comment on function llmgw_core.allowances_v1(uuid, bigint, jsonb) is 'What a router may use, for each [kind, id, minute, hold, keep, need, idle, least] it asks: [kind, id, amount, spare, busy, free, ahead, whole, minute, good for s, anew in s]. amount is all it may hold, hold included; spare is what others hold unused, busy what they use, free what nobody holds, ahead how much it may keep unused. Only [kind, id]: there is no such bound. Calls of a router are numbered; one that comes late changes nothing and has null amounts.';

create or replace function llmgw_core.allowances_keep() returns void
language sql security definer set search_path = llmgw_core, pg_temp as $$
    -- Those that a router's call is at are none of ours: it takes them in another order.
    delete from llmgw_core.allowance where (kind, object_id, router_id) in (select x.kind, x.object_id, x.router_id from llmgw_core.allowance x
        where x.expires_at < clock_timestamp() - interval '1 min' for update skip locked);
    delete from llmgw_core.budget_bucket b using llmgw_core.budget g where g.id = b.budget_id
        and b.starts_at < clock_timestamp() - case when g.zone is null then 2 * llmgw_core.span_of(g.period) else llmgw_core.setting('usage_days') * interval '1 day' end;
    delete from llmgw_core.budget_event where at < clock_timestamp() - llmgw_core.setting('usage_days') * interval '1 day';
$$;
comment on function llmgw_core.allowances_keep() is 'Forgets what silent routers held, and what was spent in periods long over.';

grant execute on function llmgw_core.allowances_v1(uuid, bigint, jsonb) to llmgw_controller;
