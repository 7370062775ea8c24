-- The tree of scopes: organisations, teams, users. Changes of it take one lock, placing a key in it shares it.

create or replace function llmgw_core.scope_of(p_scope text) returns bigint
language plpgsql stable security definer set search_path = llmgw_core, pg_temp as $$
declare
    number bigint;
    part text;
begin
    if p_scope ~ '^[0-9]{1,18}$' then
        select s.id into number from llmgw_core.scope s where s.id = p_scope::bigint and s.deleted_at is null;
    else
        foreach part in array string_to_array(p_scope, '/') loop
            select s.id into number from llmgw_core.scope s where coalesce(s.parent, 0) = coalesce(number, 0) and s.name = part and s.deleted_at is null;
            exit when not found;
        end loop;
    end if;
    if number is null then
        raise exception 'there is no scope %', p_scope using errcode = 'LG005', hint = 'select id, path from llmgw.scopes';
    end if;
    return number;
end $$;
comment on function llmgw_core.scope_of(text) is 'The scope of an id or a path (acme/ml/alice) that is not deleted; LG005 when there is none.';

create or replace function llmgw_core.scopes_below(p_scope bigint) returns setof bigint
language sql stable security definer set search_path = llmgw_core, pg_temp as $$
    with recursive below (id) as (
        select p_scope
        union all
        select s.id from llmgw_core.scope s join below b on s.parent = b.id)
    select id from below
$$;
comment on function llmgw_core.scopes_below(bigint) is 'A scope and every one below it, deleted ones too.';

create or replace function llmgw_core.scope_fits() returns trigger
language plpgsql security definer set search_path = llmgw_core, pg_temp as $$
declare
    up llmgw_core.scope;
begin
    if tg_op = 'UPDATE' and new.kind <> old.kind then
        raise exception '% % stays what it is: make another and move what is below', old.kind, old.name using errcode = 'LG003';
    end if;
    if new.parent is null then
        return new;
    end if;
    select * into up from llmgw_core.scope s where s.id = new.parent for share;
    if up.deleted_at is not null and new.deleted_at is null then
        raise exception '% % cannot be in %: that is deleted', new.kind, new.name, up.name using errcode = 'LG003';
    end if;
    -- A parent of a higher kind at every step: which also means that no way leads back.
    if array_position(array['org', 'team', 'user'], up.kind) >= array_position(array['org', 'team', 'user'], new.kind) then
        raise exception '% % cannot be in % %: org > team > user', new.kind, new.name, up.kind, up.name using errcode = 'LG003';
    end if;
    return new;
end $$;
comment on function llmgw_core.scope_fits() is 'A parent is of a higher kind and not deleted; a kind never changes (LG003).';
create or replace trigger scope_fits before insert or update of kind, parent on llmgw_core.scope
    for each row execute function llmgw_core.scope_fits();

create or replace function llmgw_core.fallback_of(p_object text, p_reasons jsonb) returns text[]
language plpgsql immutable security definer set search_path = llmgw_core, pg_temp as $$
begin
    if coalesce(jsonb_typeof(p_reasons), 'null') = 'null' then
        return null;
    end if;
    if jsonb_typeof(p_reasons) <> 'array' or not p_reasons <@ '["unavailable", "timeout", "error", "refusal"]' then
        raise exception '%: % is no list of reasons to fall back', left(p_object, 200), left(p_reasons::text, 100) using errcode = 'LG003',
            hint = 'a list with some of unavailable, timeout, error, refusal; an empty one: never; null: as the scopes above or the settings say';
    end if;
    return array(select distinct r from jsonb_array_elements_text(p_reasons) r order by r);
end $$;
comment on function llmgw_core.fallback_of(text, jsonb) is 'A list of reasons to fall back, each once; null when nothing is said, LG003 for anything else.';

create or replace function llmgw_core.scope_moved() returns trigger
language plpgsql security definer set search_path = llmgw_core, pg_temp as $$
begin
    update llmgw_core.api_key k set changed = pg_current_xact_id()
        where k.scope_id = any (array(select llmgw_core.scopes_below(new.id))) and k.changed <> pg_current_xact_id();
    return null;
end $$;
comment on function llmgw_core.scope_moved() is 'What stands above the keys below is another, or says something else: routers read these keys again. A name is nothing that they know.';
create or replace trigger scope_moved after update of parent, deleted_at, fallback, weight on llmgw_core.scope
    for each row when (old.parent is distinct from new.parent or old.deleted_at is distinct from new.deleted_at or old.fallback is distinct from new.fallback
        or old.weight is distinct from new.weight)
    execute function llmgw_core.scope_moved();

create or replace function llmgw_core.scope_kept() returns trigger
language plpgsql security definer set search_path = llmgw_core, pg_temp as $$
begin
    raise exception '% % has a history that names it: llmgw.scope_delete_v1 lets it keep its row', old.kind, old.name using errcode = 'LG003';
end $$;
comment on function llmgw_core.scope_kept() is 'No row of a scope goes (LG003): usage of years names it.';
create or replace trigger scope_kept before delete on llmgw_core.scope for each row execute function llmgw_core.scope_kept();

create or replace function llmgw.scope_create_v1(p_actor text, p_kind text, p_name text, p_parent text, p_tags jsonb, p_fallback text[] default null) returns bigint
language plpgsql security definer set search_path = llmgw_core, pg_temp as $$
declare
    number bigint;
    reasons text[] := llmgw_core.fallback_of('scope ' || p_name, to_jsonb(p_fallback));
begin
    perform pg_advisory_xact_lock(7720, 4);
    begin
        insert into llmgw_core.scope (kind, name, parent, tags, created_by, fallback)
            values (p_kind, p_name, case when p_parent is not null then llmgw_core.scope_of(p_parent) end, coalesce(p_tags, '{}'), p_actor, reasons)
            returning id into number;
    exception
        when unique_violation then
            raise exception 'there is a % already%', p_name, coalesce(' in ' || p_parent, '') using errcode = 'LG003', hint = 'names are unique within the parent';
        when check_violation then
            raise exception 'scope %: a kind is org, team or user; a name is 1 to 200 characters without a slash, and no number; tags are an object of at most 4096 characters', p_name
                using errcode = 'LG003';
    end;
    perform llmgw_core.audited(p_actor, 'create', 'scope ' || number,
        jsonb_build_object('kind', p_kind, 'name', p_name, 'parent', p_parent) || case when reasons is not null then jsonb_build_object('fallback', reasons) else '{}' end);
    return number;
end $$;
comment on function llmgw.scope_create_v1(text, text, text, text, jsonb, text[]) is 'A new organisation, team or user, within a parent (id or path) or none; returns its id. fallback: reasons, {} for none, null: not said.';

create or replace function llmgw_core.scope_weigh(p_id bigint, p_scope text, p_weight jsonb) returns void
language plpgsql security definer set search_path = llmgw_core, pg_temp as $$
declare
    wanted numeric;
    top text;
begin
    select t.name into top from llmgw_core.scope_line l join llmgw_core.scope t on t.id = l.chain[1] where l.id = p_id and l.parent is not null;
    if found then
        raise exception 'scope % takes its turns as a part of %: only the scope at the top has a weight', p_scope, top using errcode = 'LG003',
            hint = format('llmgwctl scopes change %s --weight N', top);
    end if;
    if jsonb_typeof(p_weight) = 'number' then
        wanted := (p_weight #>> '{}')::numeric;
    end if;
    if jsonb_typeof(p_weight) not in ('number', 'null') or wanted not between 0.01 and 100 then
        raise exception 'scope %: a weight is a number from 0.01 to 100, not %', p_scope, left(p_weight::text, 100) using errcode = 'LG003',
            hint = 'who has weight 2 gets two turns for one of who has 1, while both wait';
    end if;
    update llmgw_core.scope s set weight = wanted where s.id = p_id;
end $$;
comment on function llmgw_core.scope_weigh(bigint, text, jsonb) is 'Sets the weight of a scope at the top of its tree; LG003 for another scope or no weight.';

create or replace function llmgw.scope_change_v1(p_actor text, p_scope text, p_changes jsonb) returns bigint
language plpgsql security definer set search_path = llmgw_core, pg_temp as $$
declare
    number bigint;
begin
    perform pg_advisory_xact_lock(7720, 4);
    number := llmgw_core.scope_of(p_scope);
    if p_changes ? 'fallback' then
        update llmgw_core.scope s set fallback = llmgw_core.fallback_of('scope ' || p_scope, p_changes->'fallback') where s.id = number;
    end if;
    if p_changes ? 'weight' then
        perform llmgw_core.scope_weigh(number, p_scope, p_changes->'weight');
    end if;
    perform llmgw_core.audited(p_actor, 'change', 'scope ' || number, p_changes);
    perform llmgw_core.notify('keys');
    return number;
end $$;
comment on function llmgw.scope_change_v1(text, text, jsonb) is 'Changes what is named: fallback (a list of reasons; null: not said here), weight (turns while others wait too; null: 1). The rest stays. Returns the id of the scope.';

create or replace function llmgw.scope_move_v1(p_actor text, p_scope text, p_parent text) returns bigint
language plpgsql security definer set search_path = llmgw_core, pg_temp as $$
declare
    number bigint;
begin
    perform pg_advisory_xact_lock(7720, 4);
    number := llmgw_core.scope_of(p_scope);
    begin
        update llmgw_core.scope s set parent = case when p_parent is not null then llmgw_core.scope_of(p_parent) end where s.id = number;
    exception when unique_violation then
        raise exception 'scope % cannot go there: that name is taken in %', p_scope, coalesce(p_parent, 'the top level') using errcode = 'LG003',
            hint = 'rename one of the two first';
    end;
    perform llmgw_core.audited(p_actor, 'move', 'scope ' || number, jsonb_build_object('from', p_scope, 'to', p_parent));
    perform llmgw_core.notify('keys');
    return number;
end $$;
comment on function llmgw.scope_move_v1(text, text, text) is 'Moves a scope with all below it to another parent (null: to the top). Requests that run are billed where they began. Returns its id.';

create or replace function llmgw.scope_rename_v1(p_actor text, p_scope text, p_name text) returns bigint
language plpgsql security definer set search_path = llmgw_core, pg_temp as $$
declare
    number bigint;
begin
    perform pg_advisory_xact_lock(7720, 4);
    number := llmgw_core.scope_of(p_scope);
    begin
        update llmgw_core.scope s set name = p_name where s.id = number;
    exception
        when unique_violation then
            raise exception 'scope % cannot be called %: that name is taken beside it', p_scope, p_name using errcode = 'LG003';
        when check_violation then
            raise exception 'scope % cannot be called %: a name is 1 to 200 characters without a slash, and no number', p_scope, p_name using errcode = 'LG003';
    end;
    perform llmgw_core.audited(p_actor, 'rename', 'scope ' || number, jsonb_build_object('from', p_scope, 'to', p_name));
    return number;
end $$;
comment on function llmgw.scope_rename_v1(text, text, text) is 'Another name for a scope, in its history too. Returns its id.';

create or replace function llmgw.scope_delete_v1(p_actor text, p_scope text) returns jsonb
language plpgsql security definer set search_path = llmgw_core, pg_temp as $$
declare
    number bigint;
    below bigint[];
    gone int;
    revoked int;
begin
    perform pg_advisory_xact_lock(7720, 4);
    number := llmgw_core.scope_of(p_scope);
    below := array(select llmgw_core.scopes_below(number));
    update llmgw_core.api_key k set revoked_at = clock_timestamp() where k.scope_id = any (below) and k.revoked_at is null;
    get diagnostics revoked = row_count;
    update llmgw_core.scope s set deleted_at = clock_timestamp() where s.id = any (below) and s.deleted_at is null;
    get diagnostics gone = row_count;
    perform llmgw_core.audited(p_actor, 'delete', 'scope ' || number, jsonb_build_object('path', p_scope, 'scopes', gone, 'keys', revoked));
    perform llmgw_core.notify('keys');
    return jsonb_build_object('deleted', number::text, 'scopes', gone, 'keys', revoked);
end $$;
comment on function llmgw.scope_delete_v1(text, text) is 'Deletes a scope and all below it, and revokes their keys; rows and names stay for history. Returns how many scopes and keys.';

grant execute on function llmgw_core.scope_of(text), llmgw_core.scopes_below(bigint), llmgw.scope_create_v1(text, text, text, text, jsonb, text[]),
    llmgw.scope_change_v1(text, text, jsonb), llmgw.scope_move_v1(text, text, text), llmgw.scope_rename_v1(text, text, text),
    llmgw.scope_delete_v1(text, text) to llmgw_controller;
