-- A fleet at rest, as one psycopg call: %(nodes)s nodes of 8 cards, %(replicas)s ready replicas on a card each, %(models)s models.
set session_replication_role = replica;

insert into llmgw_core.node (id, hostname, mgmt_addr, arch, cpu_flags, cpus_host, cpus_effective, memory_host_mib, memory_effective_mib, labels, host_reported_at, alloc_gen)
select format('n%%s', to_char(i, 'FM00000')), 'h' || i, '10.0.0.1', 'x86_64', array['avx2', 'avx512f'], 128, 128, 1024 * 1024, 1024 * 1024,
    jsonb_build_object('rack', 'r' || i / 16), now(), 4
from generate_series(0, %(nodes)s - 1) i;
insert into llmgw_core.beat (node_id, seen_at) select id, now() + interval '1 hour' from llmgw_core.node;
insert into llmgw_core.gpu (node_id, uuid, index, name, class, memory_mib, numa, driver_version, cuda_version, island, vendor, detail)
select n.id, n.id || '-' || g, g, 'NVIDIA H100', 'H100', 81559, g / 4, '570.1', '12.8', 0, 'nvidia', '{"serial": "x"}'
from llmgw_core.node n, generate_series(0, 7) g;
insert into llmgw_core.node_load (node_id, at, gpus)
select n.id, now() + interval '1 hour', (select jsonb_object_agg(n.id || '-' || g, jsonb_build_object('memory_used_mib', 70000, 'memory_foreign_mib', 0,
    'utilization_percent', 50, 'temperature_c', 60, 'power_w', 500)) from generate_series(0, 7) g)
from llmgw_core.node n;
insert into llmgw_core.engine (node_id, engine, version) select id, 'vllm', '0.11.0' from llmgw_core.node;
insert into llmgw_core.disk (node_id, mount, filesystem, kind, total_mib, free_mib, holds_weights) select id, '/var', 'ext4', 'local', 8000000, 4000000, true from llmgw_core.node;
insert into llmgw_core.ib_port (node_id, hca, port, active, key) select n.id, 'mlx5_' || p, 1, true, 'ib:01' from llmgw_core.node n, generate_series(0, 7) p;

insert into llmgw_core.model (name, source, min_replicas, max_replicas, origin, updated_by)
select 'm' || i, 'hf:bench/m' || i, %(replicas)s / %(models)s, %(replicas)s / %(models)s, 'api', 'bench' from generate_series(0, %(models)s - 1) i;
insert into llmgw_core.model_name (name, model, is_alias) select name, name, false from llmgw_core.model;
insert into llmgw_core.profile (model, name, position, engine, gpu_class, gpus, gpu_memory_mib, cpus, memory_mib, fingerprint)
select name, 'p', 0, 'vllm', 'H100', 1, 70000, 8, 32768, 'f' from llmgw_core.model;
insert into llmgw_core.weight (node_id, source, path, bytes, complete, facts)
select n.id, m.source, '/w/' || m.name, 8e9, true, '{}' from (select id, row_number() over (order by id) as i from llmgw_core.node) n
cross join generate_series(0, 1) o join llmgw_core.model m on m.name = 'm' || (n.i + o * 7) %% %(models)s;

insert into llmgw_core.replica (model, profile, fingerprint, state, launch, term, ready_at, state_at)
select 'm' || i %% %(models)s, 'p', 'f', 'ready', 1, 0, now() - interval '1 hour', now() - interval '1 hour' from generate_series(0, %(replicas)s - 1) i;
insert into llmgw_core.shard (replica_id, launch, rank, node_id, state, port, cpus, memory_mib, spec)
select r.id, 1, 0, format('n%%s', to_char((r.id - 1) %% %(nodes)s, 'FM00000')), 'ready', 20000 + (r.id - 1) / %(nodes)s, 8, 32768, '{}' from llmgw_core.replica r;
insert into llmgw_core.gpu_claim (shard_id, node_id, gpu_uuid) select s.id, s.node_id, s.node_id || '-' || s.port - 20000 from llmgw_core.shard s;

insert into llmgw_core.controller (id, role, hostname, pid, version, seen_at)
select ('00000000-0000-0000-0000-00000000000' || i)::uuid, 'router', 'h', 1, '0', now() + interval '1 hour' from generate_series(1, 2) i;
insert into llmgw_core.router_use (router_id, replica_id, in_flight, last_used_at, reported_at)
select c.id, r.id, 0, now() - interval '10 min', now() from llmgw_core.controller c, llmgw_core.replica r;
insert into llmgw_core.demand (router_id, model, waiting, in_flight, peak, peak_since, reported_at)
select c.id, m.name, 0, 0, 0, now(), now() from llmgw_core.controller c, llmgw_core.model m;
update llmgw_core.setting set value = 0 where name = 'guard';
set session_replication_role = origin;
