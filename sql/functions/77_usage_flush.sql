-- What routers call to hand over usage rows; one function for each release that may still run.

create or replace function llmgw_core.usage_flush_v1(p_rows jsonb) returns int
language sql security definer set search_path = llmgw_core, pg_temp as $$
    select (llmgw_core.usage_write(null, array(
        select row(r.id, to_timestamp(r.at), r.key_id, r.model_asked, r.model, r.replica_id, r.endpoint, r.status, r.http_status, r.error_code,
            r.stream, r.prompt_tokens, r.cached_tokens, r.completion_tokens, r.ttft_ms, r.total_ms, r.attempts, r.request_id, null, null, null,
            null, null, null, null, null, null, null, null, null)::llmgw_core.usage_event
        from jsonb_to_recordset(p_rows) as r (id uuid, at double precision, key_id text, model_asked text, model text, replica_id bigint,
            endpoint text, status text, http_status int, error_code text, stream boolean, prompt_tokens bigint, cached_tokens bigint,
            completion_tokens bigint, ttft_ms double precision, total_ms double precision, attempts int, request_id text)))).written
$$;
comment on function llmgw_core.usage_flush_v1(jsonb) is 'Request rows as objects, from routers of an early release. Returns rows written.';

create or replace function llmgw_core.usage_flush_v3(p_router uuid, p_rows jsonb) returns jsonb
language sql security definer set search_path = llmgw_core, pg_temp as $$
    select to_jsonb(w) from llmgw_core.usage_write(p_router, array(
        select row((r->>0)::uuid, to_timestamp((r->>1)::double precision), r->>2, r->>3, r->>4, (r->>5)::bigint, r->>6, r->>7, (r->>8)::int, r->>9,
            (r->>10)::boolean, (r->>11)::bigint, (r->>12)::bigint, (r->>13)::bigint, (r->>14)::double precision, (r->>15)::double precision,
            (r->>16)::int, r->>17, (r->>18)::bigint, (r->>19)::boolean, (r->>20)::double precision,
            (r->>22)::bigint, (r->>23)::bigint, (r->>24)::bigint, null, null, (r->>21)::boolean, null, r->>25, nullif(r->26, 'null'))::llmgw_core.usage_event
        from jsonb_array_elements(p_rows) r)) w
$$;
comment on function llmgw_core.usage_flush_v3(uuid, jsonb) is 'Request rows of a router as lists of values: those of the table''s columns to queue_ms, then degraded, org, team and user of the key, the id that the engine gave its answer, and the attempts that failed. Names would cost the routers more than all else of a row. Returns {"written", "unpriced"}.';

create or replace function llmgw_core.usage_flush_v2(p_rows jsonb) returns int
language sql security definer set search_path = llmgw_core, pg_temp as $$
    select (llmgw_core.usage_flush_v3(null, p_rows)->>'written')::int
$$;
comment on function llmgw_core.usage_flush_v2(jsonb) is 'Request rows as lists, from routers of the previous release: their lists are shorter. Returns rows written.';

create or replace function llmgw_core.database_id() returns uuid
language sql stable security definer set search_path = llmgw_core, pg_temp as $$
    select encode(substr(sha256(convert_to('database', 'utf8') || s.value), 1, 16), 'hex')::uuid from llmgw_core.secret s where s.name = 'cursor'
$$;
comment on function llmgw_core.database_id() is 'Tells this installation''s database from others, wherever it is moved or restored.';

grant execute on function llmgw_core.database_id(), llmgw_core.usage_flush_v1(jsonb), llmgw_core.usage_flush_v2(jsonb), llmgw_core.usage_flush_v3(uuid, jsonb) to llmgw_controller;
