-- Usage rows: priced, written once, summed up and charged in one transaction.

-- Without a fixed search_path, so that Postgres can inline it; its caller has one.
create or replace function llmgw_core.part_cost(p_tokens bigint, p_price bigint) returns numeric
language sql immutable parallel safe as $$
    select case when coalesce(p_tokens, 0) = 0 then 0 else p_tokens * p_price * 0.000001 end
$$;
comment on function llmgw_core.part_cost(bigint, bigint) is 'Exact micros for tokens at a price in micros per million; no tokens cost nothing whatever the price, some without a price are null.';

-- One expression without a query in it, so that Postgres can inline it: a call for each row would cost more than all else of a flush.
create or replace function llmgw_core.cost_of(p_status text, p_endpoint text, p_prompt_tokens bigint, p_cached_tokens bigint, p_completion_tokens bigint,
    p_prompt bigint, p_cached bigint, p_completion bigint) returns numeric
language sql immutable parallel safe as $$
    select case
        -- Nobody pays for a failure, nor for what no model was run for.
        when p_status = 'error' or p_endpoint in ('tokenize', 'detokenize', 'messages.count_tokens') then 0
        when p_prompt_tokens is null and p_completion_tokens is null then case when p_status = 'partial' then 0 end
        else llmgw_core.part_cost(p_prompt_tokens - least(coalesce(p_cached_tokens, 0), coalesce(p_prompt_tokens, 0)), p_prompt)
            + llmgw_core.part_cost(least(coalesce(p_cached_tokens, 0), coalesce(p_prompt_tokens, 0)), coalesce(p_cached, p_prompt))
            + llmgw_core.part_cost(p_completion_tokens, p_completion)
    end
$$;
comment on function llmgw_core.cost_of(text, text, bigint, bigint, bigint, bigint, bigint, bigint) is 'What a request costs at the prices of the model that served it, in force when it began, in exact micros; null when that is not known.';

create or replace function llmgw_core.usage_sum_up(p_rows llmgw_core.usage_event[]) returns void
language plpgsql security definer set search_path = llmgw_core, pg_temp set timezone = 'UTC' as $$
declare
    first_minute timestamptz := llmgw_core.first_partition('usage_minute');
begin
    -- One order for all routers, minutes before days: whoever flushes beside us waits, and nobody for each other.
    insert into llmgw_core.usage_minute as s
        select date_trunc('minute', r.at), r.key_id, r.model, r.org_id, r.team_id, r.user_id, count(*), count(*) filter (where r.status in ('error', 'partial')),
            coalesce(sum(r.prompt_tokens), 0), coalesce(sum(r.cached_tokens), 0), coalesce(sum(r.completion_tokens), 0), coalesce(sum(r.reasoning_tokens), 0),
            coalesce(sum(r.cost_micros), 0), count(*) filter (where r.unpriced), count(*) filter (where r.estimated), count(*) filter (where r.degraded), max(r.at)
        from unnest(p_rows) r where r.at >= first_minute group by 1, 2, 3, 4, 5, 6 order by 1, 2, 3, 4, 5, 6
        on conflict (minute, key_id, model, org_id, team_id, user_id) do update set requests = s.requests + excluded.requests, errors = s.errors + excluded.errors,
            prompt_tokens = s.prompt_tokens + excluded.prompt_tokens, cached_tokens = s.cached_tokens + excluded.cached_tokens,
            completion_tokens = s.completion_tokens + excluded.completion_tokens, reasoning_tokens = s.reasoning_tokens + excluded.reasoning_tokens,
            cost_micros = s.cost_micros + excluded.cost_micros, unpriced = s.unpriced + excluded.unpriced, estimated = s.estimated + excluded.estimated,
            degraded = s.degraded + excluded.degraded, last_at = greatest(s.last_at, excluded.last_at);
    insert into llmgw_core.usage_day as s
        select r.at::date, r.key_id, r.model, r.org_id, r.team_id, r.user_id, count(*), count(*) filter (where r.status in ('error', 'partial')),
            coalesce(sum(r.prompt_tokens), 0), coalesce(sum(r.cached_tokens), 0), coalesce(sum(r.completion_tokens), 0), coalesce(sum(r.reasoning_tokens), 0),
            coalesce(sum(r.cost_micros), 0), count(*) filter (where r.unpriced), count(*) filter (where r.estimated), count(*) filter (where r.degraded), max(r.at)
        from unnest(p_rows) r group by 1, 2, 3, 4, 5, 6 order by 1, 2, 3, 4, 5, 6
        on conflict (day, key_id, model, org_id, team_id, user_id) do update set requests = s.requests + excluded.requests, errors = s.errors + excluded.errors,
            prompt_tokens = s.prompt_tokens + excluded.prompt_tokens, cached_tokens = s.cached_tokens + excluded.cached_tokens,
            completion_tokens = s.completion_tokens + excluded.completion_tokens, reasoning_tokens = s.reasoning_tokens + excluded.reasoning_tokens,
            cost_micros = s.cost_micros + excluded.cost_micros, unpriced = s.unpriced + excluded.unpriced, estimated = s.estimated + excluded.estimated,
            degraded = s.degraded + excluded.degraded, last_at = greatest(s.last_at, excluded.last_at);
end $$;
comment on function llmgw_core.usage_sum_up(llmgw_core.usage_event[]) is 'Adds rows to the sums by minute and by day; called with each row once, by usage_write.';

create or replace function llmgw_core.first_partition(p_table text) returns timestamptz
language sql stable security definer set search_path = llmgw_core, pg_temp set timezone = 'UTC' as $$
    select min(to_timestamp(right(c.relname, 8), 'YYYYMMDD')) from pg_inherits i join pg_class c on c.oid = i.inhrelid
    where i.inhparent = ('llmgw_core.' || p_table)::regclass
$$;
comment on function llmgw_core.first_partition(text) is 'Begin of the oldest daily partition of a table that has them.';

create or replace function llmgw_core.usage_write(p_router uuid, p_rows llmgw_core.usage_event[], out written int, out unpriced int)
language plpgsql security definer set search_path = llmgw_core, pg_temp set timezone = 'UTC' as $$
declare
    first_day timestamptz := llmgw_core.first_partition('usage_event');
    last_day timestamptz;
    kept llmgw_core.usage_event[];
begin
    select max(to_timestamp(right(c.relname, 8), 'YYYYMMDD')) into last_day
        from pg_inherits i join pg_class c on c.oid = i.inhrelid where i.inhparent = 'llmgw_core.usage_event'::regclass;
    with inserted as (
        insert into llmgw_core.usage_event as u
            -- A time without a partition is a router's fault, not a reason to lose the row. Never the present time
            -- instead: a batch that comes again must find its own rows.
            select r.id, case when r.at < first_day then first_day when r.at >= last_day then date_trunc('day', clock_timestamp()) else r.at end,
                r.key_id, r.model_asked, r.model, r.replica_id, r.endpoint, r.status, r.http_status, r.error_code, r.stream,
                r.prompt_tokens, r.cached_tokens, r.completion_tokens, r.ttft_ms, r.total_ms, coalesce(r.attempts, 0), r.request_id,
                r.reasoning_tokens, coalesce(r.estimated, false), r.queue_ms, r.org_id, r.team_id, r.user_id,
                c.cost, c.cost is null, coalesce(r.degraded, false), nullif(k.tags, '{}'), r.upstream_id, r.tried
            from unnest(p_rows) r
            left join lateral (select p.prompt, p.cached, p.completion from llmgw_core.price p
                where p.model = r.model and p.since <= r.at - make_interval(secs => coalesce(r.total_ms, 0) / 1000)
                order by p.since desc limit 1) p on true
            cross join lateral (select llmgw_core.cost_of(r.status, r.endpoint, r.prompt_tokens, r.cached_tokens, r.completion_tokens,
                p.prompt, p.cached, p.completion) as cost offset 0) c
            left join llmgw_core.api_key k on k.id = r.key_id
            on conflict do nothing
            returning u as written)
    select array_agg(i.written), count(*), count(*) filter (where (i.written).unpriced) into kept, written, unpriced from inserted i;
    if written > 0 then
        perform llmgw_core.usage_sum_up(kept);
        perform llmgw_core.spend(p_router, kept);
    end if;
end $$;
comment on function llmgw_core.usage_write(uuid, llmgw_core.usage_event[]) is 'Prices and writes request rows, adds them to the sums and charges budgets; a repeated batch does nothing twice (at and id are the router''s). Returns how many were new, and how many of those have no price.';

create or replace function llmgw_core.usage_keep() returns void
language sql security definer set search_path = llmgw_core, pg_temp set timezone = 'UTC' as $$
    delete from llmgw_core.usage_day where day < current_date - llmgw_core.setting('usage_day_days')::int
$$;
comment on function llmgw_core.usage_keep() is 'Forgets sums of days that are past retention; those of minutes go with their partitions.';
