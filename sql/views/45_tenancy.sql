create or replace view llmgw_core.scope_line as
select s.id, s.kind, s.name, s.parent, concat_ws('/', g.name, p.name, s.name) as path, array_remove(array[g.id, p.id, s.id], null) as chain,
    case 'org' when s.kind then s.id when p.kind then p.id when g.kind then g.id end as org_id,
    case 'team' when s.kind then s.id when p.kind then p.id when g.kind then g.id end as team_id,
    case 'user' when s.kind then s.id end as user_id,
    coalesce(s.deleted_at, p.deleted_at, g.deleted_at) as deleted_at,
    coalesce(s.fallback, p.fallback, g.fallback) as fallback,
    case when s.fallback is not null then s.kind when p.fallback is not null then p.kind when g.fallback is not null then g.kind end as fallback_by,
    coalesce(case when s.parent is null then s.weight when p.parent is null then p.weight else g.weight end, 1) as weight
from llmgw_core.scope s left join llmgw_core.scope p on p.id = s.parent left join llmgw_core.scope g on g.id = p.parent;
comment on view llmgw_core.scope_line is 'Each scope with what stands above it: its path, and the ids from the top (there are three levels at most). fallback is what the nearest says that says something, fallback_by its kind; weight is that of the top.';

create or replace view llmgw_core.usable_key as
select k.id, k.hash, k.models, extract(epoch from k.expires_at)::double precision as expires_at, l.chain, l.org_id, l.team_id, l.user_id, k.ips::text[] as ips, k.tags,
    o.old_hashes, o.old_until, coalesce(k.fallback, l.fallback) as fallback, case when k.fallback is not null then 'key' else l.fallback_by end as fallback_by, l.weight
from llmgw_core.api_key k left join llmgw_core.scope_line l on l.id = k.scope_id,
    lateral (select array_agg(o.hash) as old_hashes, array_agg(extract(epoch from o.until)::double precision) as old_until
        from llmgw_core.api_key_old o where o.key_id = k.id and o.until > clock_timestamp()) o
where k.revoked_at is null and l.deleted_at is null;
comment on view llmgw_core.usable_key is 'Keys that are not revoked, expired ones too, as a router needs them: with the scopes above and older secrets within their grace.';

create or replace view llmgw.scopes as
select l.id, l.kind, l.name, l.path, l.parent, s.tags,
    (select count(*) from llmgw_core.api_key k where k.scope_id = l.id and k.revoked_at is null and (k.expires_at is null or k.expires_at > clock_timestamp())) as keys,
    s.created_by, s.created_at, l.deleted_at, s.fallback, case when l.parent is null then l.weight end as weight
from llmgw_core.scope_line l join llmgw_core.scope s on s.id = l.id;
comment on view llmgw.scopes is 'Organisations, teams and users, deleted ones too (deleted_at). keys counts the active ones directly in it; path is what people write, id never changes. fallback: for which reasons another model may answer ({}: none); null = not said here. weight: turns of all below it while others wait too; null below the top, where the top''s counts.';

create or replace view llmgw.keys as
select k.id, k.name, k.models, k.created_by, k.created_at, k.expires_at, k.revoked_at,
    case when k.revoked_at is not null then 'revoked' when k.expires_at <= clock_timestamp() then 'expired' else 'active' end as state,
    k.scope_id, l.path as scope, k.ips::text[] as ips, k.tags, k.rotated_at,
    (select max(o.until) from llmgw_core.api_key_old o where o.key_id = k.id and o.until > clock_timestamp() and k.revoked_at is null) as old_until, u.used_at, k.fallback
from llmgw_core.api_key k left join llmgw_core.scope_line l on l.id = k.scope_id left join llmgw_core.api_key_use u on u.key_id = k.id;
comment on view llmgw.keys is 'Keys of clients, without anything secret. models null = every model, ips null = from anywhere; scope is a path. old_until: so long a secret from before a rotation is good too. used_at to the minute. fallback: for which reasons another model may answer ({}: none); null = as its scopes or the settings say.';

create or replace view llmgw.users as
select p.id, p.name, p.admin, l.path as scope, p.created_by, p.created_at, p.password_at, s.sessions, s.seen_at
from llmgw_core.person p left join llmgw_core.scope_line l on l.id = p.scope_id,
    lateral (select count(*) as sessions, max(x.seen_at) as seen_at from llmgw_core.session x where x.person_id = p.id and x.expires_at > clock_timestamp()
        and x.seen_at > clock_timestamp() - (select make_interval(secs => value) from llmgw_core.setting where name = 'session_idle')) s
order by p.name;
comment on view llmgw.users is 'Who may log in to the pages, with how many sessions are open and when one was last used.';

create or replace view llmgw.audit as
select a.id, a.at, a.actor, a.action, a.object, a.detail, a.source from llmgw_core.audit a;
comment on view llmgw.audit is 'Who changed what, when and from which address; order by id desc for the newest.';
