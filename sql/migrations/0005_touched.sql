-- Which objects changed, so that the leader reads only those again.
set local role llmgw_owner;

create unlogged table llmgw_core.touched (
    xid xid8 not null,
    kind text not null check (kind in ('node', 'replica', 'catalog', 'facts', 'everything', 'mark')),
    key text not null,
    at timestamptz not null default clock_timestamp()
);
create index touched_xid on llmgw_core.touched (xid);
comment on table llmgw_core.touched is 'Which objects the transactions of the last minutes changed, for the leader''s mirror of the fleet. Lost in a crash, after which the leader reads everything. A mark says below which transaction all were over at its time.';

create index replica_there on llmgw_core.replica (id) where state <> 'gone';
create index weight_source on llmgw_core.weight (source) where complete and facts is not null;
