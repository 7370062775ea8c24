-- Downloads that nobody needs.

create or replace view llmgw.weight_orphans as
with used as (
    select source from llmgw_core.model
    union
    select spec->>'source' from llmgw_core.shard where state not in ('stopped', 'failed') and spec->>'source' is not null),
local as (
    select regexp_replace(source, '^file:(//[^/]*)?', '') || '/' as path from used where source like 'file:%')
select w.node_id as node, w.source, w.path, w.bytes, w.complete, w.name, w.format, w.shared, w.filer, w.filer_path
from llmgw_core.weight w
where w.managed and w.source is not null
  and not exists (select 1 from used u where u.source = w.source)
  -- A model may also name a file within a download.
  and not exists (select 1 from local l where starts_with(l.path, w.path || '/'));
comment on view llmgw.weight_orphans is 'Downloads of agents whose source is no model of the catalog and that no live shard of the fleet uses: llmgwctl weights collect removes them.';
