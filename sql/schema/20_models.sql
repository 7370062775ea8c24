-- What should run: the catalog.

create table llmgw_core.pool (
    name text primary key check (name ~ '^[a-z0-9]([a-z0-9._-]{0,62})$'),
    labels jsonb not null default '{}' check (jsonb_typeof(labels) = 'object'),
    origin text not null check (origin in ('file', 'api')),
    origin_file text
);
comment on table llmgw_core.pool is 'A named label selector: a node belongs when every label has one of the values (each value of labels is an array of strings).';

create table llmgw_core.model (
    name text primary key check (length(name) between 1 and 200),
    description text,
    source text not null,
    min_replicas int not null check (min_replicas >= 0),
    max_replicas int not null,
    idle_timeout_s double precision check (idle_timeout_s > 0),
    origin text not null check (origin in ('file', 'api')),
    origin_file text,
    created_at timestamptz not null default clock_timestamp(),
    updated_at timestamptz not null default clock_timestamp(),
    updated_by text not null,
    priority int not null default 0 check (priority between -1000 and 1000),
    check (max_replicas >= min_replicas)
);
comment on table llmgw_core.model is 'A model of the catalog; min_replicas 0 means on demand. Of models that compete for cards the higher priority goes first.';

create table llmgw_core.model_name (
    name text primary key check (length(name) between 1 and 200),
    model text not null references llmgw_core.model on update cascade on delete cascade deferrable initially deferred,
    is_alias boolean not null
);
comment on table llmgw_core.model_name is 'Names and aliases in one table, so that they are unique together.';

create table llmgw_core.fallback (
    model text not null references llmgw_core.model on delete cascade,
    position int not null,
    fallback text not null references llmgw_core.model (name) deferrable initially deferred,
    primary key (model, position),
    check (model <> fallback)
);
comment on table llmgw_core.fallback is 'Which model answers instead, in order.';

create table llmgw_core.profile (
    model text not null references llmgw_core.model on delete cascade,
    name text not null check (name ~ '^[A-Za-z0-9]([A-Za-z0-9._-]{0,62})$'),
    position int not null,
    engine text not null,
    engine_version text,
    args text[] not null default '{}',
    env jsonb not null default '{}' check (jsonb_typeof(env) = 'object'),
    command text[],
    health_path text,
    pool text references llmgw_core.pool (name),
    gpu_class text,
    gpus int not null default 0 check (gpus >= 0),
    gpu_memory_mib bigint check (gpu_memory_mib > 0),
    share boolean not null default false,
    cpus double precision check (cpus > 0),
    memory_mib bigint check (memory_mib > 0),
    arch text,
    cpu_flags text[] not null default '{}',
    shards int not null default 1 check (shards >= 1),
    start_deadline_s double precision check (start_deadline_s > 0),
    stop_grace_s double precision check (stop_grace_s >= 0),
    fingerprint text not null,
    fabric text not null default 'fabric' check (fabric in ('nvlink-domain', 'fabric', 'any')),
    driver_min text,
    cuda_min text,
    exclude_nodes text[] not null default '{}',
    spread text not null default 'prefer' check (spread in ('prefer', 'node')),
    primary key (model, name),
    unique (model, position) deferrable initially deferred,
    check (not share or gpu_memory_mib is not null),
    check (engine <> 'command' or command is not null)
);
comment on table llmgw_core.profile is 'One way to run a model; the lowest position is tried first. fingerprint changes when anything that matters to a running engine does. fabric is what the shards of one replica need between them; spread = node never puts two replicas of the model on one node.';

create table llmgw_core.price (
    model text not null,
    since timestamptz not null,
    prompt bigint check (prompt >= 0),
    cached bigint check (cached >= 0),
    completion bigint check (completion >= 0),
    set_by text not null,
    primary key (model, since)
);
comment on table llmgw_core.price is 'What a model''s tokens cost from a time on, in micros per million tokens: a request is priced by the row in force when it began. Null is unpriced, never free; cached null: as prompt. A name, not a key: prices outlive their model.';

create table llmgw_core.catalog_seen (
    digest text not null,
    hostname text not null,
    file text not null,
    seen_at timestamptz not null default clock_timestamp(),
    applied_at timestamptz,
    applied_by text,
    primary key (digest, hostname, file)
);
create index catalog_seen_applied on llmgw_core.catalog_seen (applied_at) where applied_at is not null;
comment on table llmgw_core.catalog_seen is 'Every content that the catalog file of a controller''s configuration ever had, by host; the one applied last is in force. Content that was here before is no news when a controller starts, so files that differ are told of and not fought over. hostname is empty for one that llmgwctl apply brought.';
