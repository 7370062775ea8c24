"""Alembic's entry: online through sql.migrate's connection, offline as SQL text."""

from __future__ import annotations

from alembic import context

VERSIONS = {"version_table": "alembic_version", "version_table_schema": "llmgw_core"}

if context.is_offline_mode():
    context.configure(dialect_name="postgresql", literal_binds=True, **VERSIONS)
    with context.begin_transaction():
        context.run_migrations()
else:
    connection = context.config.attributes.get("connection")
    if connection is None:
        raise SystemExit(
            "run upgrades by `llmgwctl db upgrade`: it locks, and re-applies functions and views"
        )
    context.configure(connection=connection, transaction_per_migration=False, **VERSIONS)
    context.run_migrations()
