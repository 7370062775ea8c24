-- Which replica holds a stored answer of /v1/responses.
set local role llmgw_owner;

create table llmgw_core.stored_response (
    id text primary key check (length(id) between 1 and 256),
    key_id text not null,
    replica text not null,
    created_at timestamptz not null default clock_timestamp()
);
comment on table llmgw_core.stored_response is 'Which replica holds an answer of /v1/responses, and whose it is: a chain goes on there, through any router, and only for the same key. replica is the id of a replica or of a static endpoint.';
