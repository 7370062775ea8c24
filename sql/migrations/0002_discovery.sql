-- Complete hardware discovery: findings and marks on cards, ports, fabric scans, checks, events.

set local role llmgw_owner;

insert into llmgw_core.setting (name, value, unit, why) values
    ('event_days', 90, 'd', 'how long changes of devices are kept'),
    ('scan_every', 0, 's', 'every fabric is scanned again after this long; 0: only when asked'),
    ('scan_deadline', 180, 's', 'a fabric scan without an answer by then has failed');

alter table llmgw_core.node
    add column machine jsonb not null default '{}' check (jsonb_typeof(machine) = 'object'),
    add column nvlink_state text check (nvlink_state in ('joined', 'none', 'partial', 'inconsistent', 'in_progress', 'unknown')),
    add column nvlink_domain text,
    add column nvlink_reason text,
    add column imex jsonb,
    add column imex_channels int check (imex_channels >= 0);

-- New statistics make every backend plan again, and they never differ: one row per node.
alter table llmgw_core.beat set (autovacuum_analyze_scale_factor = 0, autovacuum_analyze_threshold = 1000000);
alter table llmgw_core.node_load set (autovacuum_analyze_scale_factor = 0, autovacuum_analyze_threshold = 1000000);

alter table llmgw_core.node_load
    add column ports jsonb,
    add column pressure jsonb;

alter table llmgw_core.gpu
    alter column index drop not null,
    add column vendor text,
    add column memory_kind text check (memory_kind in ('dedicated', 'coherent', 'unified')),
    add column parent text,
    add column mig_profile text,
    add column partitioned boolean not null default false,
    add column fabric_state text,
    add column cluster_uuid text,
    add column clique bigint,
    add column bandwidth text,
    add column nearest_nic text,
    add column nic_path text,
    add column paths jsonb,
    add column detail jsonb,
    add column findings jsonb not null default '[]' check (jsonb_typeof(findings) = 'array'),
    add column missing_since timestamptz,
    add column mark text check (mark in ('healthy', 'unhealthy')),
    add column mark_reason text,
    add column mark_actor text,
    add column mark_at timestamptz,
    add column mark_accepts text[],
    add column island int;
-- What agents of the version before said of a card, in the new form: the next report replaces it.
update llmgw_core.gpu g set findings = (
    select jsonb_agg(jsonb_build_object('code', 'reported', 'kind', 'passing', 'text', p, 'unhealthy', true))
    from unnest(case when g.problems = '{}' then array['no cause reported'] else g.problems end) p)
    where not g.healthy;
comment on table llmgw_core.gpu is 'Cards and MIG slices (parent is set) of a node. findings are the agent''s; healthy and problems follow from them and from the operator''s mark by trigger. A card that vanished stays, unhealthy, until another sits at its address or it is forgotten.';

alter table llmgw_core.disk add column source text;

alter table llmgw_core.weight
    alter column source drop not null,
    add column name text,
    add column revision text,
    add column format text,
    add column reason text,
    add column shared boolean not null default false,
    add column filer text,
    add column facts jsonb,
    add column managed boolean not null default true;
comment on table llmgw_core.weight is 'Weights on a node''s disk, with what their headers say of the model (facts). shared: on a filer, so that every node that mounts it lists the same bytes; managed: our own download.';

alter table llmgw_core.ask
    alter column lines drop not null,
    drop constraint ask_kind_check,
    add constraint ask_kind_check check (kind in ('log', 'scan')),
    add column fabric text,
    add column hca text,
    add column port int;
comment on table llmgw_core.ask is 'Questions to an agent (log tails, fabric scans), answered at its next sync; removed after ten minutes.';

create table llmgw_core.ib_port (
    node_id text not null references llmgw_core.node on delete cascade,
    hca text not null check (length(hca) between 1 and 64),
    port int not null check (port between 0 and 255),
    link_layer text,
    state text,
    phys_state text,
    rate_gbps real check (rate_gbps >= 0),
    active boolean not null default false,
    node_guid text,
    port_guid text,
    lid int,
    sm_lid int,
    gid_prefix text,
    netdev text,
    numa int,
    pci_bus_id text,
    board text,
    firmware text,
    network text,
    vlan int,
    fabric text,
    key text,
    sm_guid text,
    sm_error text,
    errors jsonb not null default '{}' check (jsonb_typeof(errors) = 'object'),
    reported_at timestamptz not null default clock_timestamp(),
    primary key (node_id, hca, port)
);
create index ib_port_key on llmgw_core.ib_port (key) where key is not null;
comment on table llmgw_core.ib_port is 'InfiniBand and RoCE ports. fabric is what the agent''s settings declare; key is the physical fabric: ib:<GUID of the master subnet manager> or roce:<network>, null when it cannot be told (sm_error says why).';

create table llmgw_core.fabric_scan (
    key text primary key check (length(key) <= 200),
    asked_at timestamptz,
    asked_by text,
    scanner text references llmgw_core.node on delete set null,
    hca text,
    port int,
    scanned_at timestamptz,
    took_ms bigint check (took_ms >= 0),
    output text,
    output_at timestamptz,
    error text
);
comment on table llmgw_core.fabric_scan is 'The latest scan of each physical fabric: who was asked, what ibnetdiscover printed when it last printed anything, and the last error. scanned_at is null while a scan is under way.';

create table llmgw_core.node_check (
    node_id text not null references llmgw_core.node on delete cascade,
    name text not null check (length(name) <= 60),
    position int not null,
    result text not null check (result in ('pass', 'warn', 'fail')),
    evidence text not null,
    remedy text,
    at timestamptz not null default clock_timestamp(),
    primary key (node_id, name)
);
comment on table llmgw_core.node_check is 'What the agent''s own check of its machine came to: llmgw-agent doctor.';

create table llmgw_core.node_event (
    id bigint generated always as identity primary key,
    at timestamptz not null default clock_timestamp(),
    node_id text not null references llmgw_core.node on delete cascade,
    kind text not null,
    object text not null,
    was text,
    now text,
    evidence jsonb
);
create index node_event_node on llmgw_core.node_event (node_id, id desc);
create index node_event_at on llmgw_core.node_event (at);
comment on table llmgw_core.node_event is 'Every change of a node''s devices, with the evidence: health, cards, ports, subnet managers, domains. Kept for event_days.';
