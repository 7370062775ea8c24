create or replace view llmgw.gang_capacity as
with whole as (
    -- A node of which every card may be given; more than one class of cards in it makes no gang.
    select n.id, s.state = 'ready' and bool_and(g.state in ('free', 'partitioned')) and count(distinct c.class) = 1 as free, min(c.class) as class
    from llmgw_core.node n
    join llmgw_core.node_state s on s.node_id = n.id
    join llmgw_core.gpu c on c.node_id = n.id
    join llmgw_core.gpu_state g on g.node_id = c.node_id and g.uuid = c.uuid
    group by n.id, s.state),
member as (
    select 'nvlink-domain' as kind, v.domain as key, null::text as name, v.node as node_id from llmgw.nvlink v where v.usable
    union all
    select distinct 'fabric', p.key, p.fabric, p.node_id from llmgw_core.ib_port p where p.active and p.key is not null),
named as (
    select kind, key, string_agg(distinct name, ', ' order by name) as name, array_agg(distinct node_id) as nodes from member group by kind, key),
counted as (
    select m.kind, m.key, m.name, w.class, count(*) as nodes, count(*) filter (where w.free) as free
    from named m join whole w on w.id = any (m.nodes) group by m.kind, m.key, m.name, w.class)
select kind, key, name, sum(nodes)::int as nodes, sum(free)::int as whole_free, max(free)::int as largest_gang,
    (array_agg(class order by free desc, class) filter (where free > 0))[1] as class
from counted group by kind, key, name order by kind desc, key;
comment on view llmgw.gang_capacity is 'Nodes with cards that can work together, by NVLink domain and physical fabric: how many, how many of them are whole and free, and the largest gang of whole nodes with cards of one class that would fit now. Free cards elsewhere are no capacity for a model that spans nodes.';
