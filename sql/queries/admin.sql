-- name: summary
-- The fleet at a glance.
select jsonb_strip_nulls(to_jsonb(v)) as row from llmgw.summary v;

-- name: controllers
-- A page of control and router processes, oldest first.
select jsonb_strip_nulls(to_jsonb(v)) as row, jsonb_build_array(v.started_at, v.id) as key
from llmgw.controllers v
where $1::jsonb is null or (v.started_at, v.id) > (($1::jsonb->>0)::timestamptz, ($1::jsonb->>1)::uuid)
order by v.started_at, v.id limit $2::int;

-- name: nodes
-- A page of nodes.
select jsonb_strip_nulls(to_jsonb(v)) as row, jsonb_build_array(v.id) as key
from llmgw.nodes v where $1::jsonb is null or v.id > $1::jsonb->>0
order by v.id limit $2::int;

-- name: node
-- Everything about one node.
select jsonb_strip_nulls(to_jsonb(v) || jsonb_build_object(
    'gpus', (select jsonb_agg(to_jsonb(g) - 'node' order by g.index, g.parent nulls first, g.uuid) from llmgw.gpus g where g.node = v.id),
    'disks', (select jsonb_agg(jsonb_build_object('mount', d.mount, 'filesystem', d.filesystem, 'kind', d.kind, 'source', d.source,
            'total_gb', round(d.total_mib / 1024.0, 1), 'free_gb', round(d.free_mib / 1024.0, 1), 'holds_weights', d.holds_weights) order by d.mount)
        from llmgw_core.disk d where d.node_id = v.id),
    'imex_detail', (select n.imex from llmgw_core.node n where n.id = v.id)))
from llmgw.nodes v where v.id = $1::text;

-- name: gpu_mark
-- The operator's word on a card.
select llmgw.gpu_mark_v1($1::text, $2::text, $3::text, $4::text, $5::text);

-- name: gpu_forget
-- Removes the row of a card that was taken out.
select llmgw.gpu_forget_v1($1::text, $2::text, $3::text);

-- name: doctor
-- A page of checks of nodes, of one node where asked.
select jsonb_strip_nulls(to_jsonb(v)) as row, jsonb_build_array(v.node, v."position", v.name) as key
from llmgw.doctor v
where ($1::jsonb is null or (v.node, v."position", v.name) > ($1::jsonb->>0, ($1::jsonb->>1)::int, $1::jsonb->>2)) and ($3::text is null or v.node = $3)
order by v.node, v."position", v.name limit $2::int;

-- name: events
-- A page of changes of devices, newest first.
select jsonb_strip_nulls(to_jsonb(v)) as row, jsonb_build_array(v.id) as key
from llmgw.node_events v
where ($1::jsonb is null or v.id < ($1::jsonb->>0)::bigint) and ($3::text is null or v.node = $3)
  and ($4::double precision is null or v.at > clock_timestamp() - make_interval(secs => $4))
order by v.id desc limit $2::int;

-- name: nvlink
-- A page of nodes with multi-node NVLink.
select jsonb_strip_nulls(to_jsonb(v)) as row, jsonb_build_array(v.domain, v.node) as key
from llmgw.nvlink v
where $1::jsonb is null or (v.domain, v.node) > ($1::jsonb->>0, $1::jsonb->>1)
order by v.domain, v.node limit $2::int;

-- name: fabrics
-- A page of physical fabrics, or one of them by its id or key.
select jsonb_strip_nulls(to_jsonb(v)) as row, jsonb_build_array(v.key) as key
from llmgw.fabrics v
where ($1::jsonb is null or v.key > $1::jsonb->>0) and ($3::text is null or v.id = $3 or v.key = $3)
order by v.key limit $2::int;

-- name: fabric_version
-- Which scan printed the map that is kept, and how long ago; no row without any.
select extract(epoch from f.output_at)::text as version, round(extract(epoch from clock_timestamp() - f.output_at), 1)::double precision as age_s
from llmgw_core.fabric_scan f where f.key = $1::text and f.output is not null;

-- name: fabric_output
-- What the latest scan that printed anything printed, and its mark in caches.
select f.output, extract(epoch from f.output_at)::text as version from llmgw_core.fabric_scan f where f.key = $1::text and f.output is not null;

-- name: fabric_ports
-- The ports of agents: a scan names hosts by their GUIDs. All of them, since a port that is down is on no fabric;
-- of two nodes that claim one GUID (a node that got a new name) the one that is heard of comes first.
select p.node_id as node, p.hca, p.port, p.node_guid, p.port_guid, p.state, p.phys_state, p.rate_gbps::double precision as gbps, p.key,
    s.state not in ('unreachable', 'lost') as heard,
    (l.ports->concat_ws('/', p.hca, p.port)->>'tx_bytes')::bigint * 8 as tx_bps,
    (l.ports->concat_ws('/', p.hca, p.port)->>'rx_bytes')::bigint * 8 as rx_bps,
    nullif(coalesce(l.ports->concat_ws('/', p.hca, p.port)->'errors', p.errors), '{}') as errors
from llmgw_core.ib_port p
join llmgw_core.node_state s on s.node_id = p.node_id
left join llmgw_core.node_load l on l.node_id = p.node_id and l.at > clock_timestamp() - (select llmgw_core.seconds('load_stale'))
where p.link_layer = 'InfiniBand' or p.key = $1::text
order by s.state in ('unreachable', 'lost'), p.node_id, p.hca, p.port;

-- name: fabric_managers
-- GUIDs of the subnet managers that the ports of a fabric follow, or followed within a day.
select array_agg(distinct x.guid order by x.guid) filter (where x.guid is not null) from (
    select p.sm_guid as guid from llmgw_core.ib_port p where p.key = $1::text
    union all
    select unnest(array[e.was, e.now]) from llmgw_core.node_event e
    join llmgw_core.ib_port p on p.node_id = e.node_id and e.object = concat_ws('/', p.hca, p.port)
    where p.key = $1::text and e.kind = 'subnet manager' and e.at > clock_timestamp() - interval '1 day') x;

-- name: fabric_scan
-- Asks one node on the fabric to map it.
select llmgw.fabric_scan_v1($1::text, $2::text);

-- name: models
-- A page of models, or one of them.
select jsonb_strip_nulls(to_jsonb(v)) as row, jsonb_build_array(v.name) as key
from llmgw.models v
where ($1::jsonb is null or v.name > $1::jsonb->>0) and ($3::text is null or v.name = $3)
order by v.name limit $2::int;

-- name: prices
-- A page of prices, newest first within a model, of one model where asked.
select jsonb_strip_nulls(to_jsonb(v)) as row, jsonb_build_array(v.model, v.since) as key
from llmgw.prices v
where ($1::jsonb is null or v.model > $1::jsonb->>0 or (v.model = $1::jsonb->>0 and v.since < ($1::jsonb->>1)::timestamptz))
  and ($3::text is null or v.model = $3)
order by v.model, v.since desc limit $2::int;

-- name: replicas
-- A page of replicas that are not gone, of one model where asked, or one of them.
select jsonb_strip_nulls(to_jsonb(v)) as row, jsonb_build_array(v.id) as key
from llmgw.replicas v
where ($1::jsonb is null or v.id > ($1::jsonb->>0)::bigint) and ($3::text is null or v.model = $3) and ($4::bigint is null or v.id = $4)
order by v.id limit $2::int;

-- name: weights
-- A page of weights on the nodes' disks.
select jsonb_strip_nulls(to_jsonb(v)) as row, jsonb_build_array(v.node, v.path) as key
from llmgw.weights v
where $1::jsonb is null or (v.node, v.path) > ($1::jsonb->>0, $1::jsonb->>1)
order by v.node, v.path limit $2::int;

-- name: decisions
-- A page of decisions, newest first; rows of one transaction share a time, so the id decides between them (G04).
select jsonb_strip_nulls(to_jsonb(v)) as row, jsonb_build_array(v.at, v.id) as key
from llmgw.decisions v
where ($1::jsonb is null or (v.at, v.id) < (($1::jsonb->>0)::timestamptz, ($1::jsonb->>1)::bigint))
  and ($3::text is null or v.model = $3) and ($4::text is null or v.node = $4)
  and ($5::double precision is null or v.at > clock_timestamp() - make_interval(secs => $5))
order by v.at desc, v.id desc limit $2::int;

-- name: explain_placement
-- What the latest attempt to place a model came to, with every refusal.
select jsonb_strip_nulls(to_jsonb(p) || jsonb_build_object('placed', coalesce(p.placed, false), 'rejections',
    (select jsonb_agg(to_jsonb(r) - 'model' - 'at') from llmgw.rejections r where r.model = p.model))) as row
from llmgw.placements p where p.model = $1::text;

-- name: replace
-- Marks replicas to be replaced, or takes the marks back.
select llmgw.replace_v1($1::text, $2::text, $3::bigint, $4::boolean, $5::boolean, $6::boolean);

-- name: fit
-- What an estimate of a model's memory is made of: its profiles, what its weights say where a node has them (whole ones first), and the cards.
select jsonb_build_object('model', m.name, 'source', m.source,
    'profiles', (select coalesce(jsonb_agg(jsonb_build_object('name', p.name, 'engine', p.engine, 'args', p.args, 'env', p.env, 'gpus', p.gpus,
        'shards', p.shards, 'fabric', p.fabric, 'gpu_class', p.gpu_class, 'gpu_memory_mib', p.gpu_memory_mib, 'share', p.share) order by p.position), '[]')
        from llmgw_core.profile p where p.model = m.name),
    'weights', (select to_jsonb(x) from (
        select w.node_id as node, w.path, w.bytes, w.complete, w.reason, w.facts, w.complete and w.facts is not null as usable
        from llmgw_core.weight w where w.source = m.source and (w.managed or w.source like 'file:%')
        order by usable desc, w.node_id, w.path limit 1) x),
    'cards', (select coalesce(jsonb_agg(jsonb_build_object('class', c.class, 'mib', c.mib, 'count', c.cards) order by c.class), '[]') from (
        select g.class, min(g.memory_mib) as mib, count(*)::int as cards from llmgw_core.gpu g
        where not g.partitioned and g.index is not null and g.missing_since is null group by g.class) c))
from llmgw_core.model_name n join llmgw_core.model m on m.name = n.model where n.name = $1::text;

-- name: node_set_intent
-- The operator's word on a node.
select llmgw.set_node_intent($1::text, $2::text, $3::text, $4::text);

-- name: node_enroll
-- Keeps the hash of an enrolment token.
select llmgw.node_enroll_v1($1::text, $2::text, $3::bytea, $4::int, $5::double precision);

-- name: node_revoke
-- Locks a node's agent out.
select llmgw.node_revoke_v1($1::text, $2::text);

-- name: model_remove
-- Takes a model out of the catalog.
select llmgw.model_remove_v1($1::text, $2::text);

-- name: model_replicas
-- Replicas of a model that are not gone.
select array_agg(r.id order by r.id) from llmgw_core.replica r where r.model = $1::text and r.state <> 'gone';

-- name: scale
-- How many replicas a model has; answers what is in force.
select llmgw.scale_v1($1::text, $2::text, $3::int, $4::int, $5::double precision);

-- name: capacity
-- A page of measurements, of one model where asked.
select jsonb_strip_nulls(to_jsonb(v)) as row, jsonb_build_array(v.model, v.profile, coalesce(v.node_class, '')) as key
from llmgw.capacity v
where ($1::jsonb is null or (v.model, v.profile, coalesce(v.node_class, '')) > ($1::jsonb->>0, $1::jsonb->>1, $1::jsonb->>2)) and ($3::text is null or v.model = $3)
order by v.model, v.profile, coalesce(v.node_class, '') limit $2::int;

-- name: capacity_put
-- Keeps a measurement, and answers it.
select llmgw.capacity_put_v1($1::text, $2::text, $3::jsonb);

-- name: log_target
-- Whether a node can answer for a log: its state, and whether the shard was ever its own.
select s.state, s.state_reason,
    $2::bigint is null or exists (select 1 from llmgw_core.shard x where x.id = $2 and x.node_id = s.node_id) as has_shard
from llmgw_core.node_state s where s.node_id = $1::text;

-- name: log_ask
-- Asks an agent for a log tail.
select llmgw_core.ask_log_v1($1::text, $2::bigint, $3::int, $4::bigint);

-- name: log_answer
-- The agent's answer, when it has come.
select a.answered_at is not null as answered, a.answer, a.answer_offset from llmgw_core.ask a where a.id = $1::bigint;

-- name: weight_orphans
-- A page of downloads that nobody needs, of one node where asked.
select jsonb_strip_nulls(to_jsonb(v)) as row, jsonb_build_array(v.node, v.path) as key
from llmgw.weight_orphans v
where ($1::jsonb is null or (v.node, v.path) > ($1::jsonb->>0, $1::jsonb->>1)) and ($3::text is null or v.node = $3)
order by v.node, v.path limit $2::int;

-- name: weights_collect
-- Asks agents to remove downloads that nobody needs.
select llmgw.weights_collect_v1($1::text, $2::text, $3::text[]);

-- name: weights_collected
-- The answers that have come.
select a.id, a.answer from llmgw_core.ask a where a.id = any ($1::bigint[]) and a.answered_at is not null;

-- name: ask_withdraw
-- Takes back what nobody has answered.
select llmgw_core.ask_withdraw_v1($1::bigint[]);

-- name: cursor_secret
-- What page cursors are signed with: the same for every controller.
select s.value from llmgw_core.secret s where s.name = 'cursor';
