create or replace view llmgw.events as
select id, at, actor, action, object, detail from llmgw_core.audit;
comment on view llmgw.events is 'Who changed what.';

create or replace view llmgw.settings as select name, value, unit, why from llmgw_core.setting order by name;
comment on view llmgw.settings is 'Numbers that decisions use.';

create or replace view llmgw.reasons as select code, sentence from llmgw_core.reason order by code;
comment on view llmgw.reasons is 'Every code with which placement refuses a candidate.';

create or replace view llmgw.summary as
select
    (select coalesce(jsonb_agg(to_jsonb(c) order by c.class), '[]') from llmgw.gpu_capacity c) as gpus,
    (select coalesce(jsonb_object_agg(s.state, s.n), '{}') from (select state, count(*) n from llmgw_core.node_state group by state) s) as nodes,
    (select coalesce(jsonb_object_agg(s.state, s.n), '{}') from (select state, count(*) n from llmgw_core.replica where state <> 'gone' group by state) s) as replicas,
    (select jsonb_build_object('total', count(*), 'satisfied', count(*) filter (where m.ready_replicas >= m.min_replicas),
        'unplaceable', coalesce(jsonb_agg(jsonb_build_object('name', m.name, 'reason', p.main_reason) order by m.name)
                                filter (where p.placed = false and m.total_replicas > m.ready_replicas), '[]'),
        'failing', (select coalesce(jsonb_agg(jsonb_build_object('name', f.model, 'reason', f.error) order by f.model), '[]')
                    from (select distinct on (r.model) r.model, r.error from llmgw_core.replica r
                          where r.error is not null and r.state in ('failed', 'pending', 'starting') order by r.model, r.state_at desc) f))
     from llmgw.models m join llmgw.placements p on p.model = m.name) as models,
    (select coalesce(jsonb_agg(jsonb_build_object('name', i.model, 'replica', i.id, 'idle_seconds', i.idle_seconds, 'gpus', i.held) order by i.idle_seconds desc), '[]')
     from (select r.model, r.id, r.idle_seconds, (select count(*) from llmgw_core.gpu_claim c join llmgw_core.shard s on s.id = c.shard_id where s.replica_id = r.id) as held
           from llmgw.replicas r where r.state = 'ready' and r.idle_seconds > 60 order by r.idle_seconds desc limit 10) i) as idle_replicas,
    (select jsonb_build_object('requests_per_s', round(count(*) / 60.0, 2), 'errors', count(*) filter (where u.status in ('error', 'partial')),
        'in_flight', (select sum(x.in_flight) from llmgw_core.replica_use x), 'queue', (select sum(d.waiting) from llmgw.demand d))
     from llmgw_core.usage_event u where u.at > clock_timestamp() - interval '1 min') as router,
    (select jsonb_build_object('alive', count(*) filter (where c.alive and c.role = 'control'), 'routers', count(*) filter (where c.alive and c.role = 'router'),
        'leader', (select l.holder from llmgw.leases l where l.name = 'tick' and l.held), 'term', (select l.term from llmgw_core.lease l where l.name = 'tick'),
        'since', (select l.acquired_at from llmgw.leases l where l.name = 'tick' and l.held)) from llmgw.controllers c) as controllers,
    (select jsonb_build_object('version', current_setting('server_version'), 'notify_queue', pg_notification_queue_usage(),
        'oldest_transaction_s', (select round(max(t.open_s)::numeric, 1) from llmgw_core.transactions() t))) as database,
    (select coalesce(jsonb_agg(jsonb_strip_nulls(to_jsonb(g))), '[]') from llmgw.gang_capacity g) as gangs;
comment on view llmgw.summary is 'The fleet at a glance, one row: llmgwctl status.';

create or replace view llmgw.doctor as
select c.node_id as node, c.name, c.result, c.evidence, c.remedy, c."position", c.at
from llmgw_core.node_check c
union all
select n.id, 'agent', case s.state when 'lost' then 'fail' when 'unreachable' then 'fail' else 'pass' end,
    case when b.seen_at is null then 'its agent has not been seen yet' else format('last seen %s s ago, version %s',
        round(extract(epoch from clock_timestamp() - b.seen_at)), coalesce(n.agent_version, 'unknown')) end,
    case when s.state in ('lost', 'unreachable') then 'Look at the agent on the node: systemctl status llmgw-agent, and its log.' end, 0, b.seen_at
from llmgw_core.node n join llmgw_core.node_state s on s.node_id = n.id left join llmgw_core.beat b on b.node_id = n.id
union all
select b.node_id, 'clock', case when abs(b.clock_skew_s) > 5 then 'fail' when abs(b.clock_skew_s) > 1 then 'warn' else 'pass' end,
    format('%s s off the database''s clock', round(b.clock_skew_s::numeric, 2)),
    case when abs(b.clock_skew_s) > 1 then 'Start a time service on the node: chronyd or systemd-timesyncd.' end, 1, b.seen_at
from llmgw_core.beat b where b.clock_skew_s is not null
union all
select format('controller %s/%s', c.hostname, c.pid), 'catalog', case c.catalog when 'applied' then 'pass' when 'differs' then 'warn' else 'fail' end,
    coalesce(c.catalog_problem, format('%s (%s) is applied', c.catalog_file, c.catalog_digest)),
    case c.catalog when 'differs' then 'Make the files of all controllers the same; SIGHUP to a controller applies its own.'
                   when 'refused' then 'Correct the file and send this controller a SIGHUP.' end, 0, c.started_at
from llmgw.controllers c where c.alive and c.catalog is not null
union all
select 'tick', 'note', 'warn', n.note, case when n.note not like 'no silent node is given up:%' then
    'What it names is left alone, all else goes on: put the row right, or delete it.' end, n.nr, clock_timestamp()
from llmgw.leases l join llmgw_core.lease k on k.name = l.name cross join lateral unnest(k.notes) with ordinality n(note, nr)
where l.name = 'tick' and l.held
union all
select 'database', 'snapshot', case when t.open_s > 10 * llmgw_core.snapshot_old_s() then 'fail' else 'warn' end,
    format('%s%s holds a snapshot for %s s: dead rows stay, and every poll grows slower', t.who, ' pid ' || t.pid, round(t.open_s)),
    case when t.pid is null then 'Finish it: rollback prepared.' else format('End it: select pg_terminate_backend(%s). Give its role a limit: '
        'alter role ... set idle_in_transaction_session_timeout = ''5min''.', t.pid) end, 0, clock_timestamp()
from llmgw_core.transactions() t where t.holds and t.open_s > llmgw_core.snapshot_old_s()
union all
select 'database', 'statistics', 'warn', 'transactions of other roles cannot be seen, so an old one is not told of',
    'As a superuser: grant pg_read_all_stats to llmgw_owner.', 1, clock_timestamp()
where not pg_has_role('llmgw_owner', 'pg_read_all_stats', 'usage')
union all
select 'database', 'jit', 'warn', 'queries are compiled, which takes seconds where running them takes milliseconds',
    format('As the owner of the database: alter database %I set jit = off', current_database()), 2, clock_timestamp()
where pg_jit_available();
comment on view llmgw.doctor is 'Checks of every node: what its agent found of itself, and what only the database knows (silence, clock); of controllers, whose node is ''controller HOST/PID'': whether their catalog file is the one that is applied; of ''tick'': what the leader leaves alone; and of ''database'': transactions open for so long that dead rows pile up, and just-in-time compilation. result: pass, warn or fail; remedy says what to do.';

create or replace view llmgw.trouble as
select 'node ' || state as what, node_id as object, state_reason as why from llmgw_core.node_state where state in ('unreachable', 'lost')
union all select 'gpu unhealthy', node || ' gpu ' || coalesce(index::text, uuid), array_to_string(problems, '; ') from llmgw.gpus where not healthy
union all select 'check failed', node || ' ' || name, evidence from llmgw_core.node_check c(node, name, "position", result, evidence) where result = 'fail'
union all select 'fabric', f.key, p from llmgw.fabrics f, unnest(f.problems) p
union all select 'nvlink domain', node, why_not from llmgw.nvlink where not usable
union all select 'model cannot be placed', m.name, p.main_reason from llmgw.models m join llmgw.placements p on p.model = m.name
    where p.placed = false and m.total_replicas > m.ready_replicas
union all select 'replica failed', model || '/' || id, error from llmgw_core.replica where state = 'failed'
union all select 'replica without address', model || '/' || id, format('it is ready at %s, where no router finds it: llmgwctl replace %s', coalesce(endpoint, 'no endpoint'), id)
    from llmgw_core.replica where state = 'ready' and (endpoint ~ '^https?://[^/\s]+:[0-9]+$') is not true
union all select 'replica where it may not be', r.model || '/' || r.id, format('it runs on node %s, %s: llmgwctl replace %s brings it elsewhere', s.node_id,
        case when s.node_id = any (p.exclude_nodes) then format('which profile %s excludes', p.name) else format('which is not in pool %s (any more)', p.pool) end, r.id)
    from llmgw_core.replica r join llmgw_core.shard s on s.replica_id = r.id and s.launch = r.launch and s.state not in ('stopped', 'failed')
    join llmgw_core.node n on n.id = s.node_id join llmgw_core.profile p on p.model = r.model and p.name = r.profile
    left join llmgw_core.pool o on o.name = p.pool
    where r.state in ('starting', 'ready') and (s.node_id = any (p.exclude_nodes)
        or exists (select from jsonb_each(o.labels) l where not coalesce(l.value ? (n.labels->>l.key), false)))
union all select 'node behind its assignments', n.id, format('generation %s, applied %s', n.alloc_gen, b.applied_gen)
    from llmgw_core.node n join llmgw_core.beat b on b.node_id = n.id
    where b.applied_gen < n.alloc_gen and clock_timestamp() - b.seen_at < llmgw_core.seconds('unreachable_after')
union all select 'models take turns', d.model, format('%s of its replicas made room within 10 minutes, for %s: they want the same place',
        count(*), string_agg(distinct d.detail->>'room_for', ', '))
    from llmgw_core.decision d where d.at > clock_timestamp() - interval '10 min' and d.kind = 'move' and d.detail->>'room_for' is not null
    group by d.model having count(*) > 3
union all select 'nobody leads', 'duty ' || name, 'no live controller holds the lease' from llmgw.leases where not held
union all select 'left alone', 'tick', n from llmgw.leases l join llmgw_core.lease k on k.name = l.name, unnest(k.notes) n where l.name = 'tick' and l.held
union all select 'catalog ' || catalog, 'controller ' || hostname || '/' || pid, catalog_problem from llmgw.controllers
    where alive and catalog <> 'applied'
union all select 'idle in transaction', format('%s pid %s', who, pid), format('for %s s', round(idle_s)) from llmgw_core.transactions() where idle_s > 5
union all select 'old snapshot', format('%s%s', who, ' pid ' || pid), format('open for %s s', round(open_s)) from llmgw_core.transactions()
    where holds and open_s > llmgw_core.snapshot_old_s()
union all select 'card held by nobody', format('%s gpu %s', c.node_id, c.gpu_uuid),
        format('shard %s is over or not on that node: delete from llmgw_core.gpu_claim where shard_id = %s', c.shard_id, c.shard_id)
    from llmgw_core.gpu_claim c left join llmgw_core.shard s on s.id = c.shard_id and s.node_id = c.node_id and s.state not in ('stopped', 'failed')
    where s.id is null
union all select 'shard that nobody needs', format('%s on %s', s.id, s.node_id),
        format('replica %s is %s: update llmgw_core.shard set desired = ''stopped'' where id = %s', r.id, r.state, s.id)
    from llmgw_core.shard s join llmgw_core.replica r on r.id = s.replica_id
    where s.state not in ('stopped', 'failed') and s.desired = 'running' and (s.launch <> r.launch or r.state in ('pending', 'stopping', 'failed', 'gone'))
union all select 'use without a price', 'model ' || d.model, format('%s requests since midnight UTC cost nobody knows what: give it prices in the catalog', sum(d.unpriced))
    from llmgw_core.usage_day d where d.day = (clock_timestamp() at time zone 'UTC')::date and d.unpriced > 0 and d.model is not null
        and exists (select 1 from llmgw_core.price p where p.prompt is not null or p.completion is not null) group by d.model
union all select 'notify queue filling', current_database(), round(100 * pg_notification_queue_usage()) || ' %' where pg_notification_queue_usage() > 0.01
union all select 'heartbeats are not HOT', relname, n_tup_hot_upd || ' of ' || n_tup_upd from pg_stat_user_tables
    where schemaname = 'llmgw_core' and relname = 'beat' and n_tup_upd > 1000 and n_tup_hot_upd < 0.95 * n_tup_upd;
comment on view llmgw.trouble is 'Everything an operator should worry about, one row each. Empty is good.';
