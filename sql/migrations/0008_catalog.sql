-- Prices of models with their history; whose catalog file is in force.
set local role llmgw_owner;

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

alter table llmgw_core.controller
    add column catalog_file text,
    add column catalog_digest text,
    add column catalog_error text;
comment on table llmgw_core.controller is 'Control and router processes. Alive is who holds the advisory lock (7719, presence). catalog_digest is of the content of its own catalog file, in force or not; catalog_error says why it could not be applied.';
