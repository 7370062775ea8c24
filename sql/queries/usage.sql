-- name: usage_by
-- A page of what was used by org, team, user, key or model, by id.
select jsonb_strip_nulls(to_jsonb(v) || jsonb_build_object('cost_micros', round(v.cost_micros), 'unpriced', nullif(v.unpriced, 0),
    'estimated', nullif(v.estimated, 0), 'degraded', nullif(v.degraded, 0))) as row, jsonb_build_array(v.id) as key
from llmgw.usage_by($3::text, coalesce($5::timestamptz, now() - make_interval(secs => $4::double precision)),
    coalesce($7::timestamptz, now() - make_interval(secs => $6::double precision)), $8::text) v
where $1::jsonb is null or v.id > $1::jsonb->>0
order by v.id limit $2::int;

-- name: usage_top
-- The same, the dearest so many.
select jsonb_strip_nulls(to_jsonb(v) || jsonb_build_object('cost_micros', round(v.cost_micros), 'unpriced', nullif(v.unpriced, 0),
    'estimated', nullif(v.estimated, 0), 'degraded', nullif(v.degraded, 0))) as row
from llmgw.usage_by($2::text, coalesce($4::timestamptz, now() - make_interval(secs => $3::double precision)),
    coalesce($6::timestamptz, now() - make_interval(secs => $5::double precision)), $7::text) v
order by v.cost_micros desc, v.requests desc, v.id limit $1::int;

-- name: usage_newest
-- A page of requests, newest first; those that ended at once have one time, so the id decides between them (G04). now() is stable, so that partitions are left out.
select jsonb_strip_nulls(to_jsonb(v)) as row, jsonb_build_array(v.at, v.id) as key
from llmgw.usage_rows v
where v.at >= coalesce($4::timestamptz, now() - make_interval(secs => $3::double precision))
  and v.at < coalesce($6::timestamptz, now() - make_interval(secs => $5::double precision), 'infinity')
  and ($1::jsonb is null or (v.at, v.id) < (($1::jsonb->>0)::timestamptz, ($1::jsonb->>1)::uuid))
  and ($7::text is null or v.key = $7) and ($8::text is null or v.model = $8)
  and ($9::text is null or llmgw_core.scope_told($9) in (v.org_id, v.team_id, v.user_id))
order by v.at desc, v.id desc limit $2::int;

-- name: usage_oldest
-- The same, oldest first.
select jsonb_strip_nulls(to_jsonb(v)) as row, jsonb_build_array(v.at, v.id) as key
from llmgw.usage_rows v
where v.at >= coalesce($4::timestamptz, now() - make_interval(secs => $3::double precision))
  and v.at < coalesce($6::timestamptz, now() - make_interval(secs => $5::double precision), 'infinity')
  and ($1::jsonb is null or (v.at, v.id) > (($1::jsonb->>0)::timestamptz, ($1::jsonb->>1)::uuid))
  and ($7::text is null or v.key = $7) and ($8::text is null or v.model = $8)
  and ($9::text is null or llmgw_core.scope_told($9) in (v.org_id, v.team_id, v.user_id))
order by v.at, v.id limit $2::int;
