-- What clients used.

create or replace function llmgw_core.usage_write(p_rows llmgw_core.usage_event[]) returns int
language plpgsql security definer set search_path = llmgw_core, pg_temp set timezone = 'UTC' as $$
declare
    written int;
    first_day timestamptz;
    last_day timestamptz;
begin
    select min(to_timestamp(right(c.relname, 8), 'YYYYMMDD')), max(to_timestamp(right(c.relname, 8), 'YYYYMMDD'))
        into first_day, last_day
        from pg_inherits i join pg_class c on c.oid = i.inhrelid where i.inhparent = 'llmgw_core.usage_event'::regclass;
    insert into llmgw_core.usage_event (id, at, key_id, model_asked, model, replica_id, endpoint, status, http_status, error_code,
            stream, prompt_tokens, cached_tokens, completion_tokens, ttft_ms, total_ms, attempts, request_id, reasoning_tokens,
            estimated, queue_ms)
        -- A time without a partition is a router's fault, not a reason to lose the row. Never the present time
        -- instead: a batch that comes again must find its own rows.
        select r.id, case when r.at < first_day then first_day when r.at >= last_day
                then date_trunc('day', clock_timestamp()) else r.at end,
            r.key_id, r.model_asked, r.model, r.replica_id, r.endpoint, r.status, r.http_status, r.error_code, r.stream,
            r.prompt_tokens, r.cached_tokens, r.completion_tokens, r.ttft_ms, r.total_ms, coalesce(r.attempts, 0), r.request_id,
            r.reasoning_tokens, coalesce(r.estimated, false), r.queue_ms
        from unnest(p_rows) r
        on conflict do nothing;
    get diagnostics written = row_count;
    return written;
end $$;
comment on function llmgw_core.usage_write(llmgw_core.usage_event[]) is 'Writes request rows; a repeated batch writes nothing twice (at and id are the router''s). Returns rows written.';

create or replace function llmgw_core.usage_flush_v1(p_rows jsonb) returns int
language sql security definer set search_path = llmgw_core, pg_temp as $$
    select llmgw_core.usage_write(array(
        select row(r.id, to_timestamp(r.at), r.key_id, r.model_asked, r.model, r.replica_id, r.endpoint, r.status, r.http_status, r.error_code,
            r.stream, r.prompt_tokens, r.cached_tokens, r.completion_tokens, r.ttft_ms, r.total_ms, r.attempts, r.request_id, null, null, null)::llmgw_core.usage_event
        from jsonb_to_recordset(p_rows) as r (id uuid, at double precision, key_id text, model_asked text, model text, replica_id bigint,
            endpoint text, status text, http_status int, error_code text, stream boolean, prompt_tokens bigint, cached_tokens bigint,
            completion_tokens bigint, ttft_ms double precision, total_ms double precision, attempts int, request_id text)))
$$;
comment on function llmgw_core.usage_flush_v1(jsonb) is 'Request rows as objects, from routers of the previous release. Returns rows written.';

create or replace function llmgw_core.usage_flush_v2(p_rows jsonb) returns int
language sql security definer set search_path = llmgw_core, pg_temp as $$
    select llmgw_core.usage_write(array(
        select row((r->>0)::uuid, to_timestamp((r->>1)::double precision), r->>2, r->>3, r->>4, (r->>5)::bigint, r->>6, r->>7, (r->>8)::int, r->>9,
            (r->>10)::boolean, (r->>11)::bigint, (r->>12)::bigint, (r->>13)::bigint, (r->>14)::double precision, (r->>15)::double precision,
            (r->>16)::int, r->>17, (r->>18)::bigint, (r->>19)::boolean, (r->>20)::double precision)::llmgw_core.usage_event
        from jsonb_array_elements(p_rows) r))
$$;
comment on function llmgw_core.usage_flush_v2(jsonb) is 'Request rows as lists of values in the order of the table''s columns: names cost the routers more than all else of a row. Returns rows written.';

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
    for t in select * from (values ('decision', 'decision_days'), ('rejection', 'decision_days'), ('usage_event', 'usage_days')) v (name, kept) loop
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
    return llmgw_core.partitions_keep_v1(7);
end $$;
comment on function llmgw_core.housekeep_v1(bigint) is 'Removes what nobody needs any more and keeps partitions; idempotent, under the housekeeping term.';

grant execute on function llmgw_core.usage_flush_v1(jsonb), llmgw_core.usage_flush_v2(jsonb), llmgw_core.router_report_v1(uuid, jsonb), llmgw_core.housekeep_v1(bigint), llmgw_core.partitions_keep_v1(int) to llmgw_controller;
