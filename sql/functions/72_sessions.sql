-- Transactions of this database, for doctor: one that stays open keeps dead rows of hot tables from being removed (F16).

create or replace function llmgw_core.transactions() returns table (who text, pid int, open_s double precision, idle_s double precision, holds boolean)
language sql stable security definer set search_path = llmgw_core, pg_catalog, pg_temp as $$
    select format('%s (%s)', coalesce(nullif(a.application_name, ''), 'unnamed'), a.usename), a.pid,
        extract(epoch from clock_timestamp() - a.xact_start)::double precision,
        case when a.state like 'idle in tr%' then extract(epoch from clock_timestamp() - a.state_change)::double precision end,
        a.backend_xmin is not null or a.backend_xid is not null
    from pg_stat_activity a
    where a.datname = current_database() and a.backend_type = 'client backend' and a.xact_start is not null and a.pid <> pg_backend_pid()
    union all
    select format('prepared transaction %s (%s)', p.gid, p.owner), null, extract(epoch from clock_timestamp() - p.prepared)::double precision, null, true
    from pg_prepared_xacts p where p.database = current_database()
$$;
comment on function llmgw_core.transactions() is 'Open transactions of others: who, since when, idle how long, and whether dead rows wait for it (holds). Those of other roles are seen when llmgw_owner may read all statistics.';

create or replace function llmgw_core.snapshot_old_s() returns double precision
language sql stable security definer set search_path = llmgw_core, pg_temp as $$
    select coalesce(llmgw_core.setting('snapshot_old'), 300)
$$;
comment on function llmgw_core.snapshot_old_s() is 'From this age on a transaction that holds back dead rows is told of, in seconds; llmgw_core.setting may have a row snapshot_old for it.';

grant execute on function llmgw_core.transactions(), llmgw_core.snapshot_old_s() to llmgw_controller, llmgw_read;
