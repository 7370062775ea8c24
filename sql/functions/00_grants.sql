-- Standing grants, applied after every upgrade. Functions and views grant what they give beside their definition.
grant usage on schema llmgw to llmgw_controller, llmgw_read;
grant usage on schema llmgw_core to llmgw_controller;
grant usage on schema agent to llmgw_agent;

-- A controller reads every table and changes none directly: it calls functions, which check the term.
grant select on all tables in schema llmgw_core to llmgw_controller;
grant select on sequence llmgw_core.change to llmgw_controller;
