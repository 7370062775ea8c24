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
    ('event_days', 90, 'd', 'how long changes of devices are kept'),
    ('scan_every', 0, 's', 'every fabric is scanned again after this long; 0: only when asked'),
    ('scan_deadline', 180, 's', 'a fabric scan without an answer by then has failed'),
    ('demand_stale', 10, 's', 'what a router said of its demand longer ago does not count'),
    ('concurrency', 8, 'requests', 'what one replica is taken to serve at once where nobody measured it'),
    ('depth', 1024, 'requests', 'what one replica is sent at once where nobody measured it; more wait in the routers. No less than engines batch by themselves: vLLM up to 1024'),
    ('min_residence', 60, 's', 'a replica that was woken or added stays at least this long'),
    ('fairness', 30, 's', 'a model that waits this long for a place gets it from one that is busy: its running requests finish, new ones wait'),
    ('idle_timeout', 900, 's', 'an on-demand model that nobody used this long stops, where it says nothing else itself'),
    ('usage_days', 400, 'd', 'how long single usage rows are kept'),
    ('usage_minute_days', 35, 'd', 'how long sums of usage by minute are kept; older reports count whole days'),
    ('usage_day_days', 1200, 'd', 'how long sums of usage by day are kept'),
    ('login_failures', 10, 'attempts', 'so many failed logins of one name from one address within login_window, then it waits; five times as many from one address, twenty times of one name'),
    ('login_window', 900, 's', 'after this long failed logins are forgotten'),
    ('session_ttl', 43200, 's', 'a session of the pages ends after this long, used or not'),
    ('session_idle', 3600, 's', 'a session of the pages that nobody uses ends after this long'),
    ('budget_lease', 60, 's', 'what a silent router holds of a budget is free again after this long: time enough to come back and settle what it used'),
    ('slot_lease', 10, 's', 'the parallel requests of a silent router are free again after this long');

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
    host_reported_at timestamptz,
    machine jsonb not null default '{}' check (jsonb_typeof(machine) = 'object'),
    nvlink_state text check (nvlink_state in ('joined', 'none', 'partial', 'inconsistent', 'in_progress', 'unknown')),
    nvlink_domain text,
    nvlink_reason text,
    imex jsonb,
    imex_channels int check (imex_channels >= 0)
);
comment on table llmgw_core.node is 'One machine. intent is the operator''s word and survives any re-registration (D11); alloc_gen grows with every change of its assignments.';

create table llmgw_core.beat (
    node_id text primary key references llmgw_core.node on delete cascade,
    seen_at timestamptz not null,
    boot uuid,
    applied_gen bigint,
    clock_skew_s double precision,
    left_at timestamptz
) with (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000, autovacuum_vacuum_cost_delay = 0,
    autovacuum_analyze_scale_factor = 0, autovacuum_analyze_threshold = 1000000);
-- New statistics make every backend plan again, and they never differ: one row per node.
comment on table llmgw_core.beat is 'Last sync of each agent by the database''s clock; left_at when it said that it ends and stops its engines, null while it runs. Narrow and without an index on the time, so that updates stay HOT.';

create unlogged table llmgw_core.node_load (
    node_id text primary key references llmgw_core.node on delete cascade,
    at timestamptz not null,
    cpu_percent real,
    load1 real,
    load5 real,
    load15 real,
    memory_used_mib bigint,
    gpus jsonb,
    ports jsonb,
    pressure jsonb
) with (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000, autovacuum_vacuum_cost_delay = 0,
    autovacuum_analyze_scale_factor = 0, autovacuum_analyze_threshold = 1000000);
comment on table llmgw_core.node_load is 'Fast facts of a node; lost in a crash, which is fine: absent means unknown.';

create table llmgw_core.gpu (
    node_id text not null references llmgw_core.node on delete cascade,
    uuid text not null check (length(uuid) <= 100),
    index int check (index >= 0),
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
    vendor text,
    memory_kind text check (memory_kind in ('dedicated', 'coherent', 'unified')),
    parent text,
    mig_profile text,
    partitioned boolean not null default false,
    fabric_state text,
    cluster_uuid text,
    clique bigint,
    bandwidth text,
    nearest_nic text,
    nic_path text,
    paths jsonb,
    detail jsonb,
    findings jsonb not null default '[]' check (jsonb_typeof(findings) = 'array'),
    missing_since timestamptz,
    mark text check (mark in ('healthy', 'unhealthy')),
    mark_reason text,
    mark_actor text,
    mark_at timestamptz,
    mark_accepts text[],
    island int,
    primary key (node_id, uuid)
);
comment on table llmgw_core.gpu is 'Cards and MIG slices (parent is set) of a node. findings are the agent''s; healthy and problems follow from them and from the operator''s mark by trigger. A card that vanished stays, unhealthy, until another sits at its address or it is forgotten.';

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
    source text,
    primary key (node_id, mount)
);
comment on table llmgw_core.disk is 'Filesystems of a node, each once; shared ones are nobody''s to spend.';

create table llmgw_core.weight (
    node_id text not null references llmgw_core.node on delete cascade,
    source text,
    path text not null,
    bytes bigint check (bytes >= 0),
    complete boolean not null,
    name text,
    revision text,
    format text,
    reason text,
    shared boolean not null default false,
    filer text,
    facts jsonb,
    managed boolean not null default true,
    filer_path text,
    shared_bytes bigint check (shared_bytes >= 0),
    primary key (node_id, path)
);
create index weight_source on llmgw_core.weight (source) where complete and facts is not null;
comment on table llmgw_core.weight is 'Weights on a node''s disk, with what their headers say of the model (facts). shared: on a filer, so that every node that mounts it lists the same bytes; managed: our own download. filer and filer_path are the same on every node; shared_bytes of bytes are counted in another row already.';

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
    kind text not null check (kind in ('log', 'scan', 'collect')),
    shard_id bigint,
    lines int check (lines between 1 and 10000),
    from_offset bigint check (from_offset >= 0),
    asked_at timestamptz not null default clock_timestamp(),
    answered_at timestamptz,
    answer text,
    answer_offset bigint,
    fabric text,
    hca text,
    port int,
    paths jsonb check (jsonb_typeof(paths) = 'array')
);
create index ask_open on llmgw_core.ask (node_id) where answered_at is null;
comment on table llmgw_core.ask is 'Questions to an agent (log tails, fabric scans, downloads to remove), answered at its next sync; removed after ten minutes.';
