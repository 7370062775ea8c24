-- name: nodes
-- One row per node for gauges.
select id, state, last_seen_ago, disk_free_gb, replicas, (load->>'cpu_percent')::double precision as cpu_percent,
    (load->>'load1')::double precision as load1, (load->>'memory_percent')::double precision as memory_percent
from llmgw.nodes;

-- name: capacity
-- Cards per class.
select class, total, used, free, unhealthy from llmgw.gpu_capacity;

-- name: gpus
-- One row per card.
select node, index, class, healthy, memory_mb, memory_used_mb, utilization_percent, temperature_c, power_w from llmgw.gpus;

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
select role from llmgw.controllers where alive;
