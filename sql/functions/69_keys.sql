-- Keys of clients: made, rotated, moved, revoked. Routers find what changed by api_key.changed.

create or replace function llmgw_core.key_changed() returns trigger
language plpgsql security definer set search_path = llmgw_core, pg_temp as $$
begin
    new.changed := pg_current_xact_id();
    return new;
end $$;
comment on function llmgw_core.key_changed() is 'Whoever changes a key, by hand too, lets the routers read it again.';
create or replace trigger key_changed before update on llmgw_core.api_key
    for each row when (old.* is distinct from new.*) execute function llmgw_core.key_changed();

create or replace function llmgw_core.key_kept() returns trigger
language plpgsql security definer set search_path = llmgw_core, pg_temp as $$
begin
    if old.revoked_at is null or old.revoked_at > clock_timestamp() - interval '1 hour' then
        raise exception 'key % may be in use, and no router would learn that its row is gone: revoke it, and delete it an hour later', old.id using errcode = 'LG003';
    end if;
    return old;
end $$;
comment on function llmgw_core.key_kept() is 'A key goes only after it was revoked for an hour (LG003).';
create or replace trigger key_kept before delete on llmgw_core.api_key for each row execute function llmgw_core.key_kept();

create or replace function llmgw_core.networks(p_ips text[]) returns cidr[]
language plpgsql immutable security definer set search_path = llmgw_core, pg_temp as $$
declare
    found_ cidr[] := '{}';
    ip text;
begin
    foreach ip in array coalesce(p_ips, '{}') loop
        begin
            found_ := found_ || ip::cidr;
        exception when others then
            raise exception '% is no network', left(ip, 100) using errcode = 'LG003', hint = 'write 10.1.0.0/16, with zeros behind the prefix, or one address: 192.0.2.7';
        end;
    end loop;
    return nullif(found_, '{}');
end $$;
comment on function llmgw_core.networks(text[]) is 'Networks out of their texts; null for none, LG003 for what is not one.';

create or replace function llmgw_core.models_known(p_key text, p_models text[]) returns void
language plpgsql security definer set search_path = llmgw_core, pg_temp as $$
declare
    unknown text;
begin
    select m into unknown from unnest(p_models) m where not exists (select 1 from llmgw_core.model_name n where n.name = m) limit 1;
    if unknown is not null then
        raise exception 'key %: there is no model or alias %', p_key, unknown using errcode = 'LG003', hint = 'select name from llmgw.models';
    end if;
end $$;
comment on function llmgw_core.models_known(text, text[]) is 'LG003 when one of these is no name of a model.';

create or replace function llmgw_core.texts_of(p_list jsonb) returns text[]
language sql immutable set search_path = llmgw_core, pg_temp as $$
    select case jsonb_typeof(p_list) when 'array' then array(select jsonb_array_elements_text(p_list)) end
$$;
comment on function llmgw_core.texts_of(jsonb) is 'A list of texts; null for anything else.';

create or replace function llmgw_core.key_locked(p_id text) returns llmgw_core.api_key
language plpgsql security definer set search_path = llmgw_core, pg_temp as $$
declare
    k llmgw_core.api_key;
begin
    select * into k from llmgw_core.api_key x where x.id = p_id for update;
    if not found then
        raise exception 'there is no key %', p_id using errcode = 'LG005', hint = 'select id, name from llmgw.keys';
    end if;
    return k;
end $$;
comment on function llmgw_core.key_locked(text) is 'The key, locked for this transaction; LG005 when there is none.';

create or replace function llmgw.key_create_v2(p_actor text, p_id text, p_hash bytea, p_name text, p_models text[], p_ttl_s double precision, p_scope text, p_ips text[], p_tags jsonb,
    p_fallback text[] default null)
returns timestamptz language plpgsql security definer set search_path = llmgw_core, pg_temp as $$
declare
    until timestamptz := clock_timestamp() + make_interval(secs => p_ttl_s);
    scope bigint;
    reasons text[] := llmgw_core.fallback_of('key ' || p_name, to_jsonb(p_fallback));
begin
    perform llmgw_core.models_known(p_name, p_models);
    if p_scope is not null then
        perform pg_advisory_xact_lock_shared(7720, 4);
        scope := llmgw_core.scope_of(p_scope);
    end if;
    begin
        insert into llmgw_core.api_key (id, hash, name, models, created_by, expires_at, scope_id, ips, tags, fallback)
            values (p_id, p_hash, p_name, p_models, p_actor, until, scope, llmgw_core.networks(p_ips), coalesce(p_tags, '{}'), reasons);
    exception when check_violation then
        raise exception 'key %: a name is 1 to 200 characters, an IP list at most 100 networks, tags an object of at most 4096 characters', left(p_name, 200) using errcode = 'LG003';
    end;
    perform llmgw_core.audited(p_actor, 'create', 'key ' || p_id, jsonb_strip_nulls(jsonb_build_object('name', p_name, 'models', p_models, 'scope', p_scope, 'ips', p_ips, 'tags', p_tags, 'fallback', reasons)));
    perform llmgw_core.notify('keys');
    return until;
end $$;
comment on function llmgw.key_create_v2(text, text, bytea, text, text[], double precision, text, text[], jsonb, text[]) is 'Keeps the hash of a new key, in a scope (id or path) or none; returns when it expires (null = never). fallback: reasons, {} for none, null: not said.';

create or replace function llmgw.key_create_v1(p_actor text, p_id text, p_hash bytea, p_name text, p_models text[], p_ttl_s double precision)
returns timestamptz language sql security definer set search_path = llmgw_core, pg_temp as $$
    select llmgw.key_create_v2(p_actor, p_id, p_hash, p_name, p_models, p_ttl_s, null, null, null)
$$;
comment on function llmgw.key_create_v1(text, text, bytea, text, text[], double precision) is 'A new key in no scope, from controllers of the previous release.';

create or replace function llmgw.key_rotate_v1(p_actor text, p_id text, p_hash bytea, p_grace_s double precision) returns timestamptz
language plpgsql security definer set search_path = llmgw_core, pg_temp as $$
declare
    k llmgw_core.api_key := llmgw_core.key_locked(p_id);
    now_ timestamptz := clock_timestamp();
    ends timestamptz := now_ + make_interval(secs => p_grace_s);
begin
    if k.revoked_at is not null or k.expires_at <= now_ then
        raise exception 'key % is %: make a new one', p_id, case when k.revoked_at is not null then 'revoked' else 'expired' end using errcode = 'LG003';
    end if;
    -- After the grace of this rotation only the new secret is good: those before it never get more, and may get less.
    update llmgw_core.api_key_old o set until = ends where o.key_id = p_id and o.until > ends;
    delete from llmgw_core.api_key_old o where o.key_id = p_id and o.until <= now_;
    if (select count(*) from llmgw_core.api_key_old o where o.key_id = p_id) >= 10 then
        raise exception 'key % was rotated 10 times and all its secrets are in their grace still', p_id using errcode = 'LG003', hint = 'rotate with a shorter grace, which ends theirs too';
    end if;
    insert into llmgw_core.api_key_old (hash, key_id, until) values (k.hash, p_id, ends);
    update llmgw_core.api_key x set hash = p_hash, rotated_at = now_ where x.id = p_id;
    perform llmgw_core.audited(p_actor, 'rotate', 'key ' || p_id, jsonb_build_object('old_until', ends));
    perform llmgw_core.notify('keys');
    return ends;
end $$;
comment on function llmgw.key_rotate_v1(text, text, bytea, double precision) is 'A new secret for a key; the one before stays good for the grace (seconds; 0: it ends now), no older one for longer. Returns until when.';

create or replace function llmgw.key_move_v1(p_actor text, p_id text, p_scope text) returns void
language plpgsql security definer set search_path = llmgw_core, pg_temp as $$
begin
    perform pg_advisory_xact_lock_shared(7720, 4);
    perform llmgw_core.key_locked(p_id);
    update llmgw_core.api_key k set scope_id = case when p_scope is not null then llmgw_core.scope_of(p_scope) end where k.id = p_id;
    perform llmgw_core.audited(p_actor, 'move', 'key ' || p_id, jsonb_build_object('to', p_scope));
    perform llmgw_core.notify('keys');
end $$;
comment on function llmgw.key_move_v1(text, text, text) is 'Puts a key into a scope (id or path; null: into none). Requests that run are billed where they began.';

create or replace function llmgw.key_change_v1(p_actor text, p_id text, p_changes jsonb) returns void
language plpgsql security definer set search_path = llmgw_core, pg_temp as $$
declare
    k llmgw_core.api_key := llmgw_core.key_locked(p_id);
begin
    if k.revoked_at is not null then
        raise exception 'key % is revoked: nothing of it changes any more', p_id using errcode = 'LG003';
    end if;
    perform llmgw_core.models_known(p_id, llmgw_core.texts_of(p_changes->'models'));
    begin
        update llmgw_core.api_key x set
            name = case when p_changes ? 'name' then p_changes->>'name' else x.name end,
            models = case when p_changes ? 'models' then llmgw_core.texts_of(p_changes->'models') else x.models end,
            ips = case when p_changes ? 'ips' then llmgw_core.networks(llmgw_core.texts_of(p_changes->'ips')) else x.ips end,
            tags = case when p_changes ? 'tags' then p_changes->'tags' else x.tags end,
            fallback = case when p_changes ? 'fallback' then llmgw_core.fallback_of('key ' || p_id, p_changes->'fallback') else x.fallback end,
            expires_at = case when p_changes ? 'expires' then clock_timestamp() + make_interval(secs => (p_changes->>'expires')::double precision) else x.expires_at end
            where x.id = p_id;
    exception when check_violation or not_null_violation then
        raise exception 'key %: a name is 1 to 200 characters, an IP list at most 100 networks, tags an object of at most 4096 characters', p_id using errcode = 'LG003';
    end;
    perform llmgw_core.audited(p_actor, 'change', 'key ' || p_id, p_changes);
    perform llmgw_core.notify('keys');
end $$;
comment on function llmgw.key_change_v1(text, text, jsonb) is 'Changes what is named: name, models (null: every one), ips (null: from anywhere), tags, fallback (null: not said here), expires (seconds from now; null: never). The rest stays.';

create or replace function llmgw.key_revoke_v1(p_actor text, p_id text) returns void
language plpgsql security definer set search_path = llmgw_core, pg_temp as $$
begin
    perform llmgw_core.key_locked(p_id);
    update llmgw_core.api_key k set revoked_at = coalesce(k.revoked_at, clock_timestamp()) where k.id = p_id;
    perform llmgw_core.audited(p_actor, 'revoke', 'key ' || p_id);
    perform llmgw_core.notify('keys');
end $$;
comment on function llmgw.key_revoke_v1(text, text) is 'The key is refused everywhere within two seconds, with every secret it had.';

create or replace function llmgw_core.keys_used_v1(p_keys text[]) returns void
language sql security definer set search_path = llmgw_core, pg_temp as $$
    -- In one order, so that two routers never wait for each other.
    insert into llmgw_core.api_key_use as u (key_id, used_at)
        select k.id, clock_timestamp() from llmgw_core.api_key k where k.id = any (p_keys) order by k.id
        on conflict (key_id) do update set used_at = excluded.used_at where u.used_at < excluded.used_at - interval '10 s'
$$;
comment on function llmgw_core.keys_used_v1(text[]) is 'These keys were used within the last minute or so.';

create or replace function llmgw_core.keys_keep() returns void
language sql security definer set search_path = llmgw_core, pg_temp as $$
    delete from llmgw_core.api_key_old o where o.until < clock_timestamp() - interval '1 day'
$$;
comment on function llmgw_core.keys_keep() is 'Forgets secrets whose grace is over.';

grant execute on function llmgw.key_create_v1(text, text, bytea, text, text[], double precision),
    llmgw.key_create_v2(text, text, bytea, text, text[], double precision, text, text[], jsonb, text[]), llmgw.key_rotate_v1(text, text, bytea, double precision),
    llmgw.key_move_v1(text, text, text), llmgw.key_change_v1(text, text, jsonb), llmgw.key_revoke_v1(text, text), llmgw_core.keys_used_v1(text[]) to llmgw_controller;
