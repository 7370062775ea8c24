-- People who log in to the pages: their passwords' hashes, their sessions, and how often they may fail.

create or replace function llmgw_core.person_of(p_name text) returns bigint
language plpgsql stable security definer set search_path = llmgw_core, pg_temp as $$
declare
    number bigint;
begin
    select p.id into number from llmgw_core.person p where p.name = p_name;
    if not found then
        raise exception 'there is no user %', p_name using errcode = 'LG005', hint = 'select name from llmgw.users';
    end if;
    return number;
end $$;
comment on function llmgw_core.person_of(text) is 'The person of this name; LG005 when there is none.';

create or replace function llmgw.user_create_v1(p_actor text, p_name text, p_password_hash text, p_admin boolean, p_scope text) returns void
language plpgsql security definer set search_path = llmgw_core, pg_temp as $$
begin
    begin
        insert into llmgw_core.person (name, password_hash, admin, scope_id, created_by)
            values (p_name, p_password_hash, p_admin, case when p_scope is not null then llmgw_core.scope_of(p_scope) end, p_actor);
    exception
        when unique_violation then
            raise exception 'there is a user % already', p_name using errcode = 'LG003', hint = 'give another password: llmgwctl users password';
        when check_violation then
            raise exception 'a user''s name is 1 to 100 small letters, digits and . _ @ + -, not %', left(p_name, 100) using errcode = 'LG003';
    end;
    perform llmgw_core.audited(p_actor, 'create', 'user ' || p_name, jsonb_build_object('admin', p_admin, 'scope', p_scope));
end $$;
comment on function llmgw.user_create_v1(text, text, text, boolean, text) is 'Somebody who may log in, by the argon2id hash of a password; admin may change the fleet.';

create or replace function llmgw.user_password_v1(p_actor text, p_name text, p_password_hash text) returns void
language plpgsql security definer set search_path = llmgw_core, pg_temp as $$
declare
    person bigint := llmgw_core.person_of(p_name);
begin
    update llmgw_core.person p set password_hash = p_password_hash, password_at = clock_timestamp() where p.id = person;
    delete from llmgw_core.session s where s.person_id = person;
    perform llmgw_core.audited(p_actor, 'change password', 'user ' || p_name);
end $$;
comment on function llmgw.user_password_v1(text, text, text) is 'Another password; every session of the user ends.';

create or replace function llmgw.user_remove_v1(p_actor text, p_name text) returns void
language plpgsql security definer set search_path = llmgw_core, pg_temp as $$
begin
    delete from llmgw_core.person p where p.id = llmgw_core.person_of(p_name);
    perform llmgw_core.audited(p_actor, 'remove', 'user ' || p_name);
end $$;
comment on function llmgw.user_remove_v1(text, text) is 'The user may log in no more, and every session ends; the audit keeps the name.';

create or replace function llmgw_core.login_counted(p_who text, p_most double precision) returns double precision
language plpgsql security definer set search_path = llmgw_core, pg_temp as $$
declare
    now_ timestamptz := clock_timestamp();
    begun timestamptz := now_ - llmgw_core.seconds('login_window');
    f llmgw_core.login_failure;
begin
    insert into llmgw_core.login_failure as l (who, failures, since) values (p_who, 1, now_)
        on conflict (who) do update set failures = case when l.since < begun then 1 else least(l.failures, 1000000) + 1 end,
            since = case when l.since < begun then now_ else l.since end
        returning l.* into f;
    return case when f.failures > p_most then extract(epoch from f.since - begun) end;
end $$;
comment on function llmgw_core.login_counted(text, double precision) is 'Counts an attempt, as failed until it succeeds; how many seconds to wait when there were too many, else null.';

create or replace function llmgw_core.login_begin_v1(p_name text, p_source text)
returns table (person_id bigint, password_hash text, wait_s double precision)
language plpgsql security definer set search_path = llmgw_core, pg_temp as $$
declare
    most double precision := llmgw_core.setting('login_failures');
begin
    -- Counted before the password is looked at, so that many at once are no more than many in turn; in one order for the locks.
    -- A stranger may use up the attempts of an address, never those of a name from the owner's own address (until twenty times as many).
    wait_s := greatest(llmgw_core.login_counted('from ' || left(p_source, 100), 5 * most),
        llmgw_core.login_counted('user ' || left(p_name, 100), 20 * most),
        llmgw_core.login_counted(format('user %s from %s', left(p_name, 100), left(p_source, 100)), most));
    if wait_s is null then
        select p.id, p.password_hash into person_id, login_begin_v1.password_hash from llmgw_core.person p where p.name = p_name;
    end if;
    return next;
end $$;
comment on function llmgw_core.login_begin_v1(text, text) is 'The hash to compare a password with (null: there is no such user), or how long to wait after too many failures.';

create or replace function llmgw_core.login_end_v1(p_person bigint, p_source text, p_session bytea) returns timestamptz
language plpgsql security definer set search_path = llmgw_core, pg_temp as $$
declare
    name_ text;
    ends timestamptz := clock_timestamp() + llmgw_core.seconds('session_ttl');
begin
    select p.name into name_ from llmgw_core.person p where p.id = p_person;
    insert into llmgw_core.session (hash, person_id, source, expires_at) values (p_session, p_person, p_source, ends);
    delete from llmgw_core.login_failure f where f.who = format('user %s from %s', name_, left(p_source, 100))
        or (f.who in ('from ' || left(p_source, 100), 'user ' || name_) and f.failures <= 1);
    update llmgw_core.login_failure f set failures = f.failures - 1 where f.who in ('from ' || left(p_source, 100), 'user ' || name_);
    perform llmgw_core.audited(name_, 'log in', 'user ' || name_);
    return ends;
end $$;
comment on function llmgw_core.login_end_v1(bigint, text, bytea) is 'The password was right: a session, which ends at the time returned, and the attempt counts as none that failed.';

create or replace function llmgw_core.session_find_v1(p_session bytea) returns table (name text, admin boolean, scope_id bigint, expires_at timestamptz)
language plpgsql security definer set search_path = llmgw_core, pg_temp as $$
begin
    -- Written once a minute, not at each request.
    update llmgw_core.session s set seen_at = clock_timestamp()
        where s.hash = p_session and s.seen_at < clock_timestamp() - interval '1 min' and s.seen_at > clock_timestamp() - llmgw_core.seconds('session_idle');
    return query select p.name, p.admin, p.scope_id, s.expires_at from llmgw_core.session s join llmgw_core.person p on p.id = s.person_id
        where s.hash = p_session and s.expires_at > clock_timestamp() and s.seen_at > clock_timestamp() - llmgw_core.seconds('session_idle');
end $$;
comment on function llmgw_core.session_find_v1(bytea) is 'Whose session this is; no row when there is none, it is over, or nobody used it for session_idle.';

create or replace function llmgw_core.session_end_v1(p_session bytea) returns void
language sql security definer set search_path = llmgw_core, pg_temp as $$ delete from llmgw_core.session where hash = p_session $$;
comment on function llmgw_core.session_end_v1(bytea) is 'Logs out; nothing happens when the session is over already.';

create or replace function llmgw_core.logins_keep() returns void
language sql security definer set search_path = llmgw_core, pg_temp as $$
    delete from llmgw_core.session s where s.expires_at < clock_timestamp() or s.seen_at < clock_timestamp() - llmgw_core.seconds('session_idle');
    delete from llmgw_core.login_failure f where f.since < clock_timestamp() - llmgw_core.seconds('login_window')
$$;
comment on function llmgw_core.logins_keep() is 'Forgets sessions that are over and failures that are old.';

grant execute on function llmgw.user_create_v1(text, text, text, boolean, text), llmgw.user_password_v1(text, text, text), llmgw.user_remove_v1(text, text),
    llmgw_core.login_begin_v1(text, text), llmgw_core.login_end_v1(bigint, text, bytea), llmgw_core.session_find_v1(bytea), llmgw_core.session_end_v1(bytea) to llmgw_controller;
