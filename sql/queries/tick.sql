-- name: now
-- The database's clock, what a leader must know of the server, which transactions this read sees, and whether triggers tell of changes.
select extract(epoch from clock_timestamp())::double precision as now,
    extract(epoch from pg_postmaster_start_time())::double precision as started_at,
    (select last_value from llmgw_core.change) as change, pg_current_snapshot()::text as seen,
    exists (select 1 from pg_trigger where tgname like 'touched\_%' and tgenabled = 'D') as blind,
    -- The word of the live router that was silent longest; null without one.
    (select extract(epoch from min(c.seen_at))::double precision from llmgw_core.controller c
     where c.role = 'router' and (c.seen_at > clock_timestamp() - interval '10 s' or llmgw_core.present(c.id))) as heard_at;

-- name: change
-- A number that grows when something may have to be decided.
select last_value from llmgw_core.change;

-- name: touched
-- What was changed by transactions that an earlier read did not see.
select distinct kind, key from llmgw_core.touched
where xid >= pg_snapshot_xmin($1::text::pg_snapshot) and not pg_visible_in_snapshot(xid, $1::text::pg_snapshot) and kind <> 'mark';

-- name: everybody
-- Everything that can be touched one by one.
select 'node' as kind, id as key from llmgw_core.node
union all select 'replica', id::text from llmgw_core.replica where state <> 'gone';

-- name: settings
-- Numbers that decisions use.
select name, value from llmgw_core.setting;

-- name: silent
-- Nodes whose agents are not heard: this changes with time alone.
select node_id, state, state_reason, agent_ended from llmgw_core.node_state where state in ('unreachable', 'lost');

-- name: stale
-- Nodes whose fast facts are too old to count: this changes with time alone.
select node_id from llmgw_core.node_load where at <= now() - (select llmgw_core.seconds('load_stale'));

-- name: nodes
-- These nodes with their intent as state, facts and what is claimed of them by live shards of any launch.
select n.id, n.intent as state, n.intent_reason as state_reason, n.alloc_gen, n.labels, n.arch, n.cpu_flags, n.cpus_effective, n.memory_effective_mib,
    n.port_first, n.port_last, n.mgmt_addr, n.host_reported_at is not null as reported,
    c.cpus, c.memory_mib, c.ports, c.shards, c.models,
    case when n.nvlink_state = 'joined' then n.nvlink_domain end as nvlink_domain, n.nvlink_reason,
    case when n.imex is not null then i.fault is null end as imex_ready, i.fault as imex_reason,
    f.fabrics, d.free_mib as weights_free_mib, n.machine->'provision' as provisions
from unnest($1::text[]) asked (id) join llmgw_core.node n on n.id = asked.id
cross join lateral (select llmgw_core.imex_fault(n.imex, n.imex_channels) as fault) i
cross join lateral (
    select sum(s.cpus) as cpus, sum(s.memory_mib)::bigint as memory_mib,
        array_remove(array_agg(s.port) || array_agg(s.master_port), null) as ports, count(*)::int as shards, array_agg(distinct r.model) as models
    from llmgw_core.shard s join llmgw_core.replica r on r.id = s.replica_id
    where s.node_id = n.id and s.state not in ('stopped', 'failed')) c
cross join lateral (
    select jsonb_object_agg(p.key, jsonb_build_object('hcas', p.hcas, 'names', p.names)) as fabrics from (
        select key, array_agg(hca || ':' || port order by hca, port) as hcas, coalesce(array_agg(distinct fabric) filter (where fabric is not null), '{}') as names
        from llmgw_core.ib_port where node_id = n.id and active and key is not null group by key) p) f
-- The roomiest of the disks with weights: which of them the agent downloads to is its own setting.
cross join lateral (select max(free_mib) as free_mib from llmgw_core.disk where node_id = n.id and holds_weights) d;

-- name: gpus
-- Every card and slice of these nodes with what foreign processes hold and what live shards claim.
-- A card in MIG mode is not one to give, and one without an index is lost.
select g.node_id, g.uuid, g.index, g.class, g.memory_mib, g.healthy, g.problems, g.numa, g.driver_version, g.cuda_version, g.nearest_nic, g.island, g.parent is not null as slice,
    g.memory_kind is not distinct from 'unified' as unified, g.parent is not null and g.missing_since is not null as gone,
    (l.gpus->g.uuid->>'memory_foreign_mib')::bigint as memory_foreign_mib, c.claims
from unnest($1::text[]) asked (id) join llmgw_core.gpu g on g.node_id = asked.id
left join llmgw_core.node_load l on l.node_id = g.node_id and l.at > now() - (select llmgw_core.seconds('load_stale'))
cross join lateral (
    select jsonb_agg(jsonb_build_array(shard_id, memory_mib) order by shard_id) as claims
    from llmgw_core.gpu_claim where node_id = g.node_id and gpu_uuid = g.uuid) c
where not g.partitioned and g.index is not null
order by g.node_id, g.index, g.uuid;

-- name: engines
-- Usable engines of these nodes, and versions that their agents could not install (those that they found broken have a path).
select e.node_id, e.engine, array_agg(e.version order by e.version) filter (where e.state = 'installed') as versions,
    jsonb_object_agg(e.version, left(split_part(coalesce(e.error, ''), E'\n', 1), 300)) filter (where e.state = 'failed' and e.path = '') as failures
from unnest($1::text[]) asked (id) join llmgw_core.engine e on e.node_id = asked.id
where e.state = 'installed' or (e.state = 'failed' and e.path = '') group by e.node_id, e.engine;

-- name: weights
-- Sources that lie whole on a disk of these nodes, where their agents use them: downloads, and files named by models.
select w.node_id, array_agg(distinct w.source) as sources from unnest($1::text[]) asked (id) join llmgw_core.weight w on w.node_id = asked.id
where w.complete and (w.managed or w.source like 'file:%') and w.source is not null group by w.node_id;

-- name: facts
-- What the weights of each source of the catalog say of their model, by the first node that has them whole. As text: read when it is new.
select distinct on (w.source) w.source, w.facts::text as facts, w.bytes / 1048576 as weights_mib
from (select source, min(node_id) as node_id from llmgw_core.weight
    where complete and facts is not null and (managed or source like 'file:%') and source in (select source from llmgw_core.model) group by source) f
join llmgw_core.weight w on w.node_id = f.node_id and w.source = f.source and w.complete and w.facts is not null and (w.managed or w.source like 'file:%')
order by w.source, w.path;

-- name: models
-- What the catalog wants.
select name, source, min_replicas, max_replicas, idle_timeout_s, priority from llmgw_core.model order by name;

-- name: demand
-- What clients ask of each model, and how much of it one replica serves.
select model, waiting, in_flight, peak, routers, extract(epoch from wanted_at)::double precision as wanted_at, concurrency from llmgw.demand;

-- name: profiles
-- Ways to run each model, first choice first, with the labels of their pool.
select p.*, o.labels as pool_labels
from llmgw_core.profile p left join llmgw_core.pool o on o.name = p.pool
order by p.model, p.position;

-- name: replicas
-- Those of these replicas that are not gone.
select r.id, r.model, r.state, r.profile, r.fingerprint, r.restarts, r.error,
    extract(epoch from r.created_at)::double precision as created_at, extract(epoch from r.state_at)::double precision as state_at,
    extract(epoch from r.ready_at)::double precision as ready_at, extract(epoch from r.backoff_until)::double precision as backoff_until,
    extract(epoch from r.drain_deadline)::double precision as drain_deadline,
    extract(epoch from r.replace_asked)::double precision as replace_asked, r.replace_force, r.room_for
from unnest($1::bigint[]) asked (id) join llmgw_core.replica r on r.id = asked.id
where r.state <> 'gone';

-- name: uses
-- What runs on replicas by the word of every live router, of those in use since this time (unix seconds).
with live as materialized (
    select c.id from llmgw_core.controller c
    where c.role = 'router' and (c.seen_at > clock_timestamp() - interval '10 s' or llmgw_core.present(c.id)))
select x.replica_id, coalesce(sum(x.in_flight) filter (where l.id is not null), 0)::int as in_flight,
    -- A router that left with requests running used the replica at least until its last word.
    extract(epoch from max(case when l.id is null and x.in_flight > 0 then x.reported_at else x.last_used_at end))::double precision as last_used_at
from llmgw_core.router_use x left join live l on l.id = x.router_id
where x.in_flight > 0 or x.last_used_at > to_timestamp($1::double precision)
group by x.replica_id;

-- name: shards
-- Shards of the present launch of each of these replicas.
select s.id, s.replica_id, s.rank, s.node_id, s.state, s.port, s.master_port, s.error, extract(epoch from s.state_at)::double precision as state_at,
    s.exit_code, s.log_tail, s.cpus, s.memory_mib, c.gpus
from unnest($1::bigint[]) asked (id) join llmgw_core.replica r on r.id = asked.id
join llmgw_core.shard s on s.replica_id = r.id and s.launch = r.launch
cross join lateral (select array_agg(c.gpu_uuid order by c.gpu_uuid) as gpus from llmgw_core.gpu_claim c where c.shard_id = s.id) c
where r.state <> 'gone'
order by s.replica_id, s.rank;

-- name: commit_plan
-- Writes a plan made under this term; one row per item with its outcome.
select "position", outcome from llmgw_core.commit_plan_v1($1::bigint, $2::jsonb) order by 1;

-- name: record_attempts
-- Keeps what each model's attempt found.
select llmgw_core.record_attempts_v1($1::bigint, $2::jsonb);

-- name: notes
-- Keeps what the leader leaves alone, and why.
select llmgw_core.tick_notes_v1($1::bigint, $2::text[]);

-- name: attempt_begin
-- Begins an attempt whose refusals come in parts; null when nothing is new.
select llmgw_core.attempt_begin_v1($1::bigint, $2::jsonb);

-- name: attempt_part
-- Some of its refusals.
select llmgw_core.attempt_part_v1($1::bigint, $2::jsonb, $3::text, $4::int, $5::jsonb);

-- name: attempt_end
-- Makes it the latest attempt of its model.
select llmgw_core.attempt_end_v1($1::bigint, $2::jsonb, $3::jsonb);
