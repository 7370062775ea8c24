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
    seen_at timestamptz not null default clock_timestamp(),
    catalog_file text,
    catalog_digest text,
    catalog_error text
) with (fillfactor = 70);
comment on table llmgw_core.controller is 'Control and router processes. Alive is who holds the advisory lock (7719, presence). catalog_digest is of the content of its own catalog file, in force or not; catalog_error says why it could not be applied.';

create table llmgw_core.lease (
    name text primary key,
    term bigint not null,
    holder uuid not null,
    acquired_at timestamptz not null default clock_timestamp(),
    expires_at timestamptz not null,
    notes text[] not null default '{}'
) with (fillfactor = 50);
comment on table llmgw_core.lease is 'One row per duty, never deleted: term only grows.';
comment on column llmgw_core.lease.notes is 'What the holder of this term leaves alone, and why: rows that make no sense, silence that may be ours.';

create table llmgw_core.lock_name (
    class int not null,
    id int,
    name text not null,
    unique nulls not distinct (class, id)
);
insert into llmgw_core.lock_name values (7719, null, 'presence of a controller process'), (7720, 1, 'migration'), (7720, 2, 'catalog apply'), (7720, 3, 'partitions'), (7720, 4, 'tree of scopes');
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
    ready_at timestamptz,
    replace_asked timestamptz,
    replace_actor text,
    replace_force boolean not null default false,
    room_for text
);
create index replica_live on llmgw_core.replica (model) where state <> 'gone';
create index replica_there on llmgw_core.replica (id) where state <> 'gone';
comment on table llmgw_core.replica is 'One serving unit. launch counts its starts: each start makes new shards. The model is a name, not a key: a replica outlives its model until it is gone. replace_asked: an operator wants another in its stead, ready first; with replace_force it may stop first where there is no room for both. room_for is the model for which it was asked to leave.';

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
    master_port int check (master_port between 1 and 65535),
    unique (replica_id, launch, rank)
);
create unique index shard_master_port on llmgw_core.shard (node_id, master_port)
    where master_port is not null and state not in ('stopped', 'failed');
create unique index shard_port on llmgw_core.shard (node_id, port) where state not in ('stopped', 'failed');
create index shard_live on llmgw_core.shard (node_id) where state not in ('stopped', 'failed');
comment on table llmgw_core.shard is 'A replica''s part on one node in one launch. One live holder per (node, port) by index. master_port is where the shards of a gang meet, on the node of rank 0; new at each launch.';

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
    code text not null,
    reason text not null,
    need text,
    have text,
    primary key (at, decision_id, position)
) partition by range (at);
comment on table llmgw_core.rejection is 'Why each candidate did not fit, of each attempt whose refusals changed; daily partitions. code is no key: a newer controller may know a reason that this database does not, and must be believed.';

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

create unlogged table llmgw_core.touched (
    xid xid8 not null,
    kind text not null check (kind in ('node', 'replica', 'catalog', 'facts', 'everything', 'mark')),
    key text not null,
    at timestamptz not null default clock_timestamp()
);
create index touched_xid on llmgw_core.touched (xid);
comment on table llmgw_core.touched is 'Which objects the transactions of the last minutes changed, for the leader''s mirror of the fleet. Lost in a crash, after which the leader reads everything. A mark says below which transaction all were over at its time.';

create table llmgw_core.audit (
    id bigint generated always as identity primary key,
    at timestamptz not null default clock_timestamp(),
    actor text not null,
    action text not null,
    object text not null,
    detail jsonb,
    source text
);
create index audit_object on llmgw_core.audit (object, id);
comment on table llmgw_core.audit is 'Who changed what, when, and from which address (source: null for what happened before it was kept).';

create table llmgw_core.applied (
    name text primary key,
    digest text not null,
    applied_at timestamptz not null default clock_timestamp()
);
comment on table llmgw_core.applied is 'Digest of the functions and views last applied, so that starts without news take no locks.';
