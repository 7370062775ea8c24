-- name: ping
-- Whether the way to the database is open, its clock, and whether this login may use the door.
select extract(epoch from clock_timestamp())::double precision as now, has_schema_privilege('agent', 'usage') as may;

-- name: enroll
-- Exchanges an enrolment token for the node's own secret.
select agent.enroll($1::text, $2::text, $3::text);

-- name: sync
-- Heartbeat, report and poll in one round trip.
select gen, assignments, poll_ms, now, asks from agent.sync($1::text, $2::bigint, $3::jsonb);

-- name: report_host
-- Host facts, when they change and at times.
select agent.report_host($1::text, $2::jsonb);

-- name: report_gpus
-- Cards of the node.
select agent.report_gpus($1::text, $2::jsonb);

-- name: report_engines
-- Engines found on the node.
select agent.report_engines($1::text, $2::jsonb);

-- name: report_disks
-- Filesystems of the node.
select agent.report_disks($1::text, $2::jsonb);

-- name: report_weights
-- Weights on the node's disks.
select agent.report_weights($1::text, $2::jsonb);

-- name: report_ports
-- Fabric ports of the node.
select agent.report_ports($1::text, $2::jsonb);

-- name: report_checks
-- What the node's check of itself came to.
select agent.report_checks($1::text, $2::jsonb);

-- name: report_events
-- Error events of cards, once each.
select agent.report_events($1::text, $2::jsonb);

-- name: report_scan
-- The answer to a question for the map of a fabric.
select agent.report_scan($1::text, $2::bigint, $3::text, $4::bigint, $5::text);

-- name: report_log
-- The answer to a question for a log.
select agent.report_log($1::text, $2::bigint, $3::text, $4::bigint);

-- name: report_collect
-- The answer to a question to remove downloads.
select agent.report_collect($1::text, $2::bigint, $3::jsonb);
