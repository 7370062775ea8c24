-- name: budgets
-- A page of budgets, oldest first.
select jsonb_strip_nulls(to_jsonb(v)) as row, jsonb_build_array(v.id) as key
from llmgw.budgets v
where ($1::jsonb is null or v.id > ($1::jsonb->>0)::bigint) and ($4::text is null or v.key = $4)
    and ($3::text is null or v.scope_id in (select llmgw_core.scopes_below(llmgw_core.scope_of($3::text))))
order by v.id limit $2::int;

-- name: budget
-- One budget by its id.
select jsonb_strip_nulls(to_jsonb(v)) from llmgw.budgets v where v.id = $1::bigint;

-- name: budget_put
-- What a scope or key may spend in a period; answers the budget's id.
select llmgw.budget_put_v1($1::text, $2::text, $3::text, $4::bigint, $5::text, $6::text, $7::double precision[]::numeric[]);

-- name: budget_remove
-- A budget bounds nothing more.
select llmgw.budget_remove_v1($1::text, $2::bigint);

-- name: budget_events
-- A page of thresholds that were passed, newest first.
select jsonb_strip_nulls(to_jsonb(v)) as row, jsonb_build_array(v.id) as key
from llmgw.budget_events v
where ($1::jsonb is null or v.id < ($1::jsonb->>0)::bigint) and ($3::bigint is null or v.budget = $3)
order by v.id desc limit $2::int;

-- name: limits
-- A page of limits, oldest first.
select jsonb_strip_nulls(to_jsonb(v)) as row, jsonb_build_array(v.id) as key
from llmgw.limits v
where ($1::jsonb is null or v.id > ($1::jsonb->>0)::bigint) and ($4::text is null or v.key = $4)
    and ($3::text is null or v.scope_id in (select llmgw_core.scopes_below(llmgw_core.scope_of($3::text))))
order by v.id limit $2::int;

-- name: limit
-- One limit by its id.
select jsonb_strip_nulls(to_jsonb(v)) from llmgw.limits v where v.id = $1::bigint;

-- name: limit_put
-- What a scope or key may ask for; answers the limit's id.
select llmgw.limit_put_v1($1::text, $2::text, $3::text, $4::text, $5::bigint, $6::bigint, $7::bigint);

-- name: limit_remove
-- A limit holds no more.
select llmgw.limit_remove_v1($1::text, $2::bigint);
