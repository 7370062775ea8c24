create or replace view llmgw.node_events as
select e.id, e.at, e.node_id as node, e.kind, e.object, e.was, e.now, e.evidence from llmgw_core.node_event e;
comment on view llmgw.node_events is 'Every change of a node''s devices with its evidence: cards and their health and marks, fabric state, NVLink domain, IMEX, ports, subnet managers.';

create or replace view llmgw.fabrics as
with ports as (
    select v.*, s.state as node_state from llmgw.ib_ports v join llmgw_core.node_state s on s.node_id = v.node),
named as (
    select p.key, array_agg(distinct p.fabric order by p.fabric) filter (where p.fabric is not null) as declared,
        count(distinct p.node)::int as nodes, count(*) filter (where p.active)::int as ports_active, count(*)::int as ports_total,
        max(p.rate_gbps) as rate_gbps, min(p.physical) as physical
    from ports p where p.key is not null group by p.key),
split as (
    -- One declared name over several physical fabrics: a model that spans nodes must not trust the name.
    select p.fabric, array_agg(distinct p.key order by p.key) as keys from ports p
    where p.fabric is not null and p.key is not null group by p.fabric having count(distinct p.key) > 1)
select translate(n.key, ':/', '-_') as id, n.key, coalesce(array_to_string(n.declared, ', '), n.physical, n.key) as label,
    case when n.key like 'roce:%' then 'RoCE' else 'InfiniBand' end as kind, n.declared, n.physical,
    n.nodes, n.ports_active, n.ports_total, n.rate_gbps,
    f.scanned_at, f.scanner as scanned_by, f.took_ms, f.error, f.asked_at is not null and f.scanned_at is null as scanning,
    nullif(array_cat(
        case when cardinality(n.declared) > 1 then array[format('declared under %s names: %s', cardinality(n.declared), array_to_string(n.declared, ', '))] else '{}' end,
        array(select format('the name %s is declared on %s physical fabrics: %s', s.fabric, cardinality(s.keys), array_to_string(s.keys, ', '))
              from split s where n.key = any (s.keys))), '{}') as problems
from named n left join llmgw_core.fabric_scan f on f.key = n.key
order by n.key;
comment on view llmgw.fabrics is 'Physical fabrics (one per master subnet manager, or per RoCE network) against the names that agents'' settings declare, with the latest scan. rate_gbps is the fastest port.';

create or replace view llmgw.nvlink as
with trays as (
    select n.id, n.nvlink_state, n.nvlink_domain, n.nvlink_reason, n.imex->>'state' as imex, n.imex_channels, s.state,
        llmgw_core.imex_fault(n.imex, n.imex_channels) as imex_fault,
        (select count(*)::int from llmgw_core.gpu g where g.node_id = n.id and g.parent is null and g.missing_since is null) as gpus
    from llmgw_core.node n join llmgw_core.node_state s on s.node_id = n.id
    where n.nvlink_state not in ('none', 'unknown'))
select coalesce(t.nvlink_domain, '') as domain, t.id as node, t.state as node_state, t.nvlink_state as state, t.gpus, t.imex, t.imex_channels,
    t.nvlink_state = 'joined' and t.imex_fault is null and t.state = 'ready' as usable,
    array_to_string(array_remove(array[
        case when t.nvlink_state <> 'joined' then coalesce(t.nvlink_reason, t.nvlink_state) end,
        t.imex_fault,
        case when t.state <> 'ready' then 'node is ' || t.state end], null), '; ') as why_not
from trays t order by 1, 2;
comment on view llmgw.nvlink is 'Nodes with multi-node NVLink by domain (ClusterUUID.CliqueId), and what keeps each one out of it. Nodes without any are not listed.';
