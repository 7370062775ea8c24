-- name: scopes
-- A page of scopes, oldest first; which they are is found before anything is counted of them.
select jsonb_strip_nulls(to_jsonb(v)) as row, jsonb_build_array(v.id) as key
from llmgw.scopes v where v.id = any (array(select s.id from llmgw_core.scope_line s
    where ($1::jsonb is null or s.id > ($1::jsonb->>0)::bigint) and ($3::text is null or s.kind = $3)
        and ($4::text is null or s.id = any (array(select llmgw_core.scopes_below(llmgw_core.scope_of($4::text))))) and ($5::boolean or s.deleted_at is null)
    order by s.id limit $2::int))
order by v.id;

-- name: scope
-- One scope by its id.
select jsonb_strip_nulls(to_jsonb(v)) from llmgw.scopes v where v.id = $1::text::bigint;

-- name: scope_create
-- A new scope; answers its id.
select llmgw.scope_create_v1($1::text, $2::text, $3::text, $4::text, $5::jsonb, $6::text[]);

-- name: scope_change
-- Changes what is named of a scope; answers its id.
select llmgw.scope_change_v1($1::text, $2::text, $3::jsonb)::text;

-- name: scope_move
-- Another parent for a scope; answers its id.
select llmgw.scope_move_v1($1::text, $2::text, $3::text)::text;

-- name: scope_rename
-- Another name for a scope; answers its id.
select llmgw.scope_rename_v1($1::text, $2::text, $3::text)::text;

-- name: scope_delete
-- Deletes a scope with all below it; answers how much that was.
select llmgw.scope_delete_v1($1::text, $2::text);

-- name: keys
-- A page of keys, oldest first; never anything secret. Which they are is found before their scopes are looked at: there may be a million.
select jsonb_strip_nulls(to_jsonb(v)) as row, jsonb_build_array(v.created_at, v.id) as key
from llmgw.keys v where v.id = any (array(select k.id from llmgw_core.api_key k
    where ($1::jsonb is null or (k.created_at, k.id) > (($1::jsonb->>0)::timestamptz, $1::jsonb->>1))
        and ($3::text is null or k.scope_id = any (array(select llmgw_core.scopes_below(llmgw_core.scope_of($3::text)))))
        and ($4::text is null or $4 = case when k.revoked_at is not null then 'revoked' when k.expires_at <= clock_timestamp() then 'expired' else 'active' end)
    order by k.created_at, k.id limit $2::int))
order by v.created_at, v.id;

-- name: source
-- For the rest of this transaction: the address that the audit notes.
select set_config('llmgw.source', $1::text, true);

-- name: key_create
-- Keeps the hash of a new key.
select to_jsonb(llmgw.key_create_v2($1::text, $2::text, $3::bytea, $4::text, $5::text[], $6::double precision, $7::text, $8::text[], $9::jsonb, $10::text[]));

-- name: key_rotate
-- A new secret for a key; answers until when the one before is good.
select to_jsonb(llmgw.key_rotate_v1($1::text, $2::text, $3::bytea, $4::double precision));

-- name: key_change
-- Changes what is named of a key.
select llmgw.key_change_v1($1::text, $2::text, $3::jsonb);

-- name: key
-- One key by its id.
select jsonb_strip_nulls(to_jsonb(v)) from llmgw.keys v where v.id = $1::text;

-- name: key_move
-- Puts a key into a scope.
select llmgw.key_move_v1($1::text, $2::text, $3::text);

-- name: key_revoke
-- The key is refused everywhere within two seconds.
select llmgw.key_revoke_v1($1::text, $2::text);

-- name: users
-- A page of users by name.
select jsonb_strip_nulls(to_jsonb(v)) as row, jsonb_build_array(v.name) as key
from llmgw.users v where $1::jsonb is null or v.name > $1::jsonb->>0 order by v.name limit $2::int;

-- name: user_create
-- Somebody who may log in.
select llmgw.user_create_v1($1::text, $2::text, $3::text, $4::boolean, $5::text);

-- name: user_password
-- Another password for a user.
select llmgw.user_password_v1($1::text, $2::text, $3::text);

-- name: user_remove
-- A user may log in no more.
select llmgw.user_remove_v1($1::text, $2::text);

-- name: login_begin
-- What to compare a password with, or how long to wait after too many failures.
select person_id, password_hash, wait_s from llmgw_core.login_begin_v1($1::text, $2::text);

-- name: login_end
-- The password was right: keeps the hash of the session; answers when it ends.
select to_jsonb(llmgw_core.login_end_v1($1::bigint, $2::text, $3::bytea));

-- name: session_find
-- Whose session this is.
select name, admin, scope_id, expires_at from llmgw_core.session_find_v1($1::bytea);

-- name: session_end
-- Logs out.
select llmgw_core.session_end_v1($1::bytea);

-- name: audit
-- A page of changes, newest first; of one object ("key k3x9...") or of all of a kind ("key").
select jsonb_strip_nulls(to_jsonb(v)) as row, jsonb_build_array(v.id) as key
from llmgw.audit v
where ($1::jsonb is null or v.id < ($1::jsonb->>0)::bigint)
    and ($3::text is null or v.object = $3 or starts_with(v.object, $3 || ' ')) and ($4::text is null or v.actor = $4)
    and ($5::double precision is null or v.at > clock_timestamp() - make_interval(secs => $5))
order by v.id desc limit $2::int;
