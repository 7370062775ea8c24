-- The catalog: pools and models as documents in, rows kept, what changed out.

create or replace function llmgw_core.no_model(p_name text) returns text
language sql stable security definer set search_path = llmgw_core, pg_temp as $$
    select coalesce((select format('there is no model %s: it is an alias of model %s', p_name, n.model)
                     from llmgw_core.model_name n where n.name = p_name and n.is_alias), 'there is no model ' || p_name)
$$;
comment on function llmgw_core.no_model(text) is 'That no model has this name, and whose alias it is.';

create or replace function llmgw_core.model_doc(p_model text) returns jsonb
language sql stable security definer set search_path = llmgw_core, pg_temp as $$
    select jsonb_build_object('name', m.name, 'description', m.description, 'source', m.source,
        'min_replicas', m.min_replicas, 'max_replicas', m.max_replicas, 'idle_timeout_s', m.idle_timeout_s, 'priority', m.priority,
        'aliases', coalesce((select jsonb_agg(a.name order by a.name) from llmgw_core.model_name a where a.model = m.name and a.is_alias), '[]'),
        'fallbacks', coalesce((select jsonb_agg(f.fallback order by f.position) from llmgw_core.fallback f where f.model = m.name), '[]'),
        'prices', (select jsonb_build_object('prompt', p.prompt, 'cached', p.cached, 'completion', p.completion)
                   from llmgw_core.price_of(m.name) p where num_nonnulls(p.prompt, p.cached, p.completion) > 0),
        'profiles', coalesce((select jsonb_agg(to_jsonb(p) - 'model' - 'position' order by p.position)
                              from llmgw_core.profile p where p.model = m.name), '[]'))
    from llmgw_core.model m where m.name = p_model
$$;
comment on function llmgw_core.model_doc(text) is 'A model as the document that model_put takes.';

create or replace function llmgw_core.model_put(p_actor text, p_doc jsonb, p_before jsonb, p_origin text, p_file text) returns text
language plpgsql security definer set search_path = llmgw_core, pg_temp as $$
declare
    wanted text := p_doc->>'name';
    was llmgw_core.model;
    after_ jsonb;
    taken record;
begin
    select * into was from llmgw_core.model where name = wanted for update;
    if was.name is not null and (was.origin, coalesce(was.origin_file, '')) is distinct from (p_origin, coalesce(p_file, '')) then
        raise exception 'model % is declared by %: change it there', wanted,
            case was.origin when 'file' then 'the catalog file ' || was.origin_file else 'the API' end using errcode = 'LG003';
    end if;
    select n.name, n.model into taken from llmgw_core.model_name n
        where n.model <> wanted and (n.name = wanted or n.name in (select jsonb_array_elements_text(p_doc->'aliases'))) limit 1;
    if taken.name is not null then
        raise exception 'the name % is taken by model %', taken.name, taken.model using errcode = 'LG003';
    end if;
    insert into llmgw_core.model as m (name, description, source, min_replicas, max_replicas, idle_timeout_s, priority, origin, origin_file, updated_by)
        values (wanted, p_doc->>'description', p_doc->>'source', (p_doc->>'min_replicas')::int, (p_doc->>'max_replicas')::int,
                (p_doc->>'idle_timeout_s')::double precision, coalesce((p_doc->>'priority')::int, 0), p_origin, p_file, p_actor)
        on conflict (name) do update set description = excluded.description, source = excluded.source,
            min_replicas = excluded.min_replicas, max_replicas = excluded.max_replicas, idle_timeout_s = excluded.idle_timeout_s,
            priority = excluded.priority;
    delete from llmgw_core.model_name where model = wanted;
    insert into llmgw_core.model_name (name, model, is_alias)
        select wanted, wanted, false union all select a, wanted, true from jsonb_array_elements_text(p_doc->'aliases') a;
    delete from llmgw_core.fallback where model = wanted;
    insert into llmgw_core.fallback (model, position, fallback)
        select wanted, ord, f from jsonb_array_elements_text(p_doc->'fallbacks') with ordinality as e(f, ord);
    delete from llmgw_core.profile where model = wanted;
    insert into llmgw_core.profile
        select (jsonb_populate_record(null::llmgw_core.profile,
            jsonb_strip_nulls(jsonb_build_object('args', '[]'::jsonb, 'env', '{}'::jsonb, 'gpus', 0, 'share', false,
                'cpu_flags', '[]'::jsonb, 'shards', 1, 'fabric', 'fabric', 'exclude_nodes', '[]'::jsonb, 'spread', 'prefer')) || jsonb_strip_nulls(p) || jsonb_build_object('model', wanted, 'position', ord))).*
        from jsonb_array_elements(p_doc->'profiles') with ordinality as e(p, ord);
    perform llmgw_core.price_put(p_actor, wanted, p_doc->'prices');
    after_ := llmgw_core.model_doc(wanted);
    if was.name is null then
        return 'added';
    elsif p_before = after_ then
        return 'unchanged';
    end if;
    update llmgw_core.model set updated_at = clock_timestamp(), updated_by = p_actor where name = wanted;
    return 'changed';
end $$;
comment on function llmgw_core.model_put(text, jsonb, jsonb, text, text) is 'Writes one model; p_before is its document as it was; returns added, changed or unchanged. LG003 when another origin declares it or a name is taken.';

create or replace function llmgw_core.pool_put(p_doc jsonb, p_origin text, p_file text) returns text
language plpgsql security definer set search_path = llmgw_core, pg_temp as $$
declare
    was llmgw_core.pool;
begin
    select * into was from llmgw_core.pool where name = p_doc->>'name' for update;
    if was.name is not null and (was.origin, coalesce(was.origin_file, '')) is distinct from (p_origin, coalesce(p_file, '')) then
        raise exception 'pool % is declared by %: change it there', was.name,
            case was.origin when 'file' then 'the catalog file ' || was.origin_file else 'the API' end using errcode = 'LG003';
    end if;
    insert into llmgw_core.pool (name, labels, origin, origin_file) values (p_doc->>'name', p_doc->'labels', p_origin, p_file)
        on conflict (name) do update set labels = excluded.labels;
    return case when was.name is null then 'added' when was.labels = p_doc->'labels' then 'unchanged' else 'changed' end;
end $$;
comment on function llmgw_core.pool_put(jsonb, text, text) is 'Writes one pool; returns added, changed or unchanged.';

create or replace function llmgw_core.catalog_apply_v1(p_actor text, p_pools jsonb, p_models jsonb, p_origin text, p_file text, p_prune boolean)
returns table (action text, kind text, name text)
language plpgsql security definer set search_path = llmgw_core, pg_temp as $$
#variable_conflict use_column
declare
    doc jsonb;
    before jsonb;
    news boolean := false;
begin
    perform pg_advisory_xact_lock(7720, 2);
    -- Models of this origin let go of aliases and fallbacks first, so that these can move between models and to and
    -- from models that leave, whatever the order; model_put gives back what stays.
    select coalesce(jsonb_object_agg(m.name, llmgw_core.model_doc(m.name)), '{}') into before from llmgw_core.model m
        where m.origin = p_origin and m.origin_file is not distinct from p_file
          and (p_prune or m.name in (select e->>'name' from jsonb_array_elements(p_models) e));
    delete from llmgw_core.model_name a where a.is_alias and before ? a.model;
    delete from llmgw_core.fallback f where before ? f.model;
    for kind, name in
        select 'model', b from jsonb_object_keys(before) b
        where p_prune and b not in (select e->>'name' from jsonb_array_elements(p_models) e) order by b
    loop
        perform llmgw_core.catalog_drop(p_actor, kind, name);
        action := 'removed'; news := true;
        return next;
    end loop;
    for doc in select * from jsonb_array_elements(p_pools) loop
        kind := 'pool'; name := doc->>'name'; action := llmgw_core.pool_put(doc, p_origin, p_file);
        if action <> 'unchanged' then
            news := true;
            perform llmgw_core.audited(p_actor, action, 'pool ' || name, doc);
        end if;
        return next;
    end loop;
    for doc in select * from jsonb_array_elements(p_models) loop
        kind := 'model'; name := doc->>'name'; action := llmgw_core.model_put(p_actor, doc, before->name, p_origin, p_file);
        if action <> 'unchanged' then
            news := true;
            perform llmgw_core.audited(p_actor, action, 'model ' || name, llmgw_core.model_doc(name));
        end if;
        return next;
    end loop;
    if p_prune then
        for kind, name in
            select 'pool', p.name from llmgw_core.pool p where p.origin = p_origin and p.origin_file is not distinct from p_file
                and p.name not in (select e->>'name' from jsonb_array_elements(p_pools) e)
        loop
            perform llmgw_core.catalog_drop(p_actor, kind, name);
            action := 'removed'; news := true;
            return next;
        end loop;
    end if;
    -- What lies under a path that a model names now is its weights already, not only after the node's next report.
    update llmgw_core.weight w set source = m.source from llmgw_core.model m
        where w.source is null and m.source like 'file:%' and w.path = llmgw_core.file_path(m.source);
    set constraints all immediate;  -- a fallback that names nothing is refused here, not at COMMIT
    if news then
        perform nextval('llmgw_core.change');
        perform llmgw_core.notify('models');
    end if;
end $$;
comment on function llmgw_core.catalog_apply_v1(text, jsonb, jsonb, text, text, boolean) is 'Applies pools and models; with prune, what the same origin declared before and no longer does is removed. One row per object: added, changed, unchanged or removed. Roll back for a dry run.';

create or replace function llmgw_core.catalog_drop(p_actor text, p_kind text, p_name text) returns void
language plpgsql security definer set search_path = llmgw_core, pg_temp as $$
declare
    user_ text;
begin
    if p_kind = 'pool' then
        select p.model || '/' || p.name into user_ from llmgw_core.profile p where p.pool = p_name limit 1;
        if user_ is not null then
            raise exception 'pool % is used by profile %', p_name, user_ using errcode = 'LG003';
        end if;
        delete from llmgw_core.pool where name = p_name;
        perform llmgw_core.audited(p_actor, 'removed', 'pool ' || p_name);
        return;
    end if;
    select f.model into user_ from llmgw_core.fallback f where f.fallback = p_name and f.model <> p_name limit 1;
    if user_ is not null then
        raise exception 'model % is a fallback of model %: change that one first', p_name, user_ using errcode = 'LG003';
    end if;
    delete from llmgw_core.model where name = p_name;
    delete from llmgw_core.attempt where model = p_name;
    perform llmgw_core.price_put(p_actor, p_name, null);
    perform llmgw_core.audited(p_actor, 'removed', 'model ' || p_name);
end $$;
comment on function llmgw_core.catalog_drop(text, text, text) is 'Removes a pool or model that nothing refers to. Replicas of a removed model drain and go.';

create or replace function llmgw.model_remove_v1(p_actor text, p_model text) returns void
language plpgsql security definer set search_path = llmgw_core, pg_temp as $$
declare
    m llmgw_core.model;
begin
    select * into m from llmgw_core.model where name = p_model for update;
    if m.name is null then
        raise exception '%', llmgw_core.no_model(p_model) using errcode = 'LG005', hint = 'select name from llmgw.models';
    elsif m.origin = 'file' then
        raise exception 'model % is declared by the catalog file %: remove it there', p_model, m.origin_file using errcode = 'LG003';
    end if;
    perform llmgw_core.catalog_drop(p_actor, 'model', p_model);
    perform nextval('llmgw_core.change');
    perform llmgw_core.notify('models');
end $$;
comment on function llmgw.model_remove_v1(text, text) is 'Takes a model out of the catalog; its replicas drain.';

create or replace function llmgw.scale_v1(p_actor text, p_model text, p_min int, p_max int, p_idle_timeout_s double precision)
returns jsonb language plpgsql security definer set search_path = llmgw_core, pg_temp as $$
declare
    m llmgw_core.model;
begin
    select * into m from llmgw_core.model where name = p_model for update;
    if m.name is null then
        raise exception '%', llmgw_core.no_model(p_model) using errcode = 'LG005', hint = 'select name from llmgw.models';
    elsif m.origin = 'file' then
        raise exception 'model % is declared by the catalog file %: change min_replicas and max_replicas there', p_model, m.origin_file using errcode = 'LG003';
    elsif p_min < 0 or coalesce(p_max, p_min) < p_min then
        raise exception 'model %: need 0 <= min <= max, got min % and max %', p_model, p_min, coalesce(p_max, p_min) using errcode = 'LG003';
    end if;
    update llmgw_core.model set min_replicas = p_min, max_replicas = greatest(coalesce(p_max, p_min), 1),
        idle_timeout_s = coalesce(p_idle_timeout_s, idle_timeout_s), updated_at = clock_timestamp(), updated_by = p_actor
        where name = p_model returning * into m;
    perform llmgw_core.audited(p_actor, 'scale', 'model ' || p_model, jsonb_build_object('min', p_min, 'max', m.max_replicas, 'idle_timeout_s', m.idle_timeout_s));
    perform nextval('llmgw_core.change');
    perform llmgw_core.notify('models');
    return jsonb_build_object('model', m.name, 'min', m.min_replicas, 'max', m.max_replicas, 'idle_timeout', m.idle_timeout_s, 'on_demand', m.min_replicas = 0);
end $$;
comment on function llmgw.scale_v1(text, text, int, int, double precision) is 'Changes how many replicas a model has; returns what is now in force.';

grant execute on function llmgw_core.catalog_apply_v1(text, jsonb, jsonb, text, text, boolean), llmgw_core.model_doc(text),
    llmgw.model_remove_v1(text, text), llmgw.scale_v1(text, text, int, int, double precision) to llmgw_controller;
