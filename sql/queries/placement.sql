-- name: chosen_scores
-- Points of the node that was chosen for each live replica of a model, those placed last first.
select jsonb_strip_nulls(jsonb_build_object('replica', r.id, 'at', d.at, 'node', d.node_id, 'profile', d.detail->>'profile',
    'parts', d.detail->'score', 'total', (select round(sum(p.value::numeric), 3) from jsonb_each_text(d.detail->'score') p))) as row
from llmgw_core.replica r cross join lateral (
    select x.at, x.node_id, x.detail from llmgw_core.decision x
    where x.model = r.model and x.at >= r.created_at and x.kind = 'place' and x.replica_id = r.id
    order by x.at desc limit 1) d
where r.model = $1::text and r.state in ('starting', 'ready', 'draining') and jsonb_typeof(d.detail->'score') = 'object'
order by d.at desc, r.id limit 10;

-- name: term
-- The term of whoever leads the tick, or led it last: what settles its ties.
select max(l.term) from llmgw_core.lease l where l.name = 'tick';

-- name: facts_of
-- What the weights of these sources say of their models, where some node holds them whole.
select distinct on (w.source) w.source, w.facts::text as facts from llmgw_core.weight w
where w.source = any ($1::text[]) and w.complete and w.facts is not null order by w.source, w.node_id;

-- name: pool_labels
-- Labels of each pool.
select p.name, p.labels from llmgw_core.pool p;

-- name: names
-- Every name of a model, aliases too, and whose it is.
select n.name, n.model from llmgw_core.model_name n;
