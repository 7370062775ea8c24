-- When another model may answer: said by a scope or a key, nearer than the settings.
set local role llmgw_owner;

-- Without a default no row is written again.
alter table llmgw_core.scope add column fallback text[] constraint scope_fallback check (fallback <@ array['unavailable', 'timeout', 'error', 'refusal'] and cardinality(fallback) <= 4);
alter table llmgw_core.api_key add column fallback text[] constraint api_key_fallback check (fallback <@ array['unavailable', 'timeout', 'error', 'refusal'] and cardinality(fallback) <= 4);
comment on column llmgw_core.scope.fallback is 'For which reasons another model may answer those below; {}: for none. Null: not said here.';
comment on column llmgw_core.api_key.fallback is 'For which reasons another model may answer this key; {}: for none. Null: its scopes say, or the settings.';

-- They take fallback too from here on; two of one name would be one too many. No release has them.
drop function if exists llmgw.key_create_v2(text, text, bytea, text, text[], double precision, text, text[], jsonb);
drop function if exists llmgw.scope_create_v1(text, text, text, text, jsonb);
