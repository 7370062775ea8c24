create or replace view llmgw.waking as
select distinct on (r.model) r.model, r.id as replica, r.state, r.restarts as failures,
    case r.state
        when 'failed' then coalesce(f.error || coalesce(': ' || f.last_line, ''), r.reason)
        when 'starting' then case s.state
            when 'assigned' then 'its node has not begun yet'
            when 'provisioning' then 'its engine is being installed'
            when 'fetching' then 'its weights are being fetched' || coalesce(
                ' (' || round(100.0 * (s.fetching->>'bytes_done')::bigint / nullif((s.fetching->>'bytes_total')::bigint, 0)) || ' %)', '')
            else 'its engine is starting' end
        else case
            when exists (select 1 from llmgw_core.replica o where o.room_for = r.model and o.state in ('draining', 'stopping'))
                then 'another model''s replica finishes its requests and makes room for it'
            when a.placed = false then 'there is no place for it: ' || (select p.main_reason from llmgw.placements p where p.model = r.model)
            else 'it is being placed' end
    end as why,
    greatest(0, extract(epoch from r.backoff_until - clock_timestamp()))::double precision as retry_s
from llmgw_core.replica r
left join llmgw_core.attempt a on a.model = r.model
left join lateral (
    -- The first to fail took the others with it. Its last line goes to clients, so nothing in it may steer a terminal.
    select x.error, left(regexp_replace((regexp_match(rtrim(x.log_tail, E' \t\r\n'), '[^\n]*$'))[1], '[[:cntrl:]]+', ' ', 'g'), 300) as last_line
    from llmgw_core.shard x where x.replica_id = r.id and x.launch = r.launch and x.state = 'failed' order by x.state_at, x.rank limit 1) f on true
left join lateral (
    select x.state, x.fetching from llmgw_core.shard x where x.replica_id = r.id and x.launch = r.launch
    order by array_position('{assigned,provisioning,fetching,starting}', x.state), x.rank limit 1) s on true
where r.state in ('pending', 'starting', 'failed')
    and not exists (select 1 from llmgw_core.replica o where o.model = r.model and o.state = 'ready')
order by r.model, array_position('{starting,pending,failed}', r.state), r.restarts, r.id;
comment on view llmgw.waking is 'Models with a replica on its way and none ready: how far the furthest is, and what holds it up. Clients that wait for the model are told why, so it names no other model. failures: starts in a row that came to nothing; retry_s: until the next one.';
