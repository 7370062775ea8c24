-- What tokens of a model cost, and since when.

create or replace function llmgw_core.price_of(p_model text) returns llmgw_core.price
language sql stable security definer set search_path = llmgw_core, pg_temp as $$
    select p from llmgw_core.price p where p.model = p_model order by p.since desc limit 1
$$;
comment on function llmgw_core.price_of(text) is 'The latest word on what a model costs; nulls when there is none, or when it is unpriced by now.';

create or replace function llmgw_core.price_put(p_actor text, p_model text, p_prices jsonb) returns void
language plpgsql security definer set search_path = llmgw_core, pg_temp as $$
declare
    was llmgw_core.price := llmgw_core.price_of(p_model);
    wanted llmgw_core.price := jsonb_populate_record(null::llmgw_core.price, nullif(p_prices, 'null'));
begin
    if (was.prompt, was.cached, was.completion) is distinct from (wanted.prompt, wanted.cached, wanted.completion) then
        insert into llmgw_core.price (model, since, prompt, cached, completion, set_by) values (p_model,
            greatest(clock_timestamp(), was.since + interval '1 microsecond'),  -- a clock set back must not bring an old price back
            wanted.prompt, wanted.cached, wanted.completion, p_actor);
    end if;
end $$;
comment on function llmgw_core.price_put(text, text, jsonb) is 'Sets what a model costs from now on; nothing is written when that is what it costs already. Null is unpriced.';
