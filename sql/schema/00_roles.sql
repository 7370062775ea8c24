-- Roles with least privilege. They belong to the whole Postgres cluster, hence "if missing".
-- All are NOLOGIN groups: an installation gives its own login roles membership (sql/logins.py).
do $$
declare
    r text;
begin
    foreach r in array array['llmgw_owner', 'llmgw_controller', 'llmgw_agent', 'llmgw_read'] loop
        begin
            if to_regrole(r) is null then
                execute format('create role %I nologin', r);
            end if;
        exception
            when duplicate_object or unique_violation then null;  -- another installation was first
        end;
    end loop;
    -- The migrating user creates objects for the owner role and must be a member to do so.
    if not pg_has_role(current_user, 'llmgw_owner', 'member') then
        execute format('grant llmgw_owner to %I', current_user);
    end if;
exception
    when insufficient_privilege then
        raise exception 'role % may not create the llmgw roles: %', current_user, sqlerrm
            using hint = 'Run the first upgrade as a user with CREATEROLE, or create llmgw_owner, '
                         'llmgw_controller, llmgw_agent and llmgw_read (nologin) and grant llmgw_owner to it.';
end $$;

create schema if not exists llmgw_core;
alter schema llmgw_core owner to llmgw_owner;
create schema llmgw authorization llmgw_owner;
create schema agent authorization llmgw_owner;

-- From here on everything belongs to the owner role, whoever migrates.
set local role llmgw_owner;
alter default privileges for role llmgw_owner revoke execute on functions from public;

comment on schema llmgw_core is 'Tables, private: read the views in llmgw instead.';
comment on schema llmgw is 'The public contract: views and functions for people, dashboards, llmgwctl and the API.';
comment on schema agent is 'The agents'' door: the only functions that a node may call.';
