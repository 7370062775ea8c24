create or replace view llmgw.capacity as
select c.model, c.profile, nullif(c.node_class, '') as node_class, c.engine, c.concurrency, c.requests_per_s, c.tokens_per_s,
    c.ttft_ms, c.itl_ms, c.slo, c.measured_at, c.measured_by, c.replica
from llmgw_core.capacity c order by c.model, c.profile, c.node_class;
comment on view llmgw.capacity is 'How many requests at once a profile served within its objectives, as last measured. It may name models that are gone.';

create or replace view llmgw_core.live_router as
select c.id from llmgw_core.controller c where c.role = 'router' and c.seen_at > clock_timestamp() - llmgw_core.seconds('demand_stale');
comment on view llmgw_core.live_router is 'Router processes that were heard of lately.';

create or replace view llmgw_core.replica_use as
with live as materialized (
    select c.id from llmgw_core.controller c
    where c.role = 'router' and (c.seen_at > clock_timestamp() - llmgw_core.seconds('demand_stale') or llmgw_core.present(c.id)))
select x.replica_id, (sum(x.in_flight) filter (where l.id is not null))::int as in_flight,
    max(case when l.id is null and x.in_flight > 0 then x.reported_at else x.last_used_at end) as last_used_at
from llmgw_core.router_use x left join live l on l.id = x.router_id group by x.replica_id;
comment on view llmgw_core.replica_use is 'What runs on each replica by the word of live routers (null without any), and when it was used last; a router that was killed with requests running used it until its last word. The planner asks the same (queries/tick.sql, uses).';

create or replace view llmgw_core.measured as
select c.model, c.profile, min(c.concurrency) as concurrency from llmgw_core.capacity c group by c.model, c.profile;
comment on view llmgw_core.measured is 'How many requests at once a replica of a profile serves: the weakest class of node counts. Scaling and the depth of replicas are made of it.';

create or replace view llmgw_core.depth as
select r.id as replica_id, greatest(1, floor(coalesce(k.concurrency, d.value)))::int as depth, case when k.model is null then 'default' else 'measured' end as source
from llmgw_core.replica r
cross join (select s.value from llmgw_core.setting s where s.name = 'depth') d
left join llmgw_core.measured k on k.model = r.model and k.profile = r.profile;
comment on view llmgw_core.depth is 'How many requests at once a replica is healthy with, all routers together: as measured, else by the setting.';

create or replace view llmgw.demand as
with live as materialized (select l.id from llmgw_core.live_router l),
said as (
    select d.model, sum(d.waiting)::int as waiting, sum(d.in_flight)::int as in_flight, max(d.wanted_at) as wanted_at,
        sum(greatest(d.waiting + d.in_flight, case when d.peak_since > clock_timestamp() - interval '2 min' then d.peak end,
            case when d.peak_since > clock_timestamp() - interval '1 min' then d.peak_before end))::int as peak
    from llmgw_core.demand d join live l on l.id = d.router_id group by d.model),
measured as (
    -- Of a model that runs, what it runs by; of others the first choice that anybody measured. The weakest class of node counts.
    select distinct on (c.model) c.model, c.profile, c.concurrency
    from llmgw_core.measured c
    join llmgw_core.profile p on p.model = c.model and p.name = c.profile
    order by c.model, exists (select 1 from llmgw_core.replica r where r.model = c.model and r.profile = c.profile and r.state <> 'gone') desc, p.position)
select m.name as model,
    case when r.routers > 0 then coalesce(s.waiting, 0) end as waiting, case when r.routers > 0 then coalesce(s.in_flight, 0) end as in_flight,
    case when r.routers > 0 then coalesce(s.peak, 0) end as peak, s.wanted_at, r.routers,
    coalesce(k.concurrency, (select value from llmgw_core.setting where name = 'concurrency')) as concurrency,
    case when k.model is null then 'default' else 'measured' end as concurrency_source, k.profile as concurrency_profile
from llmgw_core.model m
cross join (select count(*)::int as routers from live) r
left join said s on s.model = m.name
left join measured k on k.model = m.name
order by m.name;
comment on view llmgw.demand is 'What clients ask of each model on all live routers (null without any), the most of it in the last minute or two, and how many requests at once one replica is taken to serve: measured, or the default of llmgw.settings.';
