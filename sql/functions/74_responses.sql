-- Answers of /v1/responses that an engine keeps: where each is.

create or replace function llmgw_core.responses_put_v1(p_rows jsonb) returns void
language sql security definer set search_path = llmgw_core, pg_temp as $$
    insert into llmgw_core.stored_response (id, key_id, replica)
        select t.id, t.key_id, t.replica from jsonb_to_recordset(p_rows) as t (id text, key_id text, replica text)
        where length(t.id) between 1 and 256
        on conflict (id) do nothing
$$;
comment on function llmgw_core.responses_put_v1(jsonb) is 'Keeps where answers are; the first word about an id counts, so nobody can take over another''s.';

create or replace function llmgw_core.responses_keep() returns void
language sql security definer set search_path = llmgw_core, pg_temp as $$
    delete from llmgw_core.stored_response where created_at < clock_timestamp() - llmgw_core.setting('decision_days') * interval '1 day'
$$;
comment on function llmgw_core.responses_keep() is 'Forgets answers that are older than the history of decisions: no engine keeps them so long.';

grant execute on function llmgw_core.responses_put_v1(jsonb) to llmgw_controller;
