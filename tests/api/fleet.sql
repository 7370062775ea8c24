-- A small fleet as agents and the leader would have left it: 3 nodes, 4 cards, 2 replicas.
insert into llmgw_core.node (id, intent, hostname, mgmt_addr, memory_effective_mib, cpus_effective, labels, warnings)
values ('n1', 'ready', 'host-one', '10.0.0.1', 65536, 16, '{"role": "gpu"}', array['no AVX2']),
       ('n2', 'cordoned', null, '10.0.0.2', null, null, '{}', null),
       ('n3', 'ready', null, null, null, null, '{}', null);
insert into llmgw_core.beat (node_id, seen_at, applied_gen, clock_skew_s)
values ('n1', clock_timestamp(), 0, 0.01), ('n2', clock_timestamp(), 0, 7.5), ('n3', clock_timestamp() - interval '1 h', 0, 0);
-- However long a test takes, n1 and n2 are not silent.
update llmgw_core.setting set value = 600 where name = 'unreachable_after';
update llmgw_core.setting set value = 1200 where name = 'lost_after';
insert into llmgw_core.gpu (node_id, uuid, index, name, class, memory_mib, findings)
select 'n1', 'GPU-' || i, i, 'NVIDIA H100 80GB HBM3', 'H100', 81559,
       case when i = 3 then '[{"code": "xid_79", "text": "Xid 79: fell off the bus", "unhealthy": true}]' else '[]' end::jsonb
from generate_series(0, 3) i;
insert into llmgw_core.node_load (node_id, at, cpu_percent, load1, memory_used_mib, gpus)
values ('n1', clock_timestamp(), 12.5, 1.5, 1024, '{"GPU-0": {"memory_used_mib": 70000, "memory_foreign_mib": 0, "utilization_percent": 93, "power_w": 512.25}, "GPU-1": {"memory_foreign_mib": 0}, "GPU-2": {"memory_foreign_mib": 0}}');
insert into llmgw_core.engine (node_id, engine, version, state) values ('n1', 'vllm', '0.32.0', 'installed'), ('n1', 'sglang', '1.0', 'provisioning');
insert into llmgw_core.disk (node_id, mount, filesystem, kind, total_mib, free_mib) values ('n1', '/', 'ext4', 'local', 1048576, 524288);
insert into llmgw_core.weight (node_id, source, path, bytes, complete) values ('n1', 'file:/models/tiny.gguf', '/models/tiny.gguf', 123456, true);
insert into llmgw_core.replica (model, profile, fingerprint, state, launch, endpoint, term, pool) values
    ('tiny', 'cpu', 'old', 'ready', 1, 'http://10.0.0.1:20000', 1, 'gpus'), ('tiny', null, null, 'pending', 0, null, 1, null);
insert into llmgw_core.shard (replica_id, launch, rank, node_id, port, state, spec, cpu_cores, memory_bytes, fetching)
    select id, 1, 0, 'n1', 20000, 'ready', '{}', 0.5, 1000000, '{"source": "hf:a/b", "bytes_done": 5, "bytes_total": 10}' from llmgw_core.replica where launch = 1;
insert into llmgw_core.gpu_claim (shard_id, node_id, gpu_uuid) select id, 'n1', 'GPU-0' from llmgw_core.shard;
insert into llmgw_core.router_use (router_id, replica_id, in_flight, last_used_at, reported_at)
    select gen_random_uuid(), id, 0, clock_timestamp() - interval '90 s', clock_timestamp() from llmgw_core.replica where launch = 1;
with d as (insert into llmgw_core.decision (term, kind, model, reason, detail) values (1, 'attempt', 'tiny', 'not placed', '{"score": 1}') returning id, at),
     r as (insert into llmgw_core.rejection (decision_id, at, position, model, profile, node_id, code, reason, need, have)
           select id, at, 0, 'tiny', 'cpu', 'n2', 'node_cordoned', 'the node is cordoned', 'ready', null from d)
insert into llmgw_core.attempt (model, decision_id, decision_at, checked_at, placed, digest)
    select 'tiny', id, at, at, false, '\x00' from d;
