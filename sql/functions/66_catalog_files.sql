-- Catalog files of controllers: which one is in force, and who has another.

create or replace function llmgw_core.catalog_in_force() returns llmgw_core.catalog_seen
language sql stable security definer set search_path = llmgw_core, pg_temp as $$
    select s from llmgw_core.catalog_seen s where s.applied_at is not null order by s.applied_at desc limit 1
$$;
comment on function llmgw_core.catalog_in_force() is 'The catalog file that was applied last; nulls when none ever was.';

create or replace function llmgw_core.catalog_force(p_actor text, p_digest text, p_hostname text, p_file text) returns void
language sql security definer set search_path = llmgw_core, pg_temp as $$
    insert into llmgw_core.catalog_seen as s (digest, hostname, file, applied_at, applied_by)
        -- Later than all others, also when the clock was set back.
        values (p_digest, p_hostname, p_file, greatest(clock_timestamp(), (llmgw_core.catalog_in_force()).applied_at + interval '1 microsecond'), p_actor)
        on conflict (digest, hostname, file) do update set seen_at = clock_timestamp(), applied_at = excluded.applied_at, applied_by = excluded.applied_by
$$;
comment on function llmgw_core.catalog_force(text, text, text, text) is 'This content is in force from now on.';

create or replace function llmgw_core.catalog_offer_v1(p_controller uuid, p_hostname text, p_actor text, p_file text, p_digest text, p_told boolean) returns text
language plpgsql security definer set search_path = llmgw_core, pg_temp as $$
declare
    in_force llmgw_core.catalog_seen;
    last_ llmgw_core.catalog_seen;
    changed boolean;
begin
    perform pg_advisory_xact_lock(7720, 2);
    in_force := llmgw_core.catalog_in_force();
    select * into last_ from llmgw_core.catalog_seen s where s.hostname = p_hostname and s.file = p_file order by s.seen_at desc limit 1;
    changed := coalesce(last_.digest <> p_digest, false) or not exists (select 1 from llmgw_core.catalog_seen s where s.digest = p_digest);
    perform llmgw_core.catalog_told_v1(p_controller, p_file, p_digest, null);
    insert into llmgw_core.catalog_seen (digest, hostname, file) values (p_digest, p_hostname, p_file)
        on conflict (digest, hostname, file) do update set seen_at = clock_timestamp();
    if in_force.digest = p_digest then
        return in_force.file;
    elsif not (p_told or changed) then
        -- Nobody touched this file since another one took its place. One row of it, however often the process starts.
        if last_.digest is null or last_.seen_at < in_force.applied_at then
            perform llmgw_core.audited(p_actor, 'catalog file differs', 'catalog file ' || p_file,
                jsonb_build_object('hostname', p_hostname, 'digest', p_digest, 'in_force', to_jsonb(in_force)));
        end if;
        return null;
    end if;
    -- One catalog for all controllers, wherever each keeps its file: what these declared is declared by this one now.
    update llmgw_core.model set origin_file = p_file where origin = 'file' and origin_file <> p_file and origin_file in (select s.file from llmgw_core.catalog_seen s where s.applied_at is not null);
    update llmgw_core.pool set origin_file = p_file where origin = 'file' and origin_file <> p_file and origin_file in (select s.file from llmgw_core.catalog_seen s where s.applied_at is not null);
    perform llmgw_core.catalog_force(p_actor, p_digest, p_hostname, p_file);
    perform llmgw_core.audited(p_actor, 'catalog file in force', 'catalog file ' || p_file,
        jsonb_build_object('hostname', p_hostname, 'digest', p_digest, 'before', to_jsonb(in_force)));
    return p_file;
end $$;
comment on function llmgw_core.catalog_offer_v1(uuid, text, text, text, text, boolean) is 'Says what a controller''s catalog file holds. Returns the name under which to apply it in this transaction; null when another content is in force and an operator neither told this controller to apply its own (p_told) nor changed its file: content is changed when nobody ever had it, or when this host had another in that file before.';

create or replace function llmgw_core.catalog_mark_v1(p_actor text, p_file text, p_digest text) returns void
language plpgsql security definer set search_path = llmgw_core, pg_temp as $$
declare
    in_force llmgw_core.catalog_seen := llmgw_core.catalog_in_force();
begin
    if in_force.file = p_file and in_force.digest <> p_digest then
        perform llmgw_core.catalog_force(p_actor, p_digest, '', p_file);
    end if;
end $$;
comment on function llmgw_core.catalog_mark_v1(text, text, text) is 'llmgwctl apply brought a file; when it is the controllers'', its content is in force now.';

create or replace function llmgw_core.catalog_told_v1(p_controller uuid, p_file text, p_digest text, p_error text) returns void
language sql security definer set search_path = llmgw_core, pg_temp as $$
    update llmgw_core.controller set catalog_file = p_file, catalog_digest = p_digest, catalog_error = left(p_error, 2000) where id = p_controller
$$;
comment on function llmgw_core.catalog_told_v1(uuid, text, text, text) is 'A controller has no catalog file (nulls), or one that cannot be applied and why.';

grant execute on function llmgw_core.catalog_offer_v1(uuid, text, text, text, text, boolean), llmgw_core.catalog_mark_v1(text, text, text),
    llmgw_core.catalog_told_v1(uuid, text, text, text) to llmgw_controller;
