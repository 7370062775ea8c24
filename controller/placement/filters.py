"""The hard rules that a node must pass, each one function ``(profile, node) -> Reason | None``.

`refusals` runs all of them and never stops at the first: a person fixing one cause must see the
others too. Rules about cards are in `cards.py`. An unknown fact refuses by its own code.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Final

from controller.placement import cards
from controller.placement.model import MAY_PLACE, Node, Profile
from controller.placement.reasons import Code, Reason, size

if TYPE_CHECKING:
    from collections.abc import Callable

ANY_ENGINE: Final = "command"
"""An engine that is a command line of the user's: there is nothing to find installed."""

CORES_SLACK: Final = 1e-6
"""Sums of fractions of cores are floats; the database allows the same slack."""

PORTS_OF_A_HEAD: Final = 2
"""Where clients come in, and where the shards of a gang meet."""

_STATES: Final = {
    "cordoned": Code.NODE_CORDONED,
    "draining": Code.NODE_DRAINING,
    "unreachable": Code.NODE_UNREACHABLE,
    "lost": Code.NODE_LOST,
}
_ARCH_NAMES: Final = {"amd64": "x86_64", "x86-64": "x86_64", "arm64": "aarch64"}


def node_state(profile: Profile, node: Node) -> Reason | None:
    """Only a ready node gets anything new."""
    if node.state == MAY_PLACE:
        return None
    code = _STATES.get(node.state, Code.NODE_NOT_READY)
    return Reason(code, MAY_PLACE, node.state_reason or node.state)


def pool(profile: Profile, node: Node) -> Reason | None:
    """Every label of the pool must have one of its values."""
    wrong = [k for k, accepted in profile.pool_labels.items() if node.labels.get(k) not in accepted]
    if not wrong:
        return None
    need = ", ".join(f"{k}={'|'.join(profile.pool_labels[k])}" for k in sorted(wrong))
    have = ", ".join(
        f"{k}={node.labels[k]}" if k in node.labels else f"no {k}" for k in sorted(wrong)
    )
    return Reason(Code.POOL_MISMATCH, need, have)


def arch(profile: Profile, node: Node) -> Reason | None:
    """The processor architecture, under whatever name people use for it."""
    if profile.arch is None:
        return None
    if node.arch is None:
        return Reason(Code.ARCH_UNKNOWN, profile.arch)
    if _arch_name(profile.arch) == _arch_name(node.arch):
        return None
    return Reason(Code.ARCH_MISMATCH, profile.arch, node.arch)


def cpu_flags(profile: Profile, node: Node) -> Reason | None:
    """All wanted processor flags."""
    if not profile.cpu_flags:
        return None
    need = ", ".join(profile.cpu_flags)
    if node.cpu_flags is None:
        return Reason(Code.CPU_FLAGS_UNKNOWN, need)
    missing = [flag for flag in profile.cpu_flags if flag not in node.cpu_flags]
    return Reason(Code.CPU_FLAG_MISSING, need, ", ".join(missing)) if missing else None


def must_install(profile: Profile, node: Node) -> bool:
    """The profile names a version of its engine that the node has not."""
    if profile.engine == ANY_ENGINE or profile.engine_version is None:
        return False
    return profile.engine_version not in (node.engines or {}).get(profile.engine, ())


def may_install(profile: Profile, node: Node) -> bool:
    """The agent may install what the profile names; without a version there is nothing to name."""
    return profile.engine_version is not None and profile.engine in node.provisions


def engine(profile: Profile, node: Node) -> Reason | None:
    """The engine is installed, whatever its version, or the agent may install it."""
    if profile.engine == ANY_ENGINE:
        return None
    if node.engines is None:
        return Reason(Code.ENGINES_UNKNOWN, profile.engine)
    if profile.engine in node.engines or may_install(profile, node):
        return None
    have = ", ".join(sorted(node.engines)) or "none"
    if profile.engine in node.provisions:
        have += "; the node would install a version that the profile names"
    return Reason(Code.ENGINE_MISSING, profile.engine, have)


def engine_version(profile: Profile, node: Node) -> Reason | None:
    """The wanted version of the engine is installed, or the agent may install it and can."""
    version = profile.engine_version
    if version is None or node.engines is None or not must_install(profile, node):
        return None
    need = f"{profile.engine} {version}"
    failed = node.engine_failures.get((profile.engine, version))
    if failed is not None:
        return Reason(Code.ENGINE_FAILED, need, failed or "no cause reported")
    installed = node.engines.get(profile.engine)
    if installed is None or may_install(profile, node):
        return None
    have = ", ".join(version or "unknown" for version in sorted(installed))
    return Reason(Code.ENGINE_VERSION, need, have or "unknown")


def cpus(profile: Profile, node: Node) -> Reason | None:
    """Cores that no live shard has claimed."""
    if profile.cpus is None:
        return None
    need = f"{profile.cpus:g} cores"
    if node.cpus is None:
        return Reason(Code.CPUS_UNKNOWN, need)
    free = node.cpus - node.cpus_claimed
    if profile.cpus <= free + CORES_SLACK:
        return None
    return Reason(Code.CPUS, need, f"{max(free, 0.0):.6g} of {node.cpus:g} cores")


def memory(profile: Profile, node: Node) -> Reason | None:
    """Host memory that no live shard has claimed; with unified memory the card's is part of it."""
    pooled = from_pool(profile, node)
    if profile.memory_mib is None and pooled == 0:
        return None
    wanted = (profile.memory_mib or 0) + (pooled or 0)
    need = size(wanted)
    if node.memory_mib is None or pooled is None:
        return Reason(Code.MEMORY_UNKNOWN, need)
    free = node.memory_mib - node.memory_claimed_mib
    if wanted <= free:
        return None
    return Reason(Code.MEMORY, need, f"{size(max(free, 0))} of {size(node.memory_mib)}")


def from_pool(profile: Profile, node: Node) -> int | None:
    """Host memory in MiB that the shard's cards take, where they are unified; None when unknown.

    A share takes its part, a shard that holds the card alone all of the card's memory (E02).
    """
    unified = [gpu for gpu in node.gpus if gpu.unified][: profile.gpus]
    total = 0
    for gpu in unified:
        part = profile.gpu_memory_mib if profile.share else gpu.memory_mib
        if part is None:
            return None
        total += part
    return total


def disk(profile: Profile, node: Node) -> Reason | None:
    """Room for weights that are not there yet. Unknown sizes refuse nothing: the agent checks."""
    need, free = profile.weights_mib, node.weights_free_mib
    if need is None or free is None or need <= free or has_weights(profile, node):
        return None
    return Reason(Code.DISK, size(need), size(free))


def has_weights(profile: Profile, node: Node) -> bool:
    """Whether the node has the weights whole."""
    return profile.spec.get("source") in node.sources_on_disk


def uncut(profile: Profile, node: Node) -> Reason | None:
    """Parts of the model that no engine can make: it would fail wherever it starts."""
    return None if profile.uncut is None else Reason(Code.MODEL_UNCUT, None, profile.uncut)


def port(profile: Profile, node: Node) -> Reason | None:
    """A port for the engine; two for shards of a gang, of which any may become the head."""
    need = 1 if profile.shards == 1 else PORTS_OF_A_HEAD
    if len(free_ports(node, need)) == need:
        return None
    words = "1 port" if need == 1 else f"{need} ports"
    return Reason(Code.PORT_RANGE_FULL, words, f"{node.ports[0]}-{node.ports[1]}")


def address(profile: Profile, node: Node) -> Reason | None:
    """Routers must know where the engine will be."""
    return None if node.mgmt_addr else Reason(Code.ADDRESS_UNKNOWN)


def excluded(profile: Profile, node: Node) -> Reason | None:
    """An operator's word: not here."""
    return Reason(Code.NODE_EXCLUDED) if node.id in profile.exclude_nodes else None


def alone(profile: Profile, node: Node) -> Reason | None:
    """Replicas that must not die together are never on one node."""
    if profile.alone_of is None or profile.alone_of not in node.models:
        return None
    return Reason(Code.MODEL_ON_NODE, "a node without one", profile.alone_of)


RULES: Final[tuple[Callable[[Profile, Node], Reason | None], ...]] = (
    node_state,
    excluded,
    uncut,
    alone,
    pool,
    arch,
    cpu_flags,
    engine,
    engine_version,
    cpus,
    memory,
    disk,
    port,
    address,
)
"""In the order in which people read them: the node, then what it is, then what is left of it."""


def refusals(profile: Profile, node: Node) -> tuple[Reason, ...]:
    """Every reason why the node cannot take one shard of the profile; empty when it can."""
    found = [reason for rule in RULES if (reason := rule(profile, node)) is not None]
    if profile.gpus > 0:
        found += cards.refusals(profile, node)
    return tuple(found)


def free_ports(node: Node, most: int) -> list[int]:
    """The lowest ports of the node's range that no live shard holds, at most so many."""
    first, last = node.ports
    free = (p for p in range(first, last + 1) if p not in node.ports_taken)
    return list(islice(free, most))


def _arch_name(name: str) -> str:
    return _ARCH_NAMES.get(name.lower(), name.lower())
