-- What agents find besides nodes and cards: ports, fabric maps, checks, and everything that changed.

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
