-- Settings are read in subqueries: once per query, not once per row.
create or replace view llmgw_core.node_state as
select n.id as node_id,
    extract(epoch from clock_timestamp() - b.seen_at)::double precision as silent_s,
    case when b.seen_at is null then 'unreachable'
         when clock_timestamp() - b.seen_at > (select llmgw_core.seconds('lost_after')) then 'lost'
         when b.left_at is not null then 'unreachable'
         when clock_timestamp() - b.seen_at > (select llmgw_core.seconds('unreachable_after')) then 'unreachable'
         else n.intent end as state,
    case when b.seen_at is null then 'its agent has not been seen yet'
         when b.left_at is not null then format('its agent ended %s s ago and stopped its engines', round(extract(epoch from clock_timestamp() - b.left_at)))
         when clock_timestamp() - b.seen_at > (select llmgw_core.seconds('unreachable_after'))
         then format('silent for %s s', round(extract(epoch from clock_timestamp() - b.seen_at)))
         else n.intent_reason end as state_reason,
    b.left_at is not null as agent_ended
from llmgw_core.node n left join llmgw_core.beat b on b.node_id = n.id;
comment on view llmgw_core.node_state is 'The one place that turns silence and the operator''s word into a state. Silence counts from the last written beat, which a live agent''s is up to ten seconds ago (llmgw_core.beat_every) or its poll interval.';

create or replace view llmgw_core.gpu_state as
select g.node_id, g.uuid, l.fast,
    (l.fast->>'memory_foreign_mib')::bigint as memory_foreign_mib,
    (select jsonb_agg(jsonb_build_object('shard_id', c.shard_id, 'memory_mib', c.memory_mib) order by c.shard_id)
     from llmgw_core.gpu_claim c where c.node_id = g.node_id and c.gpu_uuid = g.uuid) as claims,
    case when g.partitioned then 'partitioned'
         when not g.healthy then 'unhealthy'
         when exists (select 1 from llmgw_core.gpu_claim c where c.node_id = g.node_id and c.gpu_uuid = g.uuid) then 'used'
         when l.fast->>'memory_foreign_mib' is null then 'unknown'
         -- On unified memory the operating system and everybody else are in it too: only the amount counts there.
         when (l.fast->>'memory_foreign_mib')::bigint > 512 and g.memory_kind is distinct from 'unified' then 'foreign'
         else 'free' end as state
from llmgw_core.gpu g
left join lateral (
    select x.gpus->g.uuid as fast from llmgw_core.node_load x
    where x.node_id = g.node_id and x.at > clock_timestamp() - (select llmgw_core.seconds('load_stale'))) l on true;
comment on view llmgw_core.gpu_state is 'Cards with their fast facts (null when stale) and one word: partitioned (its MIG slices are what can be given), unhealthy, used, foreign (held by processes outside llmgw, over 512 MiB), unknown (nobody said whether they hold it) or free.';

create or replace view llmgw.gpus as
select g.node_id as node, g.index, g.uuid, g.name, g.class, s.state, g.memory_mib as memory_mb,
    (s.fast->>'memory_used_mib')::bigint as memory_used_mb,
    (s.fast->>'utilization_percent')::double precision as utilization_percent,
    (s.fast->>'temperature_c')::double precision as temperature_c,
    (s.fast->>'power_w')::double precision as power_w,
    g.healthy, nullif(g.problems, '{}') as problems, g.numa,
    -- Other cards that NVLink leads to, by index.
    (select array_agg(p.index order by p.index) from llmgw_core.gpu p, jsonb_each_text(g.paths) x(peer, path)
     where p.node_id = g.node_id and p.parent is null and p.index::text = x.peer and x.path like 'NV%') as nvlink_peers,
    g.nearest_nic, g.nic_path, g.fabric_state,
    case when g.cluster_uuid is not null and g.fabric_state = 'completed' and g.cluster_uuid <> '00000000-0000-0000-0000-000000000000'
         then g.cluster_uuid end as domain,
    g.clique, g.bandwidth,
    (s.claims->0->>'shard_id')::bigint as shard,
    s.memory_foreign_mib as memory_foreign_mb, s.fast->'foreign_pids' as foreign_pids, g.memory_kind, g.vendor, g.parent, g.mig_profile, g.island,
    g.driver_version, g.cuda_version, g.pci_bus_id, g.paths, g.detail, nullif(g.findings, '[]') as findings,
    g.mark, g.mark_reason, g.mark_actor, g.mark_at
from llmgw_core.gpu g join llmgw_core.gpu_state s using (node_id, uuid);
comment on view llmgw.gpus is 'Every card and MIG slice (parent is the card it is cut from): what it is, how busy, how healthy, how it is wired, and which shard holds it. Null is unknown. memory_mb counts MiB.';

create or replace view llmgw.ib_ports as
select p.node_id as node, p.hca, p.port, p.state, p.phys_state, p.rate_gbps::double precision as rate_gbps, p.link_layer, p.active, p.fabric,
    case when p.key like 'ib:%' then format('SM %s (LID %s)', p.sm_guid, p.sm_lid)
         when p.key like 'roce:%' then 'RoCE ' || substr(p.key, 6) end as physical,
    p.sm_error, nullif(coalesce(l.fast->'errors', p.errors), '{}') as errors,
    (l.fast->>'tx_bytes')::bigint as tx_bytes, (l.fast->>'rx_bytes')::bigint as rx_bytes,
    p.key, p.node_guid, p.port_guid, p.lid, p.sm_lid, p.netdev, p.network, p.vlan, p.numa, p.board, p.firmware
from llmgw_core.ib_port p
left join lateral (
    select x.ports->concat_ws('/', p.hca, p.port) as fast from llmgw_core.node_load x
    where x.node_id = p.node_id and x.at > clock_timestamp() - (select llmgw_core.seconds('load_stale'))) l on true;
comment on view llmgw.ib_ports is 'InfiniBand and RoCE ports. fabric is declared in the agent''s settings, physical is what the port is really on (sm_error says why that is unknown); tx_bytes and rx_bytes are per second; errors are the counters that are not zero.';

create or replace view llmgw.nodes as
select n.id, s.state, s.state_reason,
    coalesce(g.total, 0) as gpu_total, coalesce(g.free, 0) as gpu_free, g.classes as gpu_classes,
    round(n.memory_effective_mib / 1024.0, 1)::double precision as memory_gb,
    coalesce(r.replicas, 0) as replicas, round(s.silent_s::numeric, 1)::double precision as last_seen_ago,
    n.hostname, n.mgmt_addr, n.os, n.agent_version,
    nullif(array_cat(coalesce(n.warnings, '{}'),
        case when abs(b.clock_skew_s) > 1 then array[format('clock is %s s off the database''s', round(b.clock_skew_s::numeric, 1))] else '{}' end), '{}') as warnings,
    d.free_gb as disk_free_gb, d.total_gb as disk_total_gb,
    f.fabrics, g.unhealthy as unhealthy_gpus,
    (select array_agg(distinct e.engine || case when e.version = '' then '' else ' ' || e.version end)
     from llmgw_core.engine e where e.node_id = n.id and e.state = 'installed') as engines,
    (select jsonb_agg(jsonb_strip_nulls(jsonb_build_object('engine', e.engine, 'version', e.version, 'state', e.state, 'error', e.error)))
     from llmgw_core.engine e where e.node_id = n.id and e.state <> 'installed') as provision,
    (select array_agg(distinct w.source) from llmgw_core.weight w where w.node_id = n.id and w.complete and w.source is not null) as models_on_disk,
    nullif(n.labels, '{}') as labels,
    case when l.at is not null then jsonb_strip_nulls(jsonb_build_object(
        'cpu_percent', l.cpu_percent, 'cpus', n.cpus_effective, 'load1', l.load1, 'load5', l.load5, 'load15', l.load15,
        'memory_used_bytes', l.memory_used_mib * 1048576, 'memory_total_bytes', n.memory_effective_mib * 1048576,
        'memory_percent', round(100.0 * l.memory_used_mib / n.memory_effective_mib, 1),
        'age_seconds', round(extract(epoch from clock_timestamp() - l.at), 1), 'pressure', l.pressure)) end as load,
    g.gpus, f.ib_ports, n.nvlink_domain, nullif(n.nvlink_state, 'none') as nvlink_state, n.nvlink_reason, n.imex->>'state' as imex, n.imex_channels,
    n.kernel, n.arch, n.cpu_model, n.cpus_host as cpus, n.cpus_effective, round(n.memory_host_mib / 1024.0, 1)::double precision as memory_host_gb,
    nullif(n.machine, '{}') as machine
from llmgw_core.node n
join llmgw_core.node_state s on s.node_id = n.id
left join llmgw_core.beat b on b.node_id = n.id
left join llmgw_core.node_load l on l.node_id = n.id and l.at > clock_timestamp() - (select llmgw_core.seconds('load_stale'))
left join lateral (
    select count(*) filter (where v.state <> 'partitioned')::int as total, count(*) filter (where v.state = 'free')::int as free,
        array_agg(distinct v.class) filter (where v.state <> 'partitioned') as classes,
        array_agg(format('gpu %s: %s', coalesce(v.index::text, v.uuid), coalesce(array_to_string(v.problems, '; '), 'unhealthy')) order by v.index) filter (where not v.healthy) as unhealthy,
        jsonb_agg(jsonb_strip_nulls(to_jsonb(v) - '{node,paths,detail,findings}'::text[]) order by v.index, v.parent nulls first, v.uuid) as gpus
    from llmgw.gpus v where v.node = n.id having count(*) > 0) g on true
left join lateral (
    select array_agg(distinct coalesce(v.fabric, v.physical)) filter (where v.active and coalesce(v.fabric, v.physical) is not null) as fabrics,
        jsonb_agg(jsonb_strip_nulls(to_jsonb(v) - 'node') order by v.hca, v.port) as ib_ports
    from llmgw.ib_ports v where v.node = n.id having count(*) > 0) f on true
left join lateral (
    select count(distinct x.replica_id)::int as replicas from llmgw_core.shard x
    where x.node_id = n.id and x.state not in ('stopped', 'failed')) r on true
left join lateral (
    select round(sum(x.free_mib) / 1024.0, 1)::double precision as free_gb, round(sum(x.total_mib) / 1024.0, 1)::double precision as total_gb
    from llmgw_core.disk x where x.node_id = n.id and x.kind = 'local') d on true
order by n.id;
comment on view llmgw.nodes is 'Every node as llmgwctl nodes shows it. state: ready, cordoned, draining (the operator''s word), unreachable or lost (silence, by the database''s clock). Null is unknown; last_seen_ago is seconds; disks are the local ones only.';

create or replace view llmgw.engines as
select node_id as node, engine, nullif(version, '') as version, nullif(path, '') as path, state, error from llmgw_core.engine;
comment on view llmgw.engines is 'Inference engines found on each node.';

create or replace view llmgw.weights as
select node_id as node, source, path, bytes, complete,
    exists (select 1 from llmgw_core.model m where m.source = w.source) as in_catalog,
    name, revision, format, reason, shared, filer, managed, facts, filer_path, shared_bytes
from llmgw_core.weight w;
comment on view llmgw.weights is 'Model weights on the nodes'' disks, with what their headers say of the model. shared: on a filer, the same bytes for every node that mounts it, at the same filer_path.';

create or replace view llmgw.gpu_capacity as
select class, count(*)::int as total, count(*) filter (where g.state = 'used')::int as used,
    count(*) filter (where g.state = 'free' and s.state = 'ready')::int as free,
    count(*) filter (where g.state = 'unhealthy')::int as unhealthy,
    count(*) filter (where g.state in ('foreign', 'unknown') or (g.state = 'free' and s.state <> 'ready'))::int as unavailable
from llmgw.gpus g join llmgw_core.node_state s on s.node_id = g.node
where g.state <> 'partitioned'
group by class order by class;
comment on view llmgw.gpu_capacity is 'Cards per class. free counts ready nodes only; unavailable is free cards on other nodes and cards that foreign processes hold or may hold; unhealthy ones are neither used nor free.';
