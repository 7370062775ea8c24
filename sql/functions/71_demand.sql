-- What clients ask for, told by routers; what replicas can do, told by who measured it.

create or replace function llmgw_core.router_report_v2(p_router uuid, p_uses jsonb, p_demand jsonb) returns void
language plpgsql security definer set search_path = llmgw_core, pg_temp as $$
declare
    at timestamptz := clock_timestamp();
    fresh timestamptz := at - llmgw_core.seconds('demand_stale');
    news boolean;
begin
    perform llmgw_core.router_report_v1(p_router, p_uses);
    select exists (
        select 1 from jsonb_to_recordset(p_demand) as t (model text, wanted_age_ms double precision)
        left join llmgw_core.demand d on d.router_id = p_router and d.model = t.model
        where t.wanted_age_ms is not null and at - make_interval(secs => t.wanted_age_ms / 1000) > fresh
            and (d.wanted_at is null or d.wanted_at < fresh)) into news;
    insert into llmgw_core.demand as d (router_id, model, waiting, in_flight, wanted_at, peak, peak_since, reported_at)
        select p_router, t.model, t.waiting, t.in_flight, at - make_interval(secs => t.wanted_age_ms / 1000), t.waiting + t.in_flight, at, at
        from jsonb_to_recordset(p_demand) as t (model text, waiting int, in_flight int, wanted_age_ms double precision)
        where exists (select 1 from llmgw_core.model m where m.name = t.model)
        on conflict (router_id, model) do update set waiting = excluded.waiting, in_flight = excluded.in_flight, wanted_at = excluded.wanted_at,
            -- Two buckets of a minute: together they hold the last minute whole, whenever one looks.
            peak = case when d.peak_since > at - interval '1 min' then greatest(d.peak, excluded.peak) else excluded.peak end,
            peak_before = case when d.peak_since > at - interval '1 min' then d.peak_before when d.peak_since > at - interval '2 min' then d.peak else 0 end,
            peak_since = case when d.peak_since > at - interval '1 min' then d.peak_since else at end,
            reported_at = at;
    update llmgw_core.demand d set waiting = 0, in_flight = 0, wanted_at = null, reported_at = at
        where d.router_id = p_router and (d.waiting > 0 or d.in_flight > 0 or d.wanted_at is not null)
            and not exists (select 1 from jsonb_to_recordset(p_demand) as t (model text) where t.model = d.model);
    if news then
        perform nextval('llmgw_core.change');  -- the leader looks four times a second: a wake does not wait for its clock
    end if;
end $$;
comment on function llmgw_core.router_report_v2(uuid, jsonb, jsonb) is 'What a router runs on each replica, and what it has waiting and running for each model; of models it does not name it has nothing. A newly wanted model is news to the leader.';

create or replace function llmgw_core.router_trips_v1(p_router uuid, p_trips jsonb) returns void
language plpgsql security definer set search_path = llmgw_core, pg_temp as $$
declare
    at timestamptz := clock_timestamp();
begin
    delete from llmgw_core.trip t where t.until < at;
    insert into llmgw_core.trip as t (replica_id, router_id, until, pause_s)
        select r.replica_id, p_router, at + make_interval(secs => r.left_s), r.pause_s
        from jsonb_to_recordset(p_trips) as r (replica_id bigint, left_s double precision, pause_s double precision)
        where exists (select 1 from llmgw_core.replica x where x.id = r.replica_id)
        order by r.replica_id  -- one order for all routers: they must not wait for each other in a circle
        on conflict (replica_id) do update set router_id = excluded.router_id, until = excluded.until, pause_s = excluded.pause_s
            where excluded.until > t.until;
end $$;
comment on function llmgw_core.router_trips_v1(uuid, jsonb) is 'Breakers of a router that are open, and for how many seconds more; those that are over are forgotten.';

create or replace function llmgw_core.router_trips_v2(p_router uuid, p_trips jsonb) returns void
language plpgsql security definer set search_path = llmgw_core, pg_temp as $$
declare
    at timestamptz := clock_timestamp();
begin
    perform llmgw_core.router_trips_v1(p_router, p_trips);  -- leaves out those without a replica
    delete from llmgw_core.endpoint_trip t where t.until < at;
    insert into llmgw_core.endpoint_trip as t (place, router_id, until, pause_s)
        select r.place, p_router, at + make_interval(secs => r.left_s), r.pause_s
        from jsonb_to_recordset(p_trips) as r (replica_id bigint, place text, left_s double precision, pause_s double precision)
        where r.replica_id is null
        order by r.place
        on conflict (place) do update set router_id = excluded.router_id, until = excluded.until, pause_s = excluded.pause_s
            where excluded.until > t.until;
end $$;
comment on function llmgw_core.router_trips_v2(uuid, jsonb) is 'Breakers of a router that are open, of replicas and of static endpoints (whose replica_id is null), and for how many seconds more; those that are over are forgotten.';

create or replace function llmgw.capacity_put_v1(p_actor text, p_model text, p_measured jsonb) returns jsonb
language plpgsql security definer set search_path = llmgw_core, pg_temp as $$
declare
    named text := p_measured->>'profile';
begin
    if not exists (select 1 from llmgw_core.model m where m.name = p_model) then
        raise exception '%', llmgw_core.no_model(p_model) using errcode = 'LG005', hint = 'select name from llmgw.models';
    elsif not exists (select 1 from llmgw_core.profile p where p.model = p_model and p.name = named) then
        raise exception 'model % has no profile %: it has %', p_model, coalesce(named, '(none named)'),
            (select string_agg(p.name, ', ' order by p.position) from llmgw_core.profile p where p.model = p_model) using errcode = 'LG003';
    end if;
    insert into llmgw_core.capacity as c (model, profile, node_class, engine, concurrency, requests_per_s, tokens_per_s, ttft_ms, itl_ms, slo, measured_by, replica)
        values (p_model, named, coalesce(p_measured->>'node_class', ''), p_measured->>'engine', (p_measured->>'concurrency')::double precision,
            (p_measured->>'requests_per_s')::double precision, (p_measured->>'tokens_per_s')::double precision,
            nullif(p_measured->'ttft_ms', 'null'), nullif(p_measured->'itl_ms', 'null'), nullif(p_measured->'slo', 'null'), p_actor, (p_measured->>'replica')::bigint)
        on conflict (model, profile, node_class) do update set engine = excluded.engine, concurrency = excluded.concurrency,
            requests_per_s = excluded.requests_per_s, tokens_per_s = excluded.tokens_per_s, ttft_ms = excluded.ttft_ms, itl_ms = excluded.itl_ms,
            slo = excluded.slo, measured_at = clock_timestamp(), measured_by = excluded.measured_by, replica = excluded.replica;
    perform llmgw_core.audited(p_actor, 'measure', 'model ' || p_model, p_measured);
    perform nextval('llmgw_core.change');
    return (select jsonb_strip_nulls(to_jsonb(v)) from llmgw.capacity v
        where v.model = p_model and v.profile = named and v.node_class is not distinct from p_measured->>'node_class');
end $$;
comment on function llmgw.capacity_put_v1(text, text, jsonb) is 'Keeps a measurement in place of an older one of the same profile and class of node. Answers what is kept. LG005: no such model; LG003: no such profile.';

grant execute on function llmgw_core.router_report_v2(uuid, jsonb, jsonb), llmgw_core.router_trips_v1(uuid, jsonb), llmgw_core.router_trips_v2(uuid, jsonb), llmgw.capacity_put_v1(text, text, jsonb) to llmgw_controller;
