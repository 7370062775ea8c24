-- name: route_models
-- Names clients may ask for.
select m.name, coalesce((select array_agg(a.name order by a.name) from llmgw_core.model_name a where a.model = m.name and a.is_alias), '{}') as aliases,
    coalesce((select array_agg(f.fallback order by f.position) from llmgw_core.fallback f where f.model = m.name), '{}') as fallbacks,
    extract(epoch from m.created_at)::double precision as created_at, m.min_replicas = 0 as on_demand
from llmgw_core.model m;

-- name: route_replicas
-- Where requests may go (ready) or still run (draining). A router's share of a depth is what the others leave of it, and never less than its part.
select r.id as replica_id, r.model, r.state, r.endpoint,
    (select s.node_id from llmgw_core.shard s where s.replica_id = r.id and s.launch = r.launch and s.rank = 0) as node_id,
    d.source as depth_source, greatest(ceil(d.depth::numeric / greatest(l.routers, 1)), d.depth - coalesce(o.in_flight, 0))::int as share
from llmgw_core.replica r
join llmgw_core.depth d on d.replica_id = r.id
cross join (select count(*) as routers from llmgw_core.live_router) l
left join (select u.replica_id, sum(u.in_flight) as in_flight from llmgw_core.router_use u join llmgw_core.live_router v on v.id = u.router_id
    where u.router_id <> $1::uuid and u.in_flight > 0 group by u.replica_id) o on o.replica_id = r.id
where r.state in ('ready', 'draining') and r.endpoint is not null;

-- name: route_peek
-- Another number when a replica came, went or changed its state: a look that costs little.
select bit_xor(hashtextextended(state, id)) from llmgw_core.replica where state <> 'gone';

-- name: route_waking
-- What holds up models that requests wait for.
select model, state, why, failures, retry_s from llmgw.waking where model = any ($1::text[]);

-- name: route_trips
-- Breakers that routers left open, and for how long still.
select t.place, extract(epoch from t.until - clock_timestamp())::double precision as left_s, t.pause_s
from (select replica_id::text as place, until, pause_s from llmgw_core.trip
    union all select place, until, pause_s from llmgw_core.endpoint_trip) t where t.until > clock_timestamp();

-- name: keys_by_hash
-- Whose secrets these are, also secrets within their grace.
select * from llmgw_core.usable_key k where k.id in (
    select x.id from llmgw_core.api_key x where x.hash = any ($1::bytea[])
    union all select o.key_id from llmgw_core.api_key_old o where o.hash = any ($1::bytea[]) and o.until > clock_timestamp());

-- name: keys_by_id
-- Keys as they are now; one that was revoked is absent.
select * from llmgw_core.usable_key k where k.id = any ($1::text[]);

-- name: keys_first
-- Keys to have in memory from the start: those used last, then the newest.
select k.id from llmgw_core.api_key k left join llmgw_core.api_key_use u on u.key_id = k.id
where k.revoked_at is null and (k.expires_at is null or k.expires_at > clock_timestamp())
order by u.used_at desc nulls last, k.created_at desc limit $1::int;

-- name: keys_changed
-- At most so many keys changed by transactions from this one on, and from which one to ask next time. None is newer than all: such a number is from before a restore.
select pg_snapshot_xmin(s.present)::text as mark, array(select k.id from llmgw_core.api_key k
    where k.changed >= $1::text::xid8 and k.changed < pg_snapshot_xmax(s.present) limit $2::int) as ids
from (select pg_current_snapshot() as present) s;

-- name: keys_used
-- These were used within the last minute.
select llmgw_core.keys_used_v1($1::text[]);

-- name: route_now
-- The database's clock, for expiry and for the times of usage rows.
select extract(epoch from clock_timestamp())::double precision as now;

-- name: usage_flush
-- Rows of a router in one batch; a batch sent twice is written once.
select llmgw_core.usage_flush_v3($1::uuid, $2::text::jsonb);

-- name: usage_database
-- Which database this is: rows that wait on disk are for one.
select llmgw_core.database_id();

-- name: router_trips
-- Breakers of this router that opened.
select llmgw_core.router_trips_v2($1::uuid, $2::jsonb);

-- name: router_report
-- What this router runs on each replica, and has waiting and running for each model.
select llmgw_core.router_report_v2($1::uuid, $2::jsonb, $3::jsonb);

-- name: responses_put
-- Where new answers of /v1/responses are kept.
select llmgw_core.responses_put_v1($1::jsonb);

-- name: response_owner
-- Which replica holds a stored answer, and whose it is.
select replica, key_id from llmgw_core.stored_response where id = $1::text;

-- name: route_bounds
-- Budgets and limits that changed since a mark (gone ones too, unless all are read), a page of each after the last one seen; what models cost now; the next mark.
select pg_snapshot_xmin(pg_current_snapshot())::text::bigint as mark,
    (select coalesce(jsonb_agg(to_jsonb(x)), '[]') from (
        select b.changed::text::bigint as changed, b.id, b.scope_id, b.key_id, coalesce((select s.kind from llmgw_core.scope s where s.id = b.scope_id), 'key') as level, b.micros, b.period,
            b.deleted_at is not null as gone
        from llmgw_core.budget b where (b.changed, b.id) > ($2::bigint::text::xid8, $3::bigint) and (b.deleted_at is null or $1::bigint > 0)
        order by b.changed, b.id limit $6::int) x) as budgets,
    (select coalesce(jsonb_agg(to_jsonb(x)), '[]') from (
        select l.changed::text::bigint as changed, l.id, l.scope_id, l.key_id, coalesce((select s.kind from llmgw_core.scope s where s.id = l.scope_id), 'key') as level, l.model,
            l.requests_per_min, l.tokens_per_min, l.parallel, l.deleted_at is not null as gone
        from llmgw_core.rate_limit l where (l.changed, l.id) > ($4::bigint::text::xid8, $5::bigint) and (l.deleted_at is null or $1::bigint > 0)
        order by l.changed, l.id limit $6::int) x) as limits,
    (select coalesce(jsonb_object_agg(p.model, jsonb_build_array(p.prompt, p.cached, p.completion)), '{}')
        from (select distinct on (x.model) x.* from llmgw_core.price x order by x.model, x.since desc) p) as prices;

-- name: router_allowances
-- What this router may use without asking again.
select llmgw_core.allowances_v1($1::uuid, $2::bigint, $3::jsonb);
