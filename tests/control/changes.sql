update llmgw_core.node set labels = '{"rack": "r9"}' where id = 'n1'
update llmgw_core.node set intent = 'cordoned', intent_reason = 'by hand' where id = 'n1'
update llmgw_core.node set cpu_flags = '{avx512}', cpus_effective = 3, memory_effective_mib = 70000 where id = 'n2'
update llmgw_core.node set port_first = 20001, mgmt_addr = '10.0.0.9', machine = '{"provision": ["vllm"]}' where id = 'n2'
update llmgw_core.node set nvlink_state = 'joined', nvlink_domain = 'u.1', imex = '{"state": "READY"}', imex_channels = 1 where id = 'n2'
update llmgw_core.node set alloc_gen = alloc_gen + 1 where id = 'n2'
update llmgw_core.gpu set findings = '[{"code": "xid_79", "text": "Xid 79", "unhealthy": true}]' where uuid = 'n2-0'
update llmgw_core.gpu set class = 'H200', island = 3, numa = 1, driver_version = '1', nearest_nic = 'x' where node_id = 'n2'
update llmgw_core.gpu set partitioned = true where uuid = 'n2-1'
update llmgw_core.gpu set node_id = 'n4' where uuid = 'n2-2'
insert into llmgw_core.gpu (node_id, uuid, index, name, class) values ('n4', 'new', 9, 'H100', 'H100')
delete from llmgw_core.gpu where uuid = 'n2-3'
update llmgw_core.node_load set gpus = jsonb_set(gpus, '{n3-0,memory_foreign_mib}', '700') where node_id = 'n3'
update llmgw_core.node_load set gpus = gpus #- '{n3-0,memory_foreign_mib}' where node_id = 'n3'
update llmgw_core.node_load set gpus = null where node_id = 'n3'
update llmgw_core.node_load set at = at - interval '10 min' where node_id = 'n4'
update llmgw_core.node_load set at = clock_timestamp() where node_id = 'n4'
update llmgw_core.beat set seen_at = seen_at - interval '1 hour' where node_id = 'n3'
update llmgw_core.beat set seen_at = clock_timestamp() where node_id = 'n3'
insert into llmgw_core.engine (node_id, engine, version) values ('n3', 'vllm', '9')
update llmgw_core.engine set state = 'failed', error = 'no luck' where engine = 'vllm'
delete from llmgw_core.engine where node_id = 'n3' and engine = 'llamacpp'
insert into llmgw_core.weight (node_id, source, path, bytes, complete, facts) values ('n3', 'file:/m.gguf', '/m.gguf', 5368709120, true, '{}')
update llmgw_core.weight set bytes = 1048576
update llmgw_core.weight set complete = false
update llmgw_core.weight set complete = true
delete from llmgw_core.weight
insert into llmgw_core.disk (node_id, mount, filesystem, kind, free_mib, holds_weights) values ('n3', '/w', 'ext4', 'local', 77, true)
update llmgw_core.disk set free_mib = 5
delete from llmgw_core.disk
insert into llmgw_core.ib_port (node_id, hca, port, active, key, fabric) values ('n3', 'mlx5_0', 1, true, 'ib:01', 'a')
update llmgw_core.ib_port set key = 'ib:02'
delete from llmgw_core.ib_port
update llmgw_core.setting set value = 7 where name = 'min_residence'
delete from llmgw_core.setting where name = 'min_residence'
with o as (insert into llmgw_core.pool (name, labels, origin) values ('o', '{"rack": ["r1"]}', 'api') returning name) update llmgw_core.profile set pool = o.name, gpus = 1, args = '{-c,5}' from o where model = 'b'
update llmgw_core.profile set shards = 2 where model = 'a'
update llmgw_core.pool set labels = '{"rack": ["r2"]}'
update llmgw_core.model set priority = 9, min_replicas = 0, idle_timeout_s = 5 where name = 'b'
delete from llmgw_core.model where name = 'c'
update llmgw_core.replica set state = 'draining', drain_deadline = clock_timestamp() where id = 1
update llmgw_core.replica set replace_asked = clock_timestamp(), replace_force = true, room_for = 'a' where id = 2
update llmgw_core.replica set error = 'odd', restarts = 5, backoff_until = clock_timestamp() where id = 2
update llmgw_core.shard set state = 'failed', error = 'died', log_tail = 'last words' where replica_id = 2
update llmgw_core.shard set port = 20077, cpus = 2, memory_mib = 512 where replica_id = 1
update llmgw_core.shard set node_id = 'n4' where replica_id = 1
update llmgw_core.replica set launch = launch + 1 where id = 1
delete from llmgw_core.gpu_claim where gpu_uuid = 'n1-2'
insert into llmgw_core.gpu_claim (shard_id, node_id, gpu_uuid, memory_mib) select min(id), 'n1', 'n1-3', 100 from llmgw_core.shard where replica_id = 3
update llmgw_core.gpu_claim set memory_mib = 200 where gpu_uuid = 'n1-3'
delete from llmgw_core.shard where replica_id = 3
update llmgw_core.replica set state = 'gone' where id = 3
update llmgw_core.replica set state = 'pending' where id = 3
delete from llmgw_core.replica where id = 3
insert into llmgw_core.replica (model, term) values ('a', 1)
update llmgw_core.controller set seen_at = clock_timestamp() + interval '1 hour'
update llmgw_core.replica set state_at = clock_timestamp()
update llmgw_core.router_use set in_flight = 5 where replica_id = 1
update llmgw_core.router_use set in_flight = 0, last_used_at = clock_timestamp() where replica_id = 1
update llmgw_core.controller set seen_at = clock_timestamp() - interval '8 s'
update llmgw_core.demand set waiting = 4, peak = 9 where model = 'a'
update llmgw_core.controller set seen_at = clock_timestamp() - interval '2 min' where pg_advisory_unlock(7719, presence)
insert into llmgw_core.node (id) values ('a0')
truncate llmgw_core.node_load
insert into llmgw_core.node_load (node_id, at, gpus) values ('n4', clock_timestamp(), '{"n4-0": {"memory_foreign_mib": 5}}')
delete from llmgw_core.node where id = 'n3'
