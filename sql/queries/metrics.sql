-- name: nodes
-- One row per node for gauges.
select id, state, last_seen_ago, disk_free_gb, replicas, (load->>'cpu_percent')::double precision as cpu_percent,
    (load->>'load1')::double precision as load1, (load->>'memory_percent')::double precision as memory_percent,
    load->'pressure' as pressure, imex = 'READY' as imex_up
from llmgw.nodes;

-- name: capacity
-- Cards per class.
select class, total, used, free, unhealthy from llmgw.gpu_capacity;

-- name: gpus
-- One row per card and slice. The label of a card is its index, and its UUID where another one has that index: slices share
-- it with their card, and a missing card with the one that the driver counts in its place.
select node, class, healthy, memory_mb, memory_used_mb, memory_foreign_mb, utilization_percent, temperature_c, power_w,
    case when index is not null and row_number() over (partition by node, index
        order by parent is not null, coalesce(findings @> '[{"code": "missing"}]', false), uuid) = 1 then index::text else uuid end as gpu,
    -- As the agent judges it: completed, with success, in a domain.
    case when fabric_state is not null then domain is not null and lower(detail->'fabric'->>'status') is not distinct from 'success' end as nvlink_joined,
    detail->'ecc'->'corrected' as ecc_corrected, detail->'ecc'->'uncorrected' as ecc_uncorrected
from llmgw.gpus;

-- name: ports
-- One row per fabric port; its fabric is the declared one, else the physical one, else ''.
select node, hca, port, coalesce(fabric, key, '') as fabric, coalesce(state, '') as state, tx_bytes, rx_bytes, errors from llmgw.ib_ports;

-- name: checks
-- How many checks of each node came to what.
select node, result, count(*)::int as checks from llmgw.doctor where node not like 'controller %' group by node, result;

-- name: models
-- One row per model of the catalog.
select m.name, m.min_replicas, coalesce(not p.placed and m.ready_replicas < m.min_replicas, false) as unplaceable
from llmgw.models m left join llmgw.placements p on p.model = m.name;

-- name: replicas
-- One row per replica that is not gone.
select id, model, state, idle_seconds, restarts from llmgw.replicas;

-- name: leases
-- Duties.
select name, term, held from llmgw.leases;

-- name: controllers
-- Live processes.
select role, catalog from llmgw.controllers where alive;
