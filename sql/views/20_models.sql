create or replace view llmgw.prices as
select * from (
    select p.model, p.since, lead(p.since) over (partition by p.model order by p.since) as until, p.prompt, p.cached, p.completion, p.set_by
    from llmgw_core.price p) x
where num_nonnulls(x.prompt, x.cached, x.completion) > 0
order by x.model, x.since desc;
comment on view llmgw.prices is 'What each model''s tokens cost and cost before, in micros per million tokens. A request is priced by the row in force when it began; null is unpriced, never free; cached null: as prompt. Where no row covers a time, the model was unpriced.';

create or replace view llmgw.models as
select m.name, m.description,
    (select array_agg(a.name order by a.name) from llmgw_core.model_name a where a.model = m.name and a.is_alias) as aliases,
    m.source, m.min_replicas, m.max_replicas,
    coalesce(r.ready, 0) as ready_replicas, coalesce(r.total, 0) as total_replicas,
    (select array_agg(f.fallback order by f.position) from llmgw_core.fallback f where f.model = m.name) as fallbacks,
    (select array_agg(p.name order by p.position) from llmgw_core.profile p where p.model = m.name) as profiles,
    m.min_replicas = 0 as on_demand, m.origin, m.origin_file, m.idle_timeout_s as idle_timeout, m.priority, m.updated_at, m.updated_by,
    d.concurrency, d.concurrency_source,
    (select jsonb_strip_nulls(to_jsonb(p) - 'model' - 'until' - 'set_by') from llmgw.prices p where p.model = m.name and p.until is null) as prices
from llmgw_core.model m
join llmgw.demand d on d.model = m.name
left join lateral (
    select count(*) filter (where x.state = 'ready')::int as ready, count(*)::int as total
    from llmgw_core.replica x where x.model = m.name and x.state <> 'gone') r on true
order by m.name;
comment on view llmgw.models is 'The catalog with what runs of it. profiles are in order of preference; idle_timeout is in seconds; concurrency is what one replica is taken to serve at once when the model is scaled; prices are in micros per million tokens, null when it has none.';

create or replace view llmgw.profiles as
select p.model, p.name, p.position, p.engine, p.engine_version, p.pool, p.gpus, p.gpu_class, p.gpu_memory_mib, p.share,
    p.cpus, p.memory_mib, p.arch, nullif(p.cpu_flags, '{}') as cpu_flags, p.shards, p.args, p.env, p.command, p.health_path, p.fabric, p.driver_min, p.cuda_min,
    nullif(p.exclude_nodes, '{}') as exclude_nodes, p.spread, p.fingerprint
from llmgw_core.profile p order by p.model, p.position;
comment on view llmgw.profiles is 'The ways to run each model, first choice first.';

create or replace view llmgw.pools as
select p.name, p.labels, p.origin, p.origin_file,
    (select array_agg(n.id order by n.id) from llmgw_core.node n
     where not exists (select 1 from jsonb_each(p.labels) l where not coalesce(l.value ? (n.labels->>l.key), false))) as nodes
from llmgw_core.pool p order by p.name;
comment on view llmgw.pools is 'Named label selectors and the nodes that belong.';
