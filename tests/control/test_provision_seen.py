"""What agents say of engines that they install, as the views and the tick see it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from controller.reconcile import snapshot

if TYPE_CHECKING:
    from sql.pool import Pool
    from tests.sql.fleet import Fleet


async def test_engines_count_when_installed_and_failures_by_their_version(
    fleet: Fleet, pool: Pool
) -> None:
    node = fleet.node("n1", machine={"provision": ["vllm", "sglang"]})
    rows = [
        {"engine": "vllm", "version": "1", "path": "/e/vllm-1/bin/python", "state": "installed"},
        {"engine": "vllm", "version": "2", "state": "provisioning"},
        {"engine": "vllm", "version": "3", "state": "failed", "error": "no luck\nmore\nlines"},
        {"engine": "sglang", "version": "4", "state": "failed", "error": "no space"},
        {"engine": "sglang", "version": "5", "state": "failed", "path": "/x", "error": "broken"},
    ]
    fleet.report(node, "engines", rows)
    (seen,) = (await snapshot.read(pool)).snapshot.nodes
    assert seen.provisions == {"vllm", "sglang"}
    assert seen.engines == {"vllm": ("1",)}
    assert seen.engine_failures == {("vllm", "3"): "no luck", ("sglang", "4"): "no space"}
    shown = fleet.value("select provision from llmgw.nodes where id = 'n1'")
    assert sorted((p["engine"], p["version"], p["state"]) for p in shown) == [
        ("sglang", "4", "failed"),
        ("sglang", "5", "failed"),
        ("vllm", "2", "provisioning"),
        ("vllm", "3", "failed"),
    ]
    assert fleet.value("select engines from llmgw.nodes where id = 'n1'") == ["vllm 1"]


async def test_an_agent_that_says_nothing_or_nonsense_installs_nothing(
    fleet: Fleet, pool: Pool
) -> None:
    for name, machine in (("a", {}), ("b", {"provision": "vllm"}), ("c", {"provision": {"x": 1}})):
        fleet.node(name, machine=machine)
    seen = (await snapshot.read(pool)).snapshot.nodes
    assert [(n.id, n.provisions, n.engine_failures) for n in seen] == [
        (name, frozenset(), {}) for name in "abc"
    ]
