-- name: lock
-- Catalog changes come one after another, checks included; the same lock as catalog_apply_v1's.
select pg_advisory_xact_lock(7720, 2);

-- name: known
-- What is declared, for the checks between objects.
select jsonb_build_object(
    'models', (select coalesce(jsonb_agg(jsonb_build_object('name', m.name, 'origin', m.origin, 'origin_file', m.origin_file,
        'fallbacks', (select coalesce(jsonb_agg(f.fallback order by f.position), '[]') from llmgw_core.fallback f where f.model = m.name),
        'aliases', (select coalesce(jsonb_agg(a.name), '[]') from llmgw_core.model_name a where a.model = m.name and a.is_alias))), '[]')
        from llmgw_core.model m),
    'pools', (select coalesce(jsonb_agg(jsonb_build_object('name', p.name, 'origin', p.origin, 'origin_file', p.origin_file)), '[]')
        from llmgw_core.pool p));

-- name: apply
-- Writes pools and models; one row per object.
select action, kind, name from llmgw_core.catalog_apply_v1($1::text, $2::jsonb, $3::jsonb, $4::text, $5::text, $6::boolean);

-- name: mark
-- When this file is the controllers', what was applied is in force.
select llmgw_core.catalog_mark_v1($1::text, $2::text, $3::text);

-- name: offer
-- What a controller's own file holds; the name under which to apply it, or null.
select llmgw_core.catalog_offer_v1($1::uuid, $2::text, $3::text, $4::text, $5::text, $6::boolean);

-- name: told
-- A controller's own file, and what is wrong with it.
select llmgw_core.catalog_told_v1($1::uuid, $2::text, $3::text, $4::text);

-- name: documents
-- Models and pools of these names as documents, for telling what differs.
select jsonb_build_object(
    'model', (select coalesce(jsonb_object_agg(m.name, llmgw_core.model_doc(m.name)), '{}') from llmgw_core.model m where m.name = any ($1::text[])),
    'pool', (select coalesce(jsonb_object_agg(p.name, jsonb_build_object('labels', p.labels)), '{}') from llmgw_core.pool p where p.name = any ($2::text[])));

-- name: replicas
-- Replicas of these models that are to go, or run an older profile; one that failed or waits starts with the new one.
select r.model, m.name is null as removed, string_agg(r.id::text, ', ' order by r.id) as ids
from llmgw_core.replica r left join llmgw_core.model m on m.name = r.model
left join llmgw_core.profile p on p.model = r.model and p.name = r.profile
where r.model = any ($1::text[]) and r.state <> 'gone' and (m.name is null or r.state not in ('failed', 'pending') and r.fingerprint <> coalesce(p.fingerprint, ''))
group by r.model, m.name order by r.model;

-- name: source
-- For the rest of this transaction: the address that the audit notes.
select set_config('llmgw.source', $1::text, true);
