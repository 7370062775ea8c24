-- Who may ask, and what they used.

create table llmgw_core.api_key (
    id text primary key check (id ~ '^[a-z0-9]{6,32}$'),
    hash bytea not null unique check (octet_length(hash) = 32),
    name text not null check (length(name) between 1 and 200),
    models text[],
    created_by text not null,
    created_at timestamptz not null default clock_timestamp(),
    expires_at timestamptz,
    revoked_at timestamptz
);
comment on table llmgw_core.api_key is 'Keys of clients: SHA-256 of a random 256-bit secret, never the secret. models null = every model.';

create table llmgw_core.usage_event (
    id uuid not null,
    at timestamptz not null,
    key_id text,
    model_asked text,
    model text,
    replica_id bigint,
    endpoint text not null,
    status text not null check (status in ('ok', 'error', 'client_closed', 'partial')),
    http_status int,
    error_code text,
    stream boolean not null,
    prompt_tokens bigint check (prompt_tokens >= 0),
    cached_tokens bigint check (cached_tokens >= 0),
    completion_tokens bigint check (completion_tokens >= 0),
    ttft_ms double precision check (ttft_ms >= 0),
    total_ms double precision check (total_ms >= 0),
    attempts int not null default 0,
    request_id text,
    reasoning_tokens bigint,
    estimated boolean not null default false,
    queue_ms double precision,
    primary key (at, id)
) partition by range (at);
create index usage_event_key on llmgw_core.usage_event (key_id, at desc);
comment on table llmgw_core.usage_event is 'One row per client request; tokens are null when nothing is known of them, estimated when the engine did not tell them all. queue_ms is how long it waited in the router for its model to start or for a place at a replica, null when it was refused before. Daily partitions.';

create table llmgw_core.stored_response (
    id text primary key check (length(id) between 1 and 256),
    key_id text not null,
    replica text not null,
    created_at timestamptz not null default clock_timestamp()
);
comment on table llmgw_core.stored_response is 'Which replica holds an answer of /v1/responses, and whose it is: a chain goes on there, through any router, and only for the same key. replica is the id of a replica or of a static endpoint.';

create table llmgw_core.secret (
    name text primary key,
    value bytea not null check (octet_length(value) >= 32)
);
-- gen_random_uuid is Postgres's own strong randomness, without an extension.
insert into llmgw_core.secret values ('cursor', sha256(convert_to(gen_random_uuid()::text || gen_random_uuid()::text, 'utf8')));
comment on table llmgw_core.secret is 'Secrets that all controllers share; cursor signs the page cursors of the admin API.';
