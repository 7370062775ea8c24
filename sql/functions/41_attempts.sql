-- What placement found for each model that wanted a place: the latest attempt and every refusal of it.

create or replace function llmgw_core.attempt_digest(p_attempt jsonb) returns bytea
language sql immutable set search_path = llmgw_core, pg_temp as $$
    -- Codes and places, not the numbers beside them: free memory moves all the time.
    select sha256(convert_to(coalesce(p_attempt->>'digest', (
        select string_agg(concat_ws('/', r->>'profile', r->>'node', r->>'code'), ',' order by r->>'profile', r->>'node', r->>'code')
        from jsonb_array_elements(p_attempt->'refusals') r), '') || (p_attempt->>'placed'), 'utf8'))
$$;
comment on function llmgw_core.attempt_digest(jsonb) is 'What tells two attempts apart: the digest that the controller worked out, else its profiles, nodes and codes.';

create or replace function llmgw_core.attempt_begin_v1(p_term bigint, p_attempt jsonb) returns jsonb
language plpgsql security definer set search_path = llmgw_core, pg_temp as $$
declare
    known llmgw_core.attempt;
    d record;
begin
    perform llmgw_core.require_term('tick', p_term);
    select * into known from llmgw_core.attempt where model = p_attempt->>'model';
    -- Kept refusals leave with their day's partition: write them again in time.
    if known.digest = llmgw_core.attempt_digest(p_attempt)
            and known.decision_at > clock_timestamp() - llmgw_core.setting('decision_days') / 2 * interval '1 day' then
        update llmgw_core.attempt set checked_at = clock_timestamp() where model = known.model;
        return null;
    end if;
    insert into llmgw_core.decision as x (term, kind, model, reason, detail)
        values (p_term, 'attempt', p_attempt->>'model', case when (p_attempt->>'placed')::boolean then 'placed' else 'could not be placed' end,
                jsonb_build_object('refusals', coalesce((p_attempt->>'total')::int, jsonb_array_length(llmgw_core.list_or_empty(p_attempt->'refusals')))))
        returning x.id, x.at into d;
    return jsonb_build_object('id', d.id, 'at', d.at);
end $$;
comment on function llmgw_core.attempt_begin_v1(bigint, jsonb) is 'Makes the decision row that refusals go under; null when the latest attempt of the model found the same, and then there is nothing more to write.';

create or replace function llmgw_core.attempt_part_v1(p_term bigint, p_decision jsonb, p_model text, p_from int, p_refusals jsonb) returns int
language plpgsql security definer set search_path = llmgw_core, pg_temp as $$
declare
    written int;
begin
    perform llmgw_core.require_term('tick', p_term);
    insert into llmgw_core.rejection (decision_id, at, "position", model, profile, pool, node_id, code, reason, need, have)
        select (p_decision->>'id')::bigint, (p_decision->>'at')::timestamptz, p_from + ord, p_model, coalesce(r->>'profile', ''), r->>'pool', r->>'node',
            coalesce(r->>'code', 'none'), coalesce(r->>'reason', r->>'code', 'no reason was given'), r->>'need', r->>'have'
        from jsonb_array_elements(p_refusals) with ordinality as e(r, ord);
    get diagnostics written = row_count;
    return written;
end $$;
comment on function llmgw_core.attempt_part_v1(bigint, jsonb, text, int, jsonb) is 'Writes some refusals of an attempt, from a position on. A code that this database does not know yet is kept as it is.';

create or replace function llmgw_core.attempt_end_v1(p_term bigint, p_decision jsonb, p_attempt jsonb) returns void
language plpgsql security definer set search_path = llmgw_core, pg_temp as $$
begin
    perform llmgw_core.require_term('tick', p_term);
    insert into llmgw_core.attempt as x (model, decision_id, decision_at, checked_at, placed, digest)
        values (p_attempt->>'model', (p_decision->>'id')::bigint, (p_decision->>'at')::timestamptz, clock_timestamp(),
                (p_attempt->>'placed')::boolean, llmgw_core.attempt_digest(p_attempt))
        on conflict (model) do update set decision_id = excluded.decision_id, decision_at = excluded.decision_at,
            checked_at = excluded.checked_at, placed = excluded.placed, digest = excluded.digest;
end $$;
comment on function llmgw_core.attempt_end_v1(bigint, jsonb, jsonb) is 'All refusals are written: from now on this is the latest attempt of its model.';

create or replace function llmgw_core.record_attempts_v1(p_term bigint, p_attempts jsonb) returns int
language plpgsql security definer set search_path = llmgw_core, pg_temp as $$
declare
    a jsonb;
    d jsonb;
    written int := 0;
begin
    perform llmgw_core.require_term('tick', p_term);
    for a in select * from jsonb_array_elements(p_attempts) loop
        d := llmgw_core.attempt_begin_v1(p_term, a);
        if d is not null then
            perform llmgw_core.attempt_part_v1(p_term, d, a->>'model', 0, a->'refusals');
            perform llmgw_core.attempt_end_v1(p_term, d, a);
            written := written + 1;
        end if;
    end loop;
    return written;
end $$;
comment on function llmgw_core.record_attempts_v1(bigint, jsonb) is 'Keeps what each model''s placement attempt found; a new set of rows only when the refusals changed or grow old. Returns how many were new.';

create or replace function llmgw_core.tick_notes_v1(p_term bigint, p_notes text[]) returns void
language plpgsql security definer set search_path = llmgw_core, pg_temp as $$
begin
    update llmgw_core.lease set notes = (select coalesce(array_agg(left(n, 1000) order by nr), '{}') from unnest(p_notes) with ordinality u(n, nr) where nr <= 100)
        where name = 'tick' and term = p_term;
    if not found then
        raise exception 'term % is no longer the leading term of duty tick', p_term using errcode = 'LG001';
    end if;
end $$;
comment on function llmgw_core.tick_notes_v1(bigint, text[]) is 'Keeps what the leader leaves alone, and why, for llmgw.doctor and llmgw.trouble. Raises LG001 for a late leader.';

grant execute on function llmgw_core.tick_notes_v1(bigint, text[]) to llmgw_controller;
grant execute on function llmgw_core.record_attempts_v1(bigint, jsonb), llmgw_core.attempt_begin_v1(bigint, jsonb),
    llmgw_core.attempt_part_v1(bigint, jsonb, text, int, jsonb), llmgw_core.attempt_end_v1(bigint, jsonb, jsonb) to llmgw_controller;
