-- name: join
-- Registers this process; returns the number of its presence lock.
select llmgw_core.controller_join_v1($1::uuid, $2::text, $3::text, $4::int, $5::text);

-- name: lease_take
-- Takes or renews a duty; no row when another holds it.
select term, ttl_s from llmgw_core.lease_take_v1($1::text, $2::uuid);

-- name: lease_resign
-- Gives a duty back at once.
select llmgw_core.lease_resign_v1($1::text, $2::uuid);

-- name: housekeep
-- Partitions ahead, old rows away.
select llmgw_core.housekeep_v1($1::bigint);

-- name: partitions
-- Partitions for the coming week: an installation that was off for long has none for today.
select llmgw_core.partitions_keep_v1(7);

-- name: has_schema
-- Whether anything of ours is in this database.
select to_regclass('llmgw_core.alembic_version') is not null;

-- name: revision
-- The schema's revision.
select version_num from llmgw_core.alembic_version;
