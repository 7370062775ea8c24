-- What a waiting request takes at least goes to these functions too; two of one name would be one too many. No release has them.
set local role llmgw_owner;

drop function if exists llmgw_core.allow(uuid, bigint, text, bigint, numeric, bigint, boolean, timestamptz, bigint, numeric, numeric, numeric, numeric);
drop function if exists llmgw_core.allow_money(uuid, bigint, bigint, bigint, numeric, numeric, numeric, numeric);
drop function if exists llmgw_core.allow_rate(uuid, bigint, bigint, text, bigint, bigint, numeric, numeric, numeric, numeric);
