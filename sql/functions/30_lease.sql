-- Who does a duty. Leadership saves work; safety comes from the term that commit_plan checks.

create or replace function llmgw_core.present(p_controller uuid) returns boolean
language sql stable security definer set search_path = llmgw_core, pg_catalog, pg_temp as $$
    select exists (
        select 1 from llmgw_core.controller c
        join pg_locks l on l.locktype = 'advisory' and l.classid = 7719 and l.objid = c.presence::oid
            and l.objsubid = 2 and l.granted
            and l.database = (select oid from pg_database where datname = current_database())
        where c.id = p_controller)
$$;
comment on function llmgw_core.present(uuid) is 'Whether a controller process holds its presence lock, that is: its LISTEN connection lives.';

create or replace function llmgw_core.controller_join_v1(p_id uuid, p_role text, p_hostname text, p_pid int, p_version text)
returns int language sql security definer set search_path = llmgw_core, pg_temp as $$
    insert into llmgw_core.controller as c (id, role, hostname, pid, version)
    values (p_id, p_role, p_hostname, p_pid, p_version)
    on conflict (id) do update set seen_at = clock_timestamp()
    returning presence
$$;
comment on function llmgw_core.controller_join_v1(uuid, text, text, int, text) is 'Registers a controller process and returns the number of its presence lock.';

create or replace function llmgw_core.lease_take_v1(p_name text, p_holder uuid)
returns table (term bigint, ttl_s double precision)
language plpgsql security definer set search_path = llmgw_core, pg_temp as $$
begin
    update llmgw_core.controller set seen_at = clock_timestamp()
        where id = p_holder and seen_at < clock_timestamp() - interval '2 s';
    -- Followers ask often: look before writing, so that they neither lock nor bloat the row.
    if exists (select 1 from llmgw_core.lease l where l.name = p_name and l.holder <> p_holder
               and l.expires_at >= clock_timestamp() and llmgw_core.present(l.holder)) then
        return;
    end if;
    return query
    insert into llmgw_core.lease as l (name, term, holder, expires_at)
    values (p_name, 1, p_holder, clock_timestamp() + llmgw_core.seconds('lease_ttl'))
    on conflict (name) do update set
        term = l.term + (l.holder <> excluded.holder or l.expires_at < clock_timestamp())::int,
        acquired_at = case when l.holder <> excluded.holder or l.expires_at < clock_timestamp()
                           then clock_timestamp() else l.acquired_at end,
        holder = excluded.holder,
        expires_at = clock_timestamp() + llmgw_core.seconds('lease_ttl')
    where l.holder = excluded.holder or l.expires_at < clock_timestamp() or not llmgw_core.present(l.holder)
    returning l.term, llmgw_core.setting('lease_ttl');
end $$;
comment on function llmgw_core.lease_take_v1(text, uuid) is 'Takes or renews a duty: one row with the term when the holder leads, no row when another does. A duty is free when its lease expired or its holder''s presence lock is gone.';

create or replace function llmgw_core.lease_resign_v1(p_name text, p_holder uuid) returns void
language plpgsql security definer set search_path = llmgw_core, pg_temp as $$
begin
    update llmgw_core.lease set expires_at = clock_timestamp() where name = p_name and holder = p_holder;
    if found then
        perform llmgw_core.notify('lease');
    end if;
end $$;
comment on function llmgw_core.lease_resign_v1(text, uuid) is 'Gives a duty back at once.';

create or replace function llmgw_core.require_term(p_name text, p_term bigint) returns void
language plpgsql security definer set search_path = llmgw_core, pg_temp as $$
begin
    -- Holding the row FOR SHARE makes a takeover wait for this transaction, never the other way round.
    perform 1 from llmgw_core.lease where name = p_name and term = p_term for share;
    if not found then
        raise exception 'term % is no longer the leading term of duty %', p_term, p_name using errcode = 'LG001';
    end if;
end $$;
comment on function llmgw_core.require_term(text, bigint) is 'Raises LG001 unless this is the leading term.';

grant execute on function llmgw_core.present(uuid), llmgw_core.controller_join_v1(uuid, text, text, int, text),
    llmgw_core.lease_take_v1(text, uuid), llmgw_core.lease_resign_v1(text, uuid),
    llmgw_core.setting(text), llmgw_core.seconds(text) to llmgw_controller;
