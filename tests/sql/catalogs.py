"""What a database consists of, as comparable text: for telling two ways of building it apart."""

from __future__ import annotations

from typing import Any

OURS = "n.nspname in ('llmgw_core', 'llmgw', 'agent')"
QUERIES = {
    "schemas": f"""
        select nspname, nspowner::regrole::text, nspacl::text from pg_namespace n where {OURS}""",
    "relations": f"""
        select c.oid::regclass::text, c.relkind, c.relpersistence, c.relowner::regrole::text,
            case when not c.relispartition then c.relacl::text end, c.reloptions::text,
            pg_get_expr(c.relpartbound, c.oid), pg_get_partkeydef(c.oid),
            case when c.relkind = 'v' then pg_get_viewdef(c.oid) end
        from pg_class c join pg_namespace n on n.oid = c.relnamespace
        where {OURS} and c.relkind in ('r', 'p', 'v', 'S')""",
    "columns": f"""
        select c.oid::regclass::text, a.attnum, a.attname, format_type(a.atttypid, a.atttypmod),
            a.attnotnull, a.attidentity, a.attgenerated, a.attacl::text,
            pg_get_expr(d.adbin, d.adrelid)
        from pg_attribute a join pg_class c on c.oid = a.attrelid
        join pg_namespace n on n.oid = c.relnamespace
        left join pg_attrdef d on d.adrelid = a.attrelid and d.adnum = a.attnum
        where {OURS} and c.relkind in ('r', 'p', 'v') and a.attnum > 0 and not a.attisdropped""",
    "constraints": f"""
        select c.conrelid::regclass::text, c.conname, pg_get_constraintdef(c.oid)
        from pg_constraint c join pg_namespace n on n.oid = c.connamespace where {OURS}""",
    "indexes": f"""
        select i.indexdef from pg_indexes i
        join pg_namespace n on n.nspname = i.schemaname where {OURS}""",
    "triggers": f"""
        select pg_get_triggerdef(t.oid) from pg_trigger t join pg_class c on c.oid = t.tgrelid
        join pg_namespace n on n.oid = c.relnamespace where {OURS} and not t.tgisinternal""",
    "functions": f"""
        select p.oid::regprocedure::text, pg_get_functiondef(p.oid),
            p.proowner::regrole::text, p.proacl::text
        from pg_proc p join pg_namespace n on n.oid = p.pronamespace where {OURS}""",
    "defaults": """
        select defaclrole::regrole::text, defaclobjtype, defaclacl::text from pg_default_acl""",
    "comments": f"""
        select d.classoid::regclass::text, coalesce(c.relname, p.proname, s.nspname),
            d.objsubid, d.description
        from pg_description d
        left join pg_class c on d.classoid = 'pg_class'::regclass and c.oid = d.objoid
        left join pg_proc p on d.classoid = 'pg_proc'::regclass and p.oid = d.objoid
        left join pg_namespace s on d.classoid = 'pg_namespace'::regclass and s.oid = d.objoid
        join pg_namespace n on n.oid = coalesce(c.relnamespace, p.pronamespace, s.oid)
        where {OURS}""",
    "seeds": """
        select 'setting', name, value::text from llmgw_core.setting
        union all select 'transition', kind, from_state || '>' || to_state
            from llmgw_core.transition
        union all select 'lock', name, concat(class, '/', id) from llmgw_core.lock_name
        union all select 'reason', code, sentence from llmgw_core.reason""",
}


def catalogs(connection: Any) -> dict[str, list[str]]:
    """Every object of our schemas with owner, rights, definition, comment, and the seeded rows."""
    return {
        name: sorted(str(tuple(row)) for row in connection.execute(query).fetchall())
        for name, query in QUERIES.items()
    }
