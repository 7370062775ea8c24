create or replace view llmgw.shards as
select s.id, s.replica_id as replica, r.model, s.launch, s.rank, s.node_id as node, s.state, s.desired, s.port,
    (select array_agg(g.index order by g.index) from llmgw_core.gpu_claim c
     join llmgw_core.gpu g on g.node_id = c.node_id and g.uuid = c.gpu_uuid where c.shard_id = s.id) as gpus,
    s.error, s.exit_code, s.fetching, s.pid, s.cpu_cores, s.memory_bytes, s.cpus, s.memory_mib,
    round(extract(epoch from clock_timestamp() - s.state_at), 1)::double precision as state_seconds, s.log_tail
from llmgw_core.shard s join llmgw_core.replica r on r.id = s.replica_id;
comment on view llmgw.shards is 'Every shard, also those that are over; launch counts the replica''s starts.';

create or replace view llmgw.replicas as
select r.id, r.model, r.profile, r.state, r.pool,
    (select array_agg(s.node_id order by s.rank) from llmgw_core.shard s where s.replica_id = r.id and s.launch = r.launch) as nodes,
    round(extract(epoch from clock_timestamp() - r.created_at), 1)::double precision as age_seconds,
    case when u.in_flight > 0 then 0
         when u.last_used_at is null then -1
         else round(extract(epoch from clock_timestamp() - u.last_used_at), 1) end::double precision as idle_seconds,
    r.endpoint, r.error, r.reason, r.restarts, u.in_flight,
    m.name is not null and p.fingerprint is distinct from r.fingerprint and r.fingerprint is not null as stale,
    r.backoff_until, r.drain_deadline, r.replace_asked,
    coalesce((select jsonb_agg(jsonb_strip_nulls(jsonb_build_object('id', v.id, 'node', v.node, 'rank', v.rank, 'gpus', coalesce(to_jsonb(v.gpus), '[]'),
            'state', v.state, 'error', v.error, 'cpu_cores', v.cpu_cores, 'memory_bytes', v.memory_bytes,
            'fetch', case when v.fetching is not null then v.fetching || jsonb_build_object('percent',
                round(100.0 * (v.fetching->>'bytes_done')::bigint / nullif((v.fetching->>'bytes_total')::bigint, 0), 1)) end)) order by v.rank)
        from llmgw.shards v where v.replica = r.id and v.launch = r.launch), '[]') as shards,
    d.depth, d.source as depth_source
from llmgw_core.replica r
left join llmgw_core.model m on m.name = r.model
left join llmgw_core.profile p on p.model = r.model and p.name = r.profile
left join llmgw_core.replica_use u on u.replica_id = r.id
join llmgw_core.depth d on d.replica_id = r.id
where r.state <> 'gone'
order by r.id;
comment on view llmgw.replicas is 'Replicas that are not gone. in_flight is what live routers run there; idle_seconds is -1 when no router has reported any use, which is not the same as idle; stale says that the profile was edited since; replace_asked when an operator wants another in its stead; depth is how many requests at once it is sent by all routers together: measured, or the default of llmgw.settings.';

create or replace view llmgw.placements as
select m.name as model,
    a.placed, a.decision_at as at, a.checked_at,
    case when a.model is null then 'no attempt yet'
         when a.placed and x.refused = 0 then 'placed and nothing rejected'
         when a.placed then 'placed, rejected along the way'
         else 'could not be placed' end as outcome,
    coalesce(x.refused, 0) as refused, x.main_reason
from llmgw_core.model m
left join llmgw_core.attempt a on a.model = m.name
left join lateral (
    with refusal as (
        select y.profile, y.node_id, y.code, y.reason, y."position", min(y.code) over w = max(y.code) over w as alone,
            y.code in ('pool_mismatch', 'node_excluded', 'arch_mismatch', 'cpu_flag_missing', 'gpu_class', 'gpu_count') as innate
        from llmgw_core.rejection y where y.at = a.decision_at and y.decision_id = a.decision_id window w as (partition by y.profile, y.node_id)),
    candidate as (select profile, node_id, bool_or(innate) as barred from refusal group by profile, node_id),
    -- The same choice as in controller/placement/explain.py (a test compares): what a node is by nature is no news while another
    -- node could; then what alone stands in the way of most, then what does of most.
    main as (
        select (array_agg(f.reason order by f."position"))[1] || case when count(f.node_id) = 0 then '' else
            format(' (%s of %s candidates)', count(distinct f.node_id), (select count(*) from candidate c where c.profile = f.profile)) end as text
        from refusal f group by f.profile, f.code, f.innate
        order by f.innate and exists (select from candidate c where not c.barred), count(distinct f.node_id) filter (where f.alone) desc,
            count(distinct f.node_id) desc, f.code not like 'node\_%', f.code like '%\_unknown',
            min(min(f."position")) over (partition by f.profile), f.code collate "C" limit 1)
    select count(*)::int as refused, (select main.text from main) as main_reason from refusal) x on true
order by m.name;
comment on view llmgw.placements is 'What the latest attempt to place each model came to.';

create or replace view llmgw.rejections as
select r.model, r.profile, r.pool, r.node_id as node, r.code, r.reason, r.need, r.have, r.at
from llmgw_core.rejection r join llmgw_core.attempt a on a.decision_at = r.at and a.decision_id = r.decision_id
order by r.model, r."position";
comment on view llmgw.rejections is 'Why each candidate of the latest attempt of each model did not fit.';

create or replace view llmgw.why_not as
select r.model, r.code, count(*)::int as candidates, (array_agg(r.node order by r.node))[1:3] as for_example,
    min(r.need) as need, max(r.have) as best_have
from llmgw.rejections r join llmgw_core.attempt a on a.model = r.model and not a.placed
group by r.model, r.code order by r.model, candidates desc;
comment on view llmgw.why_not is 'Reasons that keep models from being placed, counted.';

create or replace view llmgw.decisions as
select d.id, d.at, d.term, d.kind, d.model, d.replica_id as replica, d.node_id as node, d.reason, d.detail
from llmgw_core.decision d;
comment on view llmgw.decisions is 'Every item of every plan, and refusals at commit. Filter on at.';

create or replace view llmgw.catalog_files as
select s.file, nullif(s.hostname, '') as hostname, s.digest, s.applied_at is not null and s.applied_at = max(s.applied_at) over () as applied,
    s.applied_at, s.applied_by, s.seen_at
from llmgw_core.catalog_seen s order by s.seen_at desc;
comment on view llmgw.catalog_files is 'Every content that a controller''s catalog file ever had; applied is the one in force. hostname is null for one that llmgwctl apply brought.';

create or replace view llmgw.controllers as
select c.id, c.role, c.hostname, c.pid, c.version, llmgw_core.present(c.id) as alive,
    c.started_at, round(extract(epoch from clock_timestamp() - c.seen_at), 1)::double precision as seen_ago,
    (select array_agg(l.name order by l.name) from llmgw_core.lease l where l.holder = c.id and l.expires_at > clock_timestamp()) as leads,
    c.catalog_file, c.catalog_digest,
    case when c.catalog_error is not null then 'refused' when c.catalog_digest = f.digest then 'applied'
         when c.catalog_digest is not null then 'differs' end as catalog,
    case when c.catalog_error is not null then c.catalog_error
         when c.catalog_digest <> f.digest then format('its %s (%s) is not what is applied, which is %s%s (%s) since %s by %s',
            c.catalog_file, c.catalog_digest, f.file, ' of ' || f.hostname, f.digest, to_char(f.applied_at, 'YYYY-MM-DD HH24:MI:SSOF'), f.applied_by)
         end as catalog_problem
from llmgw_core.controller c left join llmgw.catalog_files f on f.applied
order by c.started_at;
comment on view llmgw.controllers is 'Control and router processes; alive = it holds its presence lock; leads = duties it holds. catalog tells of the catalog file in its configuration: applied (what it holds is in force), differs (another content is), refused (it cannot be applied); null without one.';

create or replace view llmgw.leases as
select l.name, l.term, l.holder, l.acquired_at, l.expires_at, l.expires_at > clock_timestamp() and llmgw_core.present(l.holder) as held
from llmgw_core.lease l order by l.name;
comment on view llmgw.leases is 'Duties, who does them, and the term that only grows.';

create or replace view llmgw.locks as
select coalesce(x.name, y.name, l.classid || '/' || l.objid) as lock, l.pid, l.granted, a.application_name as application
from pg_locks l
left join llmgw_core.lock_name x on x.class = l.classid::int and x.id = l.objid::int
left join llmgw_core.lock_name y on y.class = l.classid::int and y.id is null
left join pg_stat_activity a on a.pid = l.pid
where l.locktype = 'advisory' and l.database = (select oid from pg_database where datname = current_database());
comment on view llmgw.locks is 'Advisory locks by name, and who holds or waits for them.';
