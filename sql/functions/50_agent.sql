-- The agents' door. Every function finds the node by its token and touches rows of that node only.

create or replace function llmgw_core.node_of(p_token text) returns text
language plpgsql stable security definer set search_path = llmgw_core, pg_temp as $$
declare
    me text;
begin
    select id into me from llmgw_core.node where secret_hash = sha256(convert_to(p_token, 'utf8'));
    if me is null then
        raise exception 'no node has this token' using errcode = 'LG004',
            hint = 'The node was revoked or never enrolled here: llmgwctl node enroll NODE, then start the agent with the new enrolment token.';
    end if;
    return me;
end $$;
comment on function llmgw_core.node_of(text) is 'The node whose secret this is; LG004 when none.';

create or replace function llmgw_core.list_of(p_doc jsonb, p_most int, p_what text) returns setof jsonb
language plpgsql immutable set search_path = llmgw_core, pg_temp as $$
begin
    if jsonb_typeof(p_doc) is distinct from 'array' or jsonb_array_length(p_doc) > p_most or pg_column_size(p_doc) > 1048576 then
        raise exception 'the list of % is not an array of at most % items and 1 MiB', p_what, p_most using errcode = 'LG003';
    end if;
    return query select * from jsonb_array_elements(p_doc);
end $$;
comment on function llmgw_core.list_of(jsonb, int, text) is 'Elements of a reported list within its caps; LG003 beyond them.';

create or replace function llmgw_core.strings_of(p_doc jsonb) returns text[]
language sql immutable set search_path = llmgw_core, pg_temp as $$
    select case jsonb_typeof(p_doc) when 'array' then array(select left(e, 500) from jsonb_array_elements_text(p_doc) e limit 2000) end
$$;
comment on function llmgw_core.strings_of(jsonb) is 'A JSON list of strings as an array; null for anything else.';

create or replace function agent.enroll(p_token text, p_node text, p_secret text) returns text
language plpgsql security definer set search_path = llmgw_core, pg_temp as $$
declare
    e llmgw_core.enrolment;
begin
    select * into e from llmgw_core.enrolment where token_hash = sha256(convert_to(p_token, 'utf8')) for update;
    if e.token_hash is null or e.uses_left < 1 or e.expires_at < clock_timestamp() or (e.node_id is not null and e.node_id <> p_node) then
        raise exception 'this enrolment token does not admit node %: it is unknown, used, expired or for another node', p_node
            using errcode = 'LG004', hint = 'Make a new one: llmgwctl node enroll ' || p_node;
    end if;
    if coalesce(length(p_secret), 0) < 32 then
        raise exception 'the secret of node % is shorter than 32 characters', p_node using errcode = 'LG003';
    end if;
    if e.node_id is null and exists (select 1 from llmgw_core.node where id = p_node and enrolled_at is not null) then
        raise exception 'node % has been enrolled before and this token only admits new nodes', p_node
            using errcode = 'LG004', hint = 'Give the node its own token: llmgwctl node enroll ' || p_node;
    end if;
    update llmgw_core.enrolment set uses_left = uses_left - 1 where token_hash = e.token_hash;
    insert into llmgw_core.node as n (id, secret_hash, enrolled_at) values (p_node, sha256(convert_to(p_secret, 'utf8')), clock_timestamp())
        on conflict (id) do update set secret_hash = excluded.secret_hash, enrolled_at = excluded.enrolled_at;
    perform llmgw_core.audited('node ' || p_node, 'enroll', 'node ' || p_node);
    return p_node;
end $$;
comment on function agent.enroll(text, text, text) is 'Exchanges an enrolment token for a node''s own secret, which the agent made; only hashes are kept.';

-- Those of versions that wrote use and progress whenever they moved.
drop function if exists llmgw_core.sync_shard(text, jsonb), llmgw_core.sync_shards(text, jsonb);

create or replace function llmgw_core.sync_shard(p_node text, p_report jsonb, p_due boolean) returns boolean
language plpgsql security definer set search_path = llmgw_core, pg_temp as $$
declare
    s llmgw_core.shard;
    said text := p_report->>'state';
    number bigint := (p_report->>'shard')::bigint;
    -- Only what views compute with: an odd word in here would break them for the whole fleet.
    progress jsonb := case jsonb_typeof(p_report->'fetch') when 'object' then jsonb_strip_nulls(jsonb_build_object(
        'source', left(p_report->'fetch'->>'source', 1000), 'bytes_done', llmgw_core.number_of(p_report->'fetch'->'bytes_done')::bigint,
        'bytes_total', llmgw_core.number_of(p_report->'fetch'->'bytes_total')::bigint)) end;
    said_error text := left(p_report->>'error', 2000);
    cores real := llmgw_core.number_of(p_report->'cpu_cores')::real;
    memory bigint := llmgw_core.number_of(p_report->'memory_bytes')::bigint;
begin
    select * into s from llmgw_core.shard where id = number and node_id = p_node;
    if s.id is null or s.state in ('stopped', 'failed') then
        return false;  -- not this node's, or over: a late word changes nothing
    end if;
    if said = s.state and (p_report->>'pid')::int is not distinct from s.pid
        and progress - 'bytes_done' is not distinct from s.fetching - 'bytes_done' and said_error is not distinct from s.error
        and (memory is null) = (s.memory_bytes is null) and (cores is null) = (s.cpu_cores is null)
        -- What moves by itself waits for its minute, but for each percent of a download.
        and coalesce(100 * abs((progress->>'bytes_done')::numeric - (s.fetching->>'bytes_done')::numeric) < (progress->>'bytes_total')::numeric, true)
        and not (p_due and (progress is distinct from s.fetching
            or coalesce(abs(memory - s.memory_bytes) >= 67108864, false) or coalesce(abs(cores - s.cpu_cores) >= 0.5, false))) then
        return false;  -- nothing worth a write
    end if;
    update llmgw_core.shard set
        state = said, error = said_error, exit_code = (p_report->>'exit_code')::int,
        log_tail = coalesce(left(p_report->>'log_tail', 4096), log_tail),
        fetching = progress, pid = (p_report->>'pid')::int, cpu_cores = cores, memory_bytes = memory
        where id = s.id;
    return said <> s.state;
end $$;
comment on function llmgw_core.sync_shard(text, jsonb, boolean) is 'Takes what a node says of one shard, with what moves by itself (use, progress) when that is due; true when its state moved.';

create or replace function llmgw_core.sync_shards(p_node text, p_reports jsonb, p_due boolean) returns boolean
language plpgsql security definer set search_path = llmgw_core, pg_temp as $$
declare
    r jsonb;
    moved boolean := false;
begin
    -- By number, as commit_plan locks them.
    for r in select e from llmgw_core.list_of(p_reports, 256, 'shards') e
            order by case when e->>'shard' ~ '^[0-9]{1,18}$' then (e->>'shard')::bigint end loop
        begin
            moved := llmgw_core.sync_shard(p_node, r, p_due) or moved;
        exception
            -- One odd word must not cost the node its other shards; the row keeps its last good state.
            when sqlstate 'LG002' or integrity_constraint_violation or data_exception then
                raise warning 'node %: report of shard % ignored: %', p_node, r->>'shard', sqlerrm;
        end;
    end loop;
    return moved;
end $$;
comment on function llmgw_core.sync_shards(text, jsonb, boolean) is 'Takes what a node says of its shards; true when any state moved.';

create or replace function llmgw_core.assignments_of(p_node text) returns jsonb
language sql stable security definer set search_path = llmgw_core, pg_temp as $$
    select coalesce(jsonb_agg(s.spec || jsonb_build_object(
            'shard', s.id, 'replica', s.replica_id, 'model', r.model, 'profile', r.profile, 'rank', s.rank,
            'desired', s.desired, 'port', s.port, 'host', n.mgmt_addr, 'cpus', s.cpus, 'memory_mib', s.memory_mib,
            -- An engine takes most of a card by itself: it must be told which part its claim is, rounded down.
            'gpus', (select coalesce(jsonb_agg(jsonb_build_object('uuid', g.uuid, 'index', g.index) || jsonb_strip_nulls(jsonb_build_object(
                         'share', case when c.memory_mib <= g.memory_mib then greatest(trunc(c.memory_mib::numeric / g.memory_mib, 3), 0.001) end)) order by g.index), '[]')
                     from llmgw_core.gpu_claim c join llmgw_core.gpu g on g.node_id = c.node_id and g.uuid = c.gpu_uuid
                     where c.shard_id = s.id)) order by s.id), '[]')
    from llmgw_core.shard s
    join llmgw_core.replica r on r.id = s.replica_id
    join llmgw_core.node n on n.id = s.node_id
    where s.node_id = p_node and s.state not in ('stopped', 'failed')
$$;
comment on function llmgw_core.assignments_of(text) is 'Every live shard of a node as the agent''s document.';

create or replace function llmgw_core.runs_astray(p_node text, p_reports jsonb) returns boolean
language sql stable security definer set search_path = llmgw_core, pg_temp as $$
    select exists (
        select 1 from jsonb_array_elements(llmgw_core.list_or_empty(p_reports)) r
        where r->>'shard' ~ '^[0-9]{1,18}$' and r->>'state' not in ('stopped', 'failed')
          and not exists (select 1 from llmgw_core.shard s where s.id = (r->>'shard')::bigint and s.node_id = p_node and s.state not in ('stopped', 'failed')))
$$;
comment on function llmgw_core.runs_astray(text, jsonb) is 'Whether a node tells of a running shard that is none of its live ones: somebody ended or deleted the row by hand.';

create or replace function llmgw_core.poll_ms(p_node text) returns int
language sql volatile security definer set search_path = llmgw_core, pg_catalog, pg_temp as $$
    select (case
        when exists (select 1 from llmgw_core.shard where node_id = p_node and state not in ('stopped', 'failed')
                     and (state <> 'ready' or desired = 'stopped'))
          or exists (select 1 from llmgw_core.ask where node_id = p_node and answered_at is null)
        then llmgw_core.setting('poll_busy')
        else least(30000, greatest(llmgw_core.setting('poll_idle'),
            1000 * (select greatest(reltuples, 0) from pg_class where oid = 'llmgw_core.node'::regclass)
                / llmgw_core.setting('syncs_per_second')))
        end * (0.9 + 0.2 * random()))::int
$$;
comment on function llmgw_core.poll_ms(text) is 'How long an agent may wait until its next sync: short with work outstanding, else scaled to the fleet.';

create or replace function agent.sync(p_token text, p_have_gen bigint, p_report jsonb)
returns table (gen bigint, assignments jsonb, poll_ms int, now timestamptz, asks jsonb)
language plpgsql security definer set search_path = llmgw_core, pg_temp as $$
declare
    me text := llmgw_core.node_of(p_token);
    was llmgw_core.beat;
    said_gen bigint := (p_report->>'applied_gen')::bigint;
    said_boot uuid := (p_report->>'boot')::uuid;
    leaving boolean := coalesce(p_report->'leaving' = 'true', false);
    skew double precision := llmgw_core.number_of(p_report->'clock') - extract(epoch from clock_timestamp());
    due boolean;
    moved boolean := false;
begin
    if pg_column_size(p_report) > 262144 then
        raise exception 'the report of node % is over 256 KiB', me using errcode = 'LG003';
    end if;
    select * into was from llmgw_core.beat where node_id = me;
    poll_ms := llmgw_core.poll_ms(me);
    due := was.node_id is null or leaving <> (was.left_at is not null)
        or was.boot is distinct from said_boot or was.applied_gen is distinct from said_gen
        or coalesce(abs(skew - was.clock_skew_s) >= 1, (skew is null) <> (was.clock_skew_s is null))
        -- At the next sync it would be too late. Before the last beat: the clock was set back.
        or clock_timestamp() - was.seen_at not between interval '0' and llmgw_core.beat_every() - make_interval(secs => poll_ms / 1000.0);
    -- A delayed report of the same agent must not undo what a later one said.
    if p_report->'shards' <> '[]'  -- most nodes of an idle fleet have none, and come a hundred times a second
        and (was.boot is distinct from said_boot or was.applied_gen is null or said_gen is null or said_gen >= was.applied_gen) then
        moved := llmgw_core.sync_shards(me, p_report->'shards',
            -- Wide rows that every sync passes several times: once a minute.
            due and date_trunc('minute', clock_timestamp()) is distinct from date_trunc('minute', was.seen_at));
    end if;
    if moved then
        perform nextval('llmgw_core.change');
        poll_ms := llmgw_core.poll_ms(me);
    else
        perform set_config('synchronous_commit', 'off', true);  -- a lost beat costs nothing
    end if;
    if due then
        insert into llmgw_core.beat as b (node_id, seen_at, boot, applied_gen, clock_skew_s, left_at)
            values (me, clock_timestamp(), said_boot, said_gen, skew, case when leaving then clock_timestamp() end)
            on conflict (node_id) do update set seen_at = excluded.seen_at, boot = excluded.boot,
                applied_gen = excluded.applied_gen, clock_skew_s = excluded.clock_skew_s, left_at = excluded.left_at;
    end if;
    if was.node_id is null or leaving <> (was.left_at is not null) then
        perform nextval('llmgw_core.change');  -- a node's first word makes it placeable now, its last one no more
    end if;
    if p_report ?| array['load', 'gpus', 'ports'] then
        perform llmgw_core.sync_load(me, p_report);
    end if;
    select n.alloc_gen into gen from llmgw_core.node n where n.id = me;
    if p_have_gen is distinct from gen or p_report->'shards' <> '[]' and llmgw_core.runs_astray(me, p_report->'shards') then
        assignments := llmgw_core.assignments_of(me);
    end if;
    now := clock_timestamp();
    select coalesce(jsonb_agg(jsonb_strip_nulls(jsonb_build_object('id', a.id, 'kind', a.kind, 'shard', a.shard_id, 'lines', a.lines,
        'from_offset', a.from_offset, 'hca', a.hca, 'port', a.port, 'paths', a.paths)) order by a.id), '[]') into asks
        from llmgw_core.ask a where a.node_id = me and a.answered_at is null;
    return next;
end $$;
comment on function agent.sync(text, bigint, jsonb) is 'Heartbeat, report and poll in one round trip. assignments is null when the agent''s generation is current and nothing runs astray; poll_ms is when to come again.';
