-- Roles with least privilege. They belong to the whole Postgres cluster, hence "if missing".
-- All are NOLOGIN groups: an installation gives its own login roles membership (sql/logins.py).
do $$
declare
    r text;
begin
    foreach r in array array['llmgw_owner', 'llmgw_controller', 'llmgw_agent', 'llmgw_read'] loop
        begin
            if to_regrole(r) is null then
                execute format('create role %I nologin', r);
            end if;
        exception
            when duplicate_object or unique_violation then null;  -- another installation was first
        end;
    end loop;
    -- The migrating user creates objects for the owner role and must be a member to do so.
    if not pg_has_role(current_user, 'llmgw_owner', 'member') then
        execute format('grant llmgw_owner to %I', current_user);
    end if;
exception
    when insufficient_privilege then
        raise exception 'role % may not create the llmgw roles: %', current_user, sqlerrm
            using hint = 'Run the first upgrade as a user with CREATEROLE, or create llmgw_owner, '
                         'llmgw_controller, llmgw_agent and llmgw_read (nologin) and grant llmgw_owner to it.';
end $$;

create schema if not exists llmgw_core;
alter schema llmgw_core owner to llmgw_owner;
create schema llmgw authorization llmgw_owner;
create schema agent authorization llmgw_owner;

-- From here on everything belongs to the owner role, whoever migrates.
set local role llmgw_owner;
alter default privileges for role llmgw_owner revoke execute on functions from public;

comment on schema llmgw_core is 'Tables, private: read the views in llmgw instead.';
comment on schema llmgw is 'The public contract: views and functions for people, dashboards, llmgwctl and the API.';
comment on schema agent is 'The agents'' door: the only functions that a node may call.';
-- What exists: settings, nodes and what their agents last saw of them.

create table llmgw_core.setting (
    name text primary key,
    value double precision not null,
    unit text not null,
    why text not null
);
comment on table llmgw_core.setting is 'Numbers that decisions use; change a row and every controller follows.';

insert into llmgw_core.setting (name, value, unit, why) values
    ('unreachable_after', 30, 's', 'a node silent this long gets nothing new'),
    ('lost_after', 120, 's', 'a node silent this long has its replicas replaced'),
    ('silent_share_max', 0.2, 'share', 'when more nodes than this fall silent at once nobody is declared lost'),
    ('guard', 60, 's', 'after a database restart or a new leader nobody is declared lost for this long'),
    ('lease_ttl', 15, 's', 'a frozen holder of a duty is replaced after this long'),
    ('poll_busy', 250, 'ms', 'pace of an agent with work outstanding'),
    ('poll_idle', 2000, 'ms', 'pace of an agent without work, small fleet'),
    ('syncs_per_second', 500, '1/s', 'what all idle agents together may ask of the database'),
    ('load_stale', 60, 's', 'load figures older than this are unknown'),
    ('backoff_base', 1, 's', 'first wait after a failed replica, doubled each time'),
    ('backoff_max', 300, 's', 'longest wait after a failed replica'),
    ('stable', 60, 's', 'a replica ready this long forgets its failures'),
    ('start_deadline', 1800, 's', 'a replica that is not ready by then has failed'),
    ('drain_deadline', 600, 's', 'running requests of a draining replica get this long'),
    ('decision_days', 30, 'd', 'how long decisions and refusals are kept'),
    ('usage_days', 400, 'd', 'how long single usage rows are kept');

create table llmgw_core.node (
    id text primary key check (id ~ '^[a-z0-9]([a-z0-9._-]{0,62})$'),
    intent text not null default 'ready' check (intent in ('ready', 'cordoned', 'draining')),
    intent_reason text,
    intent_actor text,
    intent_at timestamptz not null default clock_timestamp(),
    alloc_gen bigint not null default 0,
    report_gen bigint not null default 0,
    secret_hash bytea unique,
    enrolled_at timestamptz,
    hostname text,
    mgmt_addr text,
    os text,
    kernel text,
    arch text,
    cpu_model text,
    cpu_flags text[],
    cpus_host double precision check (cpus_host > 0),
    cpus_effective double precision check (cpus_effective > 0),
    memory_host_mib bigint check (memory_host_mib > 0),
    memory_effective_mib bigint check (memory_effective_mib > 0),
    memory_available_mib bigint check (memory_available_mib >= 0),
    labels jsonb not null default '{}' check (jsonb_typeof(labels) = 'object'),
    port_first int not null default 20000 check (port_first between 1 and 65535),
    port_last int not null default 20999 check (port_last between port_first and 65535),
    warnings text[],
    agent_version text,
    host_reported_at timestamptz
);
comment on table llmgw_core.node is 'One machine. intent is the operator''s word and survives any re-registration (D11); alloc_gen grows with every change of its assignments.';

create table llmgw_core.beat (
    node_id text primary key references llmgw_core.node on delete cascade,
    seen_at timestamptz not null,
    boot uuid,
    applied_gen bigint,
    clock_skew_s double precision
) with (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000, autovacuum_vacuum_cost_delay = 0);
comment on table llmgw_core.beat is 'Last sync of each agent by the database''s clock. Narrow and without an index on the time, so that updates stay HOT.';

create unlogged table llmgw_core.node_load (
    node_id text primary key references llmgw_core.node on delete cascade,
    at timestamptz not null,
    cpu_percent real,
    load1 real,
    load5 real,
    load15 real,
    memory_used_mib bigint,
    gpus jsonb
) with (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000, autovacuum_vacuum_cost_delay = 0);
comment on table llmgw_core.node_load is 'Fast facts of a node; lost in a crash, which is fine: absent means unknown.';

create table llmgw_core.gpu (
    node_id text not null references llmgw_core.node on delete cascade,
    uuid text not null check (length(uuid) <= 100),
    index int not null check (index >= 0),
    name text not null,
    class text not null,
    memory_mib bigint check (memory_mib > 0),
    healthy boolean not null default true,
    problems text[] not null default '{}',
    pci_bus_id text,
    numa int,
    driver_version text,
    cuda_version text,
    reported_at timestamptz not null default clock_timestamp(),
    primary key (node_id, uuid)
);
comment on table llmgw_core.gpu is 'Cards of a node as its agent last listed them; a card that vanished stays as unhealthy until its claims end.';

create table llmgw_core.engine (
    node_id text not null references llmgw_core.node on delete cascade,
    engine text not null,
    version text not null default '',
    path text not null default '',
    state text not null default 'installed' check (state in ('installed', 'provisioning', 'failed')),
    error text,
    primary key (node_id, engine, version, path)
);
comment on table llmgw_core.engine is 'Inference engines found on a node; version '''' is an unknown version.';

create table llmgw_core.disk (
    node_id text not null references llmgw_core.node on delete cascade,
    mount text not null,
    filesystem text not null,
    kind text not null check (kind in ('local', 'shared')),
    total_mib bigint check (total_mib >= 0),
    free_mib bigint check (free_mib >= 0),
    holds_weights boolean not null default false,
    primary key (node_id, mount)
);
comment on table llmgw_core.disk is 'Filesystems of a node, each once; shared ones are nobody''s to spend.';

create table llmgw_core.weight (
    node_id text not null references llmgw_core.node on delete cascade,
    source text not null,
    path text not null,
    bytes bigint check (bytes >= 0),
    complete boolean not null,
    primary key (node_id, path)
);
comment on table llmgw_core.weight is 'Weights on a node''s disk.';

create table llmgw_core.enrolment (
    token_hash bytea primary key,
    node_id text references llmgw_core.node on delete cascade,
    uses_left int not null check (uses_left >= 0),
    expires_at timestamptz not null,
    created_by text not null,
    created_at timestamptz not null default clock_timestamp()
);
comment on table llmgw_core.enrolment is 'Tokens with which an agent joins: bound to one node, or to any new node (node_id null). Only hashes are kept.';

create table llmgw_core.ask (
    id bigint generated always as identity primary key,
    node_id text not null references llmgw_core.node on delete cascade,
    kind text not null check (kind in ('log')),
    shard_id bigint,
    lines int not null check (lines between 1 and 10000),
    from_offset bigint check (from_offset >= 0),
    asked_at timestamptz not null default clock_timestamp(),
    answered_at timestamptz,
    answer text,
    answer_offset bigint
);
create index ask_open on llmgw_core.ask (node_id) where answered_at is null;
comment on table llmgw_core.ask is 'Questions to an agent (log tails), answered at its next sync; removed after ten minutes.';
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
    check (max_replicas >= min_replicas)
);
comment on table llmgw_core.model is 'A model of the catalog; min_replicas 0 means on demand.';

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
    primary key (model, name),
    unique (model, position) deferrable initially deferred,
    check (not share or gpu_memory_mib is not null),
    check (engine <> 'command' or command is not null)
);
comment on table llmgw_core.profile is 'One way to run a model; the lowest position is tried first. fingerprint changes when anything that matters to a running engine does.';
-- Who decides, what was decided, what runs where.

create sequence llmgw_core.change;
comment on sequence llmgw_core.change is 'Grows when a shard''s state, the catalog or a node''s intent changes; the leader peeks at it to tick at once. A hint only: ticks also come by the clock.';

create table llmgw_core.controller (
    id uuid primary key,
    presence int generated always as identity unique,
    role text not null check (role in ('control', 'router')),
    hostname text not null,
    pid int not null,
    version text not null,
    started_at timestamptz not null default clock_timestamp(),
    seen_at timestamptz not null default clock_timestamp()
) with (fillfactor = 70);
comment on table llmgw_core.controller is 'Control and router processes. Alive is who holds the advisory lock (7719, presence).';

create table llmgw_core.lease (
    name text primary key,
    term bigint not null,
    holder uuid not null,
    acquired_at timestamptz not null default clock_timestamp(),
    expires_at timestamptz not null
) with (fillfactor = 50);
comment on table llmgw_core.lease is 'One row per duty, never deleted: term only grows.';

create table llmgw_core.lock_name (
    class int not null,
    id int,
    name text not null,
    unique nulls not distinct (class, id)
);
insert into llmgw_core.lock_name values (7719, null, 'presence of a controller process'), (7720, 1, 'migration'), (7720, 2, 'catalog apply'), (7720, 3, 'partitions');
comment on table llmgw_core.lock_name is 'What our advisory locks mean; view llmgw.locks shows who holds them.';

create table llmgw_core.transition (
    kind text not null check (kind in ('replica', 'shard')),
    from_state text not null,
    to_state text not null,
    primary key (kind, from_state, to_state)
);
insert into llmgw_core.transition (kind, from_state, to_state)
select 'replica', f, t
from (values
    ('pending', '{starting,gone}'::text[]),
    ('starting', '{ready,failed,stopping}'),
    ('ready', '{starting,draining,failed,stopping}'),
    ('draining', '{ready,stopping,failed}'),
    ('stopping', '{gone}'),
    ('failed', '{pending,gone}')) as v (f, ts), unnest(ts) as t
union all
select 'shard', f, t
from (values
    ('assigned', '{provisioning,fetching,starting,ready,stopped,failed}'::text[]),
    ('provisioning', '{assigned,fetching,starting,stopped,failed}'),
    ('fetching', '{assigned,provisioning,starting,stopped,failed}'),
    ('starting', '{assigned,fetching,ready,draining,stopped,failed}'),
    ('ready', '{assigned,starting,draining,stopped,failed}'),
    ('draining', '{stopped,failed}')) as v (f, ts), unnest(ts) as t;
comment on table llmgw_core.transition is 'Allowed moves; the same as sql/states.py. Triggers refuse others with LG002.';

create table llmgw_core.replica (
    id bigint generated always as identity primary key,
    model text not null,
    profile text,
    fingerprint text,
    pool text,
    state text not null default 'pending'
        check (state in ('pending', 'starting', 'ready', 'draining', 'stopping', 'gone', 'failed')),
    launch int not null default 0,
    restarts int not null default 0,
    error text,
    reason text,
    backoff_until timestamptz,
    drain_deadline timestamptz,
    endpoint text,
    term bigint not null,
    created_at timestamptz not null default clock_timestamp(),
    state_at timestamptz not null default clock_timestamp(),
    ready_at timestamptz
);
create index replica_live on llmgw_core.replica (model) where state <> 'gone';
comment on table llmgw_core.replica is 'One serving unit. launch counts its starts: each start makes new shards. The model is a name, not a key: a replica outlives its model until it is gone.';

create table llmgw_core.shard (
    id bigint generated always as identity primary key,
    replica_id bigint not null references llmgw_core.replica on delete cascade,
    launch int not null,
    rank int not null check (rank >= 0),
    node_id text not null references llmgw_core.node,
    desired text not null default 'running' check (desired in ('running', 'stopped')),
    state text not null default 'assigned'
        check (state in ('assigned', 'provisioning', 'fetching', 'starting', 'ready', 'draining', 'stopped', 'failed')),
    port int not null check (port between 1 and 65535),
    cpus double precision check (cpus > 0),
    memory_mib bigint check (memory_mib > 0),
    spec jsonb not null check (jsonb_typeof(spec) = 'object'),
    error text,
    exit_code int,
    log_tail text,
    fetching jsonb,
    pid int,
    cpu_cores real,
    memory_bytes bigint,
    created_at timestamptz not null default clock_timestamp(),
    state_at timestamptz not null default clock_timestamp(),
    unique (replica_id, launch, rank)
);
create unique index shard_port on llmgw_core.shard (node_id, port) where state not in ('stopped', 'failed');
create index shard_live on llmgw_core.shard (node_id) where state not in ('stopped', 'failed');
comment on table llmgw_core.shard is 'A replica''s part on one node in one launch. One live holder per (node, port) by index.';

create table llmgw_core.gpu_claim (
    shard_id bigint not null references llmgw_core.shard on delete cascade,
    node_id text not null,
    gpu_uuid text not null,
    memory_mib bigint check (memory_mib > 0),
    primary key (node_id, gpu_uuid, shard_id),
    foreign key (node_id, gpu_uuid) references llmgw_core.gpu (node_id, uuid)
);
create unique index gpu_claim_whole on llmgw_core.gpu_claim (node_id, gpu_uuid) where memory_mib is null;
create index gpu_claim_shard on llmgw_core.gpu_claim (shard_id);
comment on table llmgw_core.gpu_claim is 'Cards held by live shards: one whole holder per card by index, shares within the card by trigger. The claim ends with the shard.';

create table llmgw_core.reason (
    code text primary key,
    sentence text not null
);
comment on table llmgw_core.reason is 'Every code with which placement refuses a candidate; the same as controller/placement/reasons.py.';

create table llmgw_core.decision (
    id bigint generated always as identity,
    at timestamptz not null default clock_timestamp(),
    term bigint not null,
    kind text not null check (kind in ('create', 'place', 'move', 'refuse', 'attempt')),
    model text,
    replica_id bigint,
    node_id text,
    reason text not null,
    detail jsonb,
    primary key (at, id)
) partition by range (at);
create index decision_model on llmgw_core.decision (model, at desc);
comment on table llmgw_core.decision is 'Every item of every plan and what became of it; daily partitions.';

create table llmgw_core.rejection (
    decision_id bigint not null,
    at timestamptz not null,
    position int not null,
    model text not null,
    profile text not null,
    pool text,
    node_id text,
    code text not null references llmgw_core.reason (code),
    reason text not null,
    need text,
    have text,
    primary key (at, decision_id, position)
) partition by range (at);
comment on table llmgw_core.rejection is 'Why each candidate did not fit, of each attempt whose refusals changed; daily partitions.';

create table llmgw_core.attempt (
    model text primary key,
    decision_id bigint not null,
    decision_at timestamptz not null,
    checked_at timestamptz not null,
    placed boolean not null,
    digest bytea not null
);
comment on table llmgw_core.attempt is 'The latest attempt to place each model; its refusals are in rejection.';

create table llmgw_core.router_use (
    router_id uuid not null,
    replica_id bigint not null references llmgw_core.replica on delete cascade,
    in_flight int not null check (in_flight >= 0),
    last_used_at timestamptz,
    reported_at timestamptz not null,
    primary key (router_id, replica_id)
) with (fillfactor = 50);
comment on table llmgw_core.router_use is 'What each router runs on each replica, told every second or so.';

create table llmgw_core.audit (
    id bigint generated always as identity primary key,
    at timestamptz not null default clock_timestamp(),
    actor text not null,
    action text not null,
    object text not null,
    detail jsonb
);
comment on table llmgw_core.audit is 'Who changed what.';

create table llmgw_core.applied (
    name text primary key,
    digest text not null,
    applied_at timestamptz not null default clock_timestamp()
);
comment on table llmgw_core.applied is 'Digest of the functions and views last applied, so that starts without news take no locks.';
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
    primary key (at, id)
) partition by range (at);
create index usage_event_key on llmgw_core.usage_event (key_id, at desc);
comment on table llmgw_core.usage_event is 'One row per client request; tokens are null when nothing said them. Daily partitions.';

create table llmgw_core.secret (
    name text primary key,
    value bytea not null check (octet_length(value) >= 32)
);
-- gen_random_uuid is Postgres's own strong randomness, without an extension.
insert into llmgw_core.secret values ('cursor', sha256(convert_to(gen_random_uuid()::text || gen_random_uuid()::text, 'utf8')));
comment on table llmgw_core.secret is 'Secrets that all controllers share; cursor signs the page cursors of the admin API.';
