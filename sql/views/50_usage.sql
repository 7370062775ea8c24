create or replace view llmgw.usage_rows as
select u.at, u.id, u.key_id as key, u.model_asked, u.model, u.replica_id as replica, u.endpoint, u.status, u.http_status, u.error_code, u.stream,
    u.prompt_tokens, u.cached_tokens, u.completion_tokens, u.ttft_ms, u.total_ms, u.attempts, u.request_id, u.reasoning_tokens, u.estimated,
    u.cost_micros, u.queue_ms, o.name as org, t.name as team, p.name as "user", u.org_id, u.team_id, u.user_id,
    array_remove(array[case when u.status = 'partial' then 'partial' end, case when u.estimated then 'estimated' end,
        case when u.degraded then 'degraded' end, case when u.unpriced then 'unpriced' end], null) as flags,
    u.tags, u.upstream_id
from llmgw_core.usage_event u
left join llmgw_core.scope o on o.id = u.org_id left join llmgw_core.scope t on t.id = u.team_id left join llmgw_core.scope p on p.id = u.user_id;
comment on view llmgw.usage_rows is 'Every request that is kept, one row each: who (scopes as they were when it began), what was asked and served, tokens, exact cost, times. Unknown is null. flags: partial, estimated (the engine did not tell all tokens), degraded (not all that was known could be kept), unpriced (cost unknown). Ask for a span of at: days are partitions.';

create or replace view llmgw.usage_recent as
select r.* from llmgw.usage_rows r where r.at > clock_timestamp() - interval '1 day';
comment on view llmgw.usage_recent is 'Requests of the last 24 hours, one row each. Token counts are null when nothing is known of them, estimated when the engine did not tell them all.';

create or replace view llmgw.usage_attempts as
select u.at, u.id, t.number, t.attempt->>0 as replica, t.attempt->>1 as model, t.attempt->>2 as why, (t.attempt->>3)::double precision as ms
from llmgw_core.usage_event u, jsonb_array_elements(u.tried) with ordinality as t (attempt, number)
union all
select u.at, u.id, u.attempts, u.replica_id::text, u.model, case when u.status <> 'ok' then coalesce(u.error_code, u.status) end, u.total_ms
from llmgw_core.usage_event u where u.attempts > coalesce(jsonb_array_length(u.tried), 0);
comment on view llmgw.usage_attempts is 'Attempts of requests, by the row''s time and id: those that failed with why, and the last one (why is null when all was well). ms: when it ended, after the request began.';

create or replace view llmgw.usage_today as
select d.key_id as key, k.name, d.model, o.name as org, t.name as team, p.name as "user", d.requests, d.errors, d.prompt_tokens, d.cached_tokens,
    d.completion_tokens, d.reasoning_tokens, d.cost_micros, d.unpriced, d.estimated, d.degraded, d.last_at
from llmgw_core.usage_day d
left join llmgw_core.api_key k on k.id = d.key_id
left join llmgw_core.scope o on o.id = d.org_id left join llmgw_core.scope t on t.id = d.team_id left join llmgw_core.scope p on p.id = d.user_id
where d.day = (clock_timestamp() at time zone 'UTC')::date
order by d.cost_micros desc, d.requests desc;
comment on view llmgw.usage_today is 'What each key used of each model since midnight UTC, dearest first. errors, unpriced, estimated and degraded are numbers of requests; cost_micros is of those that have a price.';

create or replace view llmgw.usage_minutes as
select m.minute, m.key_id as key, m.model, m.org_id, m.team_id, m.user_id, m.requests, m.errors, m.prompt_tokens, m.cached_tokens, m.completion_tokens,
    m.reasoning_tokens, m.cost_micros, m.unpriced, m.estimated, m.degraded
from llmgw_core.usage_minute m;
comment on view llmgw.usage_minutes is 'What was used in each minute, for graphs; ask for a span of minute: days are partitions.';
