-- Who may ask, and what they used.

create table llmgw_core.scope (
    id bigint generated always as identity primary key,
    kind text not null check (kind in ('org', 'team', 'user')),
    name text not null check (length(name) between 1 and 200 and name = btrim(name) and name !~ '[/[:cntrl:]]' and name !~ '^[0-9]+$'),
    parent bigint references llmgw_core.scope check (parent <> id),
    tags jsonb not null default '{}' check (jsonb_typeof(tags) = 'object' and length(tags::text) <= 4096),
    created_by text not null,
    created_at timestamptz not null default clock_timestamp(),
    deleted_at timestamptz,
    fallback text[] constraint scope_fallback check (fallback <@ array['unavailable', 'timeout', 'error', 'refusal'] and cardinality(fallback) <= 4),
    weight real constraint scope_weight check (weight between 0.01 and 100)
);
create unique index scope_name on llmgw_core.scope (coalesce(parent, 0), name) where deleted_at is null;
create index scope_parent on llmgw_core.scope (parent) where parent is not null;
comment on column llmgw_core.scope.fallback is 'For which reasons another model may answer those below; {}: for none. Null: not said here.';
comment on column llmgw_core.scope.weight is 'Turns that requests of all below it get in a queue, for one of a scope of weight 1; counts at the top of a tree only. Null: 1.';
comment on table llmgw_core.scope is 'Organisations, teams and users: a tree in which a parent is always of a higher kind and levels may be left out. A deleted one stays, so that history keeps its name; names are unique within the parent among those that are not deleted. No name is a number: a scope is asked for by its id or its path.';

create table llmgw_core.api_key (
    id text primary key check (id ~ '^[a-z0-9]{6,32}$'),
    hash bytea not null unique check (octet_length(hash) = 32),
    name text not null check (length(name) between 1 and 200),
    models text[],
    created_by text not null,
    created_at timestamptz not null default clock_timestamp(),
    expires_at timestamptz,
    revoked_at timestamptz,
    scope_id bigint references llmgw_core.scope,
    ips cidr[] check (cardinality(ips) between 1 and 100),
    tags jsonb not null default '{}' check (jsonb_typeof(tags) = 'object' and length(tags::text) <= 4096),
    rotated_at timestamptz,
    changed xid8 not null default pg_current_xact_id(),
    fallback text[] constraint api_key_fallback check (fallback <@ array['unavailable', 'timeout', 'error', 'refusal'] and cardinality(fallback) <= 4)
);
create index api_key_scope on llmgw_core.api_key (scope_id) where scope_id is not null;
create index api_key_changed on llmgw_core.api_key (changed);
create index api_key_created on llmgw_core.api_key (created_at, id);
comment on column llmgw_core.api_key.fallback is 'For which reasons another model may answer this key; {}: for none. Null: its scopes say, or the settings.';
comment on table llmgw_core.api_key is 'Keys of clients: SHA-256 of a random 256-bit secret, never the secret. models null = every model, ips null = from anywhere. changed is the transaction that last changed what a router must know of the key: its own columns, its old secrets, or the scopes above it.';

create table llmgw_core.api_key_old (
    hash bytea primary key check (octet_length(hash) = 32),
    key_id text not null references llmgw_core.api_key on delete cascade,
    until timestamptz not null
);
create index api_key_old_key on llmgw_core.api_key_old (key_id);
comment on table llmgw_core.api_key_old is 'Secrets that a key had before it was rotated, good until their grace ends; no later rotation prolongs one.';

create table llmgw_core.api_key_use (
    key_id text primary key references llmgw_core.api_key on delete cascade,
    used_at timestamptz not null
) with (fillfactor = 50);
comment on table llmgw_core.api_key_use is 'When a key was last used, told by the routers once a minute or so; a router that starts loads the latest first.';

create table llmgw_core.person (
    id bigint generated always as identity primary key,
    name text not null unique check (name ~ '^[a-z0-9][a-z0-9._@+-]{0,99}$'),
    password_hash text not null check (password_hash ~ '^\$argon2id\$' and length(password_hash) <= 500),
    admin boolean not null default false,
    scope_id bigint references llmgw_core.scope,
    created_by text not null,
    created_at timestamptz not null default clock_timestamp(),
    password_at timestamptz not null default clock_timestamp()
);
comment on table llmgw_core.person is 'Who may log in to the pages: an argon2id hash of the password; admin may change the fleet, others see scope_id and what is below it.';

create table llmgw_core.session (
    hash bytea primary key check (octet_length(hash) = 32),
    person_id bigint not null references llmgw_core.person on delete cascade,
    source text,
    created_at timestamptz not null default clock_timestamp(),
    seen_at timestamptz not null default clock_timestamp(),
    expires_at timestamptz not null
);
create index session_person on llmgw_core.session (person_id);
comment on table llmgw_core.session is 'Who is logged in: SHA-256 of a random 256-bit token, never the token. source is the address it was made from.';

create table llmgw_core.login_failure (
    who text primary key check (length(who) <= 250),
    failures int not null check (failures > 0),
    since timestamptz not null
) with (fillfactor = 50);
comment on table llmgw_core.login_failure is 'Attempts to log in that did not succeed, counted by name, by address and by both since the time of the first; gone after the window.';

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
