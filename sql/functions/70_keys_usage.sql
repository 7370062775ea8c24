-- What clients used.

create or replace function llmgw_core.router_report_v1(p_router uuid, p_uses jsonb) returns void
language plpgsql security definer set search_path = llmgw_core, pg_temp as $$
begin
    insert into llmgw_core.router_use as u (router_id, replica_id, in_flight, last_used_at, reported_at)
        select p_router, r.replica_id, r.in_flight, clock_timestamp() - make_interval(secs => r.last_used_age_ms / 1000), clock_timestamp()
        from jsonb_to_recordset(p_uses) as r (replica_id bigint, in_flight int, last_used_age_ms double precision)
        where exists (select 1 from llmgw_core.replica x where x.id = r.replica_id)
        on conflict (router_id, replica_id) do update set in_flight = excluded.in_flight,
            last_used_at = coalesce(excluded.last_used_at, u.last_used_at), reported_at = excluded.reported_at;
    -- What it no longer tells of, it no longer runs: a replica that left its table in between must not count as busy for ever.
    update llmgw_core.router_use u set in_flight = 0, last_used_at = clock_timestamp(), reported_at = clock_timestamp()
        where u.router_id = p_router and u.in_flight > 0
            and not exists (select 1 from jsonb_to_recordset(p_uses) as r (replica_id bigint) where r.replica_id = u.replica_id);
    update llmgw_core.controller set seen_at = clock_timestamp() where id = p_router;
end $$;
comment on function llmgw_core.router_report_v1(uuid, jsonb) is 'What a router runs on each replica right now; on all others it runs nothing.';

create or replace function llmgw_core.partitions_keep_v1(p_ahead int) returns int
language plpgsql security definer set search_path = llmgw_core, pg_temp set timezone = 'UTC' set datestyle = 'ISO' as $$
declare
    t record;
    d date;
    part text;
    made int := 0;
begin
    if not pg_try_advisory_xact_lock(7720, 3) then
        return 0;  -- another controller is at it
    end if;
    for t in select * from (values ('decision', 'decision_days'), ('rejection', 'decision_days'), ('usage_event', 'usage_days'), ('usage_minute', 'usage_minute_days')) v (name, kept) loop
        for d in select generate_series((clock_timestamp() at time zone 'UTC')::date - 1, (clock_timestamp() at time zone 'UTC')::date + p_ahead, interval '1 day') loop
            part := format('%s_%s', t.name, to_char(d, 'YYYYMMDD'));
            if to_regclass('llmgw_core.' || part) is null then
                execute format('create table llmgw_core.%I partition of llmgw_core.%I for values from (%L) to (%L)',
                    part, t.name, d::text || ' 00:00+00', (d + 1)::text || ' 00:00+00');
                made := made + 1;
            end if;
        end loop;
        for part in select c.relname from pg_inherits i join pg_class c on c.oid = i.inhrelid
                where i.inhparent = ('llmgw_core.' || t.name)::regclass
                  and right(c.relname, 8)::date < (clock_timestamp() - make_interval(days => llmgw_core.setting(t.kept)::int))::date loop
            execute format('drop table llmgw_core.%I', part);
        end loop;
    end loop;
    return made;
end $$;
comment on function llmgw_core.partitions_keep_v1(int) is 'Makes daily partitions this many days ahead and drops those past retention. Returns how many were made.';

create or replace function llmgw_core.housekeep_v1(p_term bigint) returns int
language plpgsql security definer set search_path = llmgw_core, pg_temp as $$
begin
    perform llmgw_core.require_term('housekeeping', p_term);
    delete from llmgw_core.controller c where c.seen_at < clock_timestamp() - interval '1 hour' and not llmgw_core.present(c.id)
        and not exists (select 1 from llmgw_core.lease l where l.holder = c.id);
    delete from llmgw_core.router_use u where not exists (select 1 from llmgw_core.controller c where c.id = u.router_id)
        or exists (select 1 from llmgw_core.replica r where r.id = u.replica_id and r.state = 'gone');
    delete from llmgw_core.demand d where not exists (select 1 from llmgw_core.controller c where c.id = d.router_id)
        or not exists (select 1 from llmgw_core.model m where m.name = d.model);
    delete from llmgw_core.replica r where r.state = 'gone' and r.state_at < clock_timestamp() - llmgw_core.setting('decision_days') * interval '1 day';
    delete from llmgw_core.node_event where at < clock_timestamp() - llmgw_core.setting('event_days') * interval '1 day';
    delete from llmgw_core.catalog_seen s where s.seen_at < clock_timestamp() - interval '1 year'
        and s.digest is distinct from (llmgw_core.catalog_in_force()).digest
        and not exists (select 1 from llmgw_core.controller c where c.catalog_digest = s.digest);
    perform llmgw_core.scans_keep();
    perform llmgw_core.touched_keep();
    perform llmgw_core.responses_keep();
    perform llmgw_core.keys_keep();
    perform llmgw_core.logins_keep();
    perform llmgw_core.usage_keep();
    perform llmgw_core.allowances_keep();
    return llmgw_core.partitions_keep_v1(7);
end $$;
comment on function llmgw_core.housekeep_v1(bigint) is 'Removes what nobody needs any more and keeps partitions; idempotent, under the housekeeping term.';

grant execute on function llmgw_core.router_report_v1(uuid, jsonb), llmgw_core.housekeep_v1(bigint), llmgw_core.partitions_keep_v1(int) to llmgw_controller;
