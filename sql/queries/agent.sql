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

-- name: report_log
-- The answer to a question for a log.
select agent.report_log($1::text, $2::bigint, $3::text, $4::bigint);
