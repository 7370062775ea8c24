-- What changed, for the leader's mirror of the fleet: triggers, so that whatever writes a row, the leader reads it again.
-- A row here costs a microsecond or two and is unlogged; `touched_keep` takes it away after ten minutes.

create or replace function llmgw_core.touch(p_kind text, p_key text) returns void
language sql security definer set search_path = llmgw_core, pg_temp as $$
    insert into llmgw_core.touched (xid, kind, key) select pg_current_xact_id(), p_kind, p_key where p_key is not null
$$;
comment on function llmgw_core.touch(text, text) is 'Tells the leader to read one object again.';

create or replace function llmgw_core.touch_nodes() returns trigger
language plpgsql security definer set search_path = llmgw_core, pg_temp as $$
begin
    insert into llmgw_core.touched (xid, kind, key) select distinct pg_current_xact_id(), 'node', node_id from rows;
    return null;
end $$;
comment on function llmgw_core.touch_nodes() is 'Statement trigger with one transition table: the nodes of its rows have changed.';

create or replace function llmgw_core.touch_nodes_moved() returns trigger
language plpgsql security definer set search_path = llmgw_core, pg_temp as $$
begin
    insert into llmgw_core.touched (xid, kind, key)
        select distinct pg_current_xact_id(), 'node', m.node_id from (select node_id from rows union all select node_id from rows_before) m;
    return null;
end $$;
comment on function llmgw_core.touch_nodes_moved() is 'Statement trigger of updates: the nodes of its rows, as they were and as they are, have changed.';

create or replace function llmgw_core.touch_row() returns trigger
language plpgsql security definer set search_path = llmgw_core, pg_temp as $$
begin
    perform llmgw_core.touch(tg_argv[0], case tg_op when 'DELETE' then old.id::text else new.id::text end);
    return null;
end $$;
comment on function llmgw_core.touch_row() is 'Row trigger of node and replica: the object of its kind (the argument) has changed.';

create or replace function llmgw_core.touch_load() returns trigger
language plpgsql security definer set search_path = llmgw_core, pg_temp as $$
begin
    perform llmgw_core.touch('node', new.node_id);
    return null;
end $$;
comment on function llmgw_core.touch_load() is 'Row trigger of node_load: what foreign processes hold of its cards has changed.';

create or replace function llmgw_core.touch_shard() returns trigger
language plpgsql security definer set search_path = llmgw_core, pg_temp as $$
begin
    if tg_op <> 'INSERT' then
        perform llmgw_core.touch('node', old.node_id), llmgw_core.touch('replica', old.replica_id::text);
    end if;
    if tg_op = 'INSERT' or tg_op = 'UPDATE' and (new.node_id, new.replica_id) is distinct from (old.node_id, old.replica_id) then
        perform llmgw_core.touch('node', new.node_id), llmgw_core.touch('replica', new.replica_id::text);
    end if;
    return null;
end $$;
comment on function llmgw_core.touch_shard() is 'Row trigger of shard: its replica and its node have changed.';

create or replace function llmgw_core.touch_claim() returns trigger
language plpgsql security definer set search_path = llmgw_core, pg_temp as $$
declare
    c llmgw_core.gpu_claim;
begin
    foreach c in array case tg_op when 'INSERT' then array[new] when 'DELETE' then array[old] else array[old, new] end loop
        perform llmgw_core.touch('node', c.node_id);
        perform llmgw_core.touch('replica', s.replica_id::text) from llmgw_core.shard s where s.id = c.shard_id;
    end loop;
    return null;
end $$;
comment on function llmgw_core.touch_claim() is 'Row trigger of gpu_claim: its node and the replica of its shard have changed.';

create or replace function llmgw_core.touch_all() returns trigger
language plpgsql security definer set search_path = llmgw_core, pg_temp as $$
begin
    perform llmgw_core.touch(tg_argv[0], '');
    return null;
end $$;
comment on function llmgw_core.touch_all() is 'Statement trigger of what is read whole or not at all: the catalog, facts of weights, a table that was emptied.';

do $$
declare
    t text;
begin
    foreach t in array array['gpu', 'engine', 'disk', 'weight', 'ib_port'] loop
        execute format('create or replace trigger touched_insert after insert on llmgw_core.%I referencing new table as rows
            for each statement execute function llmgw_core.touch_nodes()', t);
        execute format('create or replace trigger touched_delete after delete on llmgw_core.%I referencing old table as rows
            for each statement execute function llmgw_core.touch_nodes()', t);
        execute format('create or replace trigger touched_update after update on llmgw_core.%I referencing old table as rows_before new table as rows
            for each statement execute function llmgw_core.touch_nodes_moved()', t);
    end loop;
    foreach t in array array['model', 'profile', 'pool', 'setting'] loop
        execute format('create or replace trigger touched_catalog after insert or update or delete or truncate on llmgw_core.%I
            for each statement execute function llmgw_core.touch_all(''catalog'')', t);
    end loop;
    foreach t in array array['node', 'gpu', 'engine', 'disk', 'weight', 'ib_port', 'node_load', 'shard', 'gpu_claim', 'replica'] loop
        execute format('create or replace trigger touched_truncate after truncate on llmgw_core.%I
            for each statement execute function llmgw_core.touch_all(''everything'')', t);
    end loop;
end $$;

create or replace trigger touched_facts after insert or update or delete on llmgw_core.weight
    for each statement execute function llmgw_core.touch_all('facts');
create or replace trigger touched_row after insert or delete on llmgw_core.node for each row execute function llmgw_core.touch_row('node');
create or replace trigger touched_update after update on llmgw_core.node
    for each row when (old is distinct from new) execute function llmgw_core.touch_row('node');
create or replace trigger touched_row after insert on llmgw_core.node_load for each row execute function llmgw_core.touch_load();
-- Fast facts come with every sync: only what foreign processes hold is looked at by decisions.
create or replace trigger touched_update after update on llmgw_core.node_load for each row
    when (jsonb_path_query_array(old.gpus, '$.keyvalue() ? (exists (@.value.memory_foreign_mib)).key') is distinct from
            jsonb_path_query_array(new.gpus, '$.keyvalue() ? (exists (@.value.memory_foreign_mib)).key')
        or jsonb_path_query_array(old.gpus, '$.*.memory_foreign_mib') is distinct from jsonb_path_query_array(new.gpus, '$.*.memory_foreign_mib'))
    execute function llmgw_core.touch_load();
create or replace trigger touched_row after insert or delete on llmgw_core.shard for each row execute function llmgw_core.touch_shard();
-- Not what it uses of cores and memory, nor how far its download is.
create or replace trigger touched_update after update on llmgw_core.shard for each row
    when ((old.replica_id, old.launch, old.rank, old.node_id, old.state, old.port, old.master_port, old.error, old.log_tail, old.state_at, old.cpus, old.memory_mib)
        is distinct from (new.replica_id, new.launch, new.rank, new.node_id, new.state, new.port, new.master_port, new.error, new.log_tail, new.state_at, new.cpus, new.memory_mib))
    execute function llmgw_core.touch_shard();
create or replace trigger touched_row after insert or update or delete on llmgw_core.gpu_claim for each row execute function llmgw_core.touch_claim();
create or replace trigger touched_row after insert or delete on llmgw_core.replica for each row execute function llmgw_core.touch_row('replica');
create or replace trigger touched_update after update on llmgw_core.replica
    for each row when (old is distinct from new) execute function llmgw_core.touch_row('replica');

do $$
declare
    t record;
begin
    -- Also where a session replays what another server did: the leader sees rows, not sessions.
    for t in select tgname, tgrelid from pg_trigger where tgname like 'touched\_%' and tgenabled <> 'A' loop
        execute format('alter table %s enable always trigger %I', t.tgrelid::regclass, t.tgname);
    end loop;
end $$;

create or replace function llmgw_core.touched_keep() returns void
language plpgsql security definer set search_path = llmgw_core, pg_temp as $$
declare
    -- Transactions below this one were over ten minutes ago; whoever looked since then has seen what they did.
    over xid8 := (select max(xid) from llmgw_core.touched where kind = 'mark' and at < clock_timestamp() - interval '10 min');
begin
    delete from llmgw_core.touched where xid < over;
    insert into llmgw_core.touched (xid, kind, key) values (pg_snapshot_xmin(pg_current_snapshot()), 'mark', '');
end $$;
comment on function llmgw_core.touched_keep() is 'Forgets changes that every leader has seen: those of transactions that were over ten minutes ago.';
