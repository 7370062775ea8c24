-- What `llmgwctl up` asks, with the controller's rights.

-- name: wanted
-- Every model that should have replicas, how far each is, and what keeps it; ready counts when its agents said so within $1 seconds.
select m.name, m.aliases, p.placed, p.outcome,
    (select count(*) from llmgw.replicas r where r.model = m.name and r.state = 'ready' and not exists (
        select 1 from jsonb_to_recordset(r.shards) as s (node text, state text) join llmgw.nodes n on n.id = s.node
        where s.state <> 'ready' or n.last_seen_ago is null or n.last_seen_ago >= $1::double precision)) as ready_replicas,
    (select jsonb_agg(jsonb_build_object('id', r.id, 'state', r.state, 'error', r.error, 'restarts', r.restarts, 'stale', r.stale, 'shards', r.shards) order by r.id)
     from llmgw.replicas r where r.model = m.name) as replicas,
    (select jsonb_agg(distinct n.reason) from llmgw.rejections n where n.model = m.name) as reasons,
    (select s.log_tail from llmgw.shards s where s.model = m.name and s.log_tail is not null order by s.id desc limit 1) as log_tail
from llmgw.models m left join llmgw.placements p on p.model = m.name
where m.min_replicas > 0 order by m.name;

-- name: key_active
-- Whether a key made earlier still opens this installation.
select exists (select 1 from llmgw.keys k where k.id = $1::text and k.state = 'active');

-- name: schema
-- What a database was brought to; an error when it is empty.
select (select v.version_num from llmgw_core.alembic_version v) as revision,
    (select a.digest from llmgw_core.applied a where a.name = 'functions and views') as digest;
