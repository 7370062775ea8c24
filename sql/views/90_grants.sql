grant select on all tables in schema llmgw to llmgw_read, llmgw_controller;
grant select on llmgw_core.scope_line, llmgw_core.usable_key, llmgw_core.node_state, llmgw_core.gpu_state, llmgw_core.live_router, llmgw_core.measured, llmgw_core.depth, llmgw_core.replica_use to llmgw_controller;
-- A view calls functions with its reader's rights.
grant execute on function llmgw_core.seconds(text), llmgw_core.present(uuid), llmgw_core.budget_spent(bigint, text, text, timestamptz), llmgw_core.budget_frees_at(bigint, text, text, timestamptz), llmgw_core.imex_fault(jsonb, int) to llmgw_read, llmgw_controller;
