"""Every reason for which a candidate is refused: the code to count and the sentence to read.

Filters make `Reason` values, SQL table ``llmgw_core.reason`` holds the same codes and sentences
(a test compares them). A code is forever: dashboards count it. A new rule gets a new code.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class Code(StrEnum):
    """What kind of thing stood in the way; `*_unknown` means that nobody measured the fact."""

    NODE_NOT_READY = "node_not_ready"
    NODE_CORDONED = "node_cordoned"
    NODE_DRAINING = "node_draining"
    NODE_UNREACHABLE = "node_unreachable"
    NODE_LOST = "node_lost"
    POOL_MISMATCH = "pool_mismatch"
    ARCH_MISMATCH = "arch_mismatch"
    ARCH_UNKNOWN = "arch_unknown"
    CPU_FLAG_MISSING = "cpu_flag_missing"
    CPU_FLAGS_UNKNOWN = "cpu_flags_unknown"
    ENGINE_MISSING = "engine_missing"
    ENGINE_VERSION = "engine_version"
    ENGINE_FAILED = "engine_failed"
    ENGINES_UNKNOWN = "engines_unknown"
    GPU_CLASS = "gpu_class"
    GPU_COUNT = "gpu_count"
    GPU_UNHEALTHY = "gpu_unhealthy"
    GPU_MEMORY = "gpu_memory"
    GPU_FIT = "gpu_fit"
    MODEL_UNCUT = "model_uncut"
    GPU_MEMORY_UNKNOWN = "gpu_memory_unknown"
    GPU_FOREIGN_USE = "gpu_foreign_use"
    GPU_FOREIGN_UNKNOWN = "gpu_foreign_unknown"
    GPU_TAKEN = "gpu_taken"
    GPU_SLICE = "gpu_slice"
    GPU_DRIVER = "gpu_driver"
    GPU_CUDA = "gpu_cuda"
    NODE_EXCLUDED = "node_excluded"
    MODEL_ON_NODE = "model_on_node"
    CPUS = "cpus"
    CPUS_UNKNOWN = "cpus_unknown"
    MEMORY = "memory"
    MEMORY_UNKNOWN = "memory_unknown"
    DISK = "disk"
    PORT_RANGE_FULL = "port_range_full"
    ADDRESS_UNKNOWN = "address_unknown"
    NVLINK_NOT_JOINED = "nvlink_not_joined"
    IMEX_NOT_READY = "imex_not_ready"
    FABRIC_UNKNOWN = "fabric_unknown"
    FABRIC_NAMES_DIFFER = "fabric_names_differ"
    GANG_TOO_SMALL = "gang_too_small"
    NO_NODES = "no_nodes"
    NO_PROFILES = "no_profiles"


SENTENCES: Final[dict[str, str]] = {
    Code.NODE_NOT_READY: "the node is not ready: {have}",
    Code.NODE_CORDONED: "the node is cordoned and gets nothing new: {have}",
    Code.NODE_DRAINING: "the node is being drained: {have}",
    Code.NODE_UNREACHABLE: "the node is unreachable: {have}",
    Code.NODE_LOST: "the node is lost: {have}",
    Code.POOL_MISMATCH: "the node is not in the pool: need {need}, have {have}",
    Code.ARCH_MISMATCH: "wrong processor architecture: need {need}, have {have}",
    Code.ARCH_UNKNOWN: "the processor architecture is unknown: need {need}",
    Code.CPU_FLAG_MISSING: "the processor lacks {have} of the wanted {need}",
    Code.CPU_FLAGS_UNKNOWN: "the processor's flags are unknown: need {need}",
    Code.ENGINE_MISSING: "the engine is not installed: need {need}, have {have}",
    Code.ENGINE_VERSION: "another version of the engine is installed: need {need}, have {have}",
    Code.ENGINE_FAILED: "the engine could not be installed: need {need}: {have}",
    Code.ENGINES_UNKNOWN: "the node has not reported its engines: need {need}",
    Code.GPU_CLASS: "no card of the wanted class: need {need}, have {have}",
    Code.GPU_COUNT: "too few cards: need {need}, have {have}",
    Code.GPU_UNHEALTHY: "cards are unhealthy: need {need}, unhealthy: {have}",
    Code.GPU_MEMORY: "cards are too small: need {need} per card, have {have}",
    Code.GPU_FIT: "the model does not fit on the cards: need {need} per card, have {have}",
    Code.MODEL_UNCUT: "the model cannot be cut for as many cards: {have}",
    Code.GPU_MEMORY_UNKNOWN: (
        "the memory of cards is unknown: need {need} per card, unknown: {have}"
    ),
    Code.GPU_FOREIGN_USE: "processes outside llmgw hold card memory: need {need}, have {have}",
    Code.GPU_FOREIGN_UNKNOWN: (
        "card memory held outside llmgw is unknown: need {need}, unknown: {have}"
    ),
    Code.GPU_TAKEN: "cards are taken by other replicas: need {need}, have {have}",
    Code.GPU_SLICE: "slices of cards cannot work together: need {need}, slices: {have}",
    Code.GPU_DRIVER: "the GPU driver is too old or unknown: need {need}, have {have}",
    Code.GPU_CUDA: "the driver's CUDA is too old or unknown: need {need}, have {have}",
    Code.NODE_EXCLUDED: "the profile excludes the node",
    Code.MODEL_ON_NODE: "a replica of the model is on the node: need {need}, have {have}",
    Code.CPUS: "too few free cores: need {need}, have {have}",
    Code.CPUS_UNKNOWN: "the number of cores is unknown: need {need}",
    Code.MEMORY: "too little free memory: need {need}, have {have}",
    Code.MEMORY_UNKNOWN: "the node's memory is unknown: need {need}",
    Code.DISK: "too little disk space for the weights: need {need}, have {have}",
    Code.PORT_RANGE_FULL: "no free port for the engine in {have}",
    Code.ADDRESS_UNKNOWN: "the node has not reported an address that routers can reach",
    Code.NVLINK_NOT_JOINED: "the node has not joined an NVLink domain: {have}",
    Code.IMEX_NOT_READY: "IMEX is not ready on the node: need {need}, have {have}",
    Code.FABRIC_UNKNOWN: "the node is on no known fabric: {have}",
    Code.FABRIC_NAMES_DIFFER: (
        "the node gives the fabric another name than others do: need {need}, have {have}"
    ),
    Code.GANG_TOO_SMALL: "too few nodes that can work together: need {need}, have {have}",
    Code.NO_NODES: "no node has registered; start an agent on a machine",
    Code.NO_PROFILES: "the model has no profile that says how to run it",
}
"""Code -> sentence with ``{need}`` and ``{have}``; the same text as in ``llmgw_core.reason``."""

PHRASES: Final[dict[str, str]] = {
    Code.NODE_NOT_READY: "are not ready",
    Code.NODE_CORDONED: "are cordoned",
    Code.NODE_DRAINING: "are being drained",
    Code.NODE_UNREACHABLE: "are unreachable",
    Code.NODE_LOST: "are lost",
    Code.POOL_MISMATCH: "are not in the pool",
    Code.ARCH_MISMATCH: "have another architecture",
    Code.ARCH_UNKNOWN: "have an unknown architecture",
    Code.CPU_FLAG_MISSING: "lack processor flags",
    Code.CPU_FLAGS_UNKNOWN: "have unknown processor flags",
    Code.ENGINE_MISSING: "lack the engine",
    Code.ENGINE_VERSION: "have another version of the engine",
    Code.ENGINE_FAILED: "could not install the engine",
    Code.ENGINES_UNKNOWN: "have not reported their engines",
    Code.GPU_CLASS: "have no card of the class",
    Code.GPU_COUNT: "have too few cards",
    Code.GPU_UNHEALTHY: "have unhealthy cards",
    Code.GPU_MEMORY: "lack card memory",
    Code.GPU_FIT: "have cards on which the model does not fit",
    Code.MODEL_UNCUT: "would get parts into which the model cannot be cut",
    Code.GPU_MEMORY_UNKNOWN: "have cards of unknown memory",
    Code.GPU_FOREIGN_USE: "have cards in use outside llmgw",
    Code.GPU_FOREIGN_UNKNOWN: "have cards whose use outside llmgw is unknown",
    Code.GPU_TAKEN: "have their cards taken",
    Code.GPU_SLICE: "have only slices of cards",
    Code.GPU_DRIVER: "have too old a driver",
    Code.GPU_CUDA: "have too old a CUDA",
    Code.NODE_EXCLUDED: "are excluded by the profile",
    Code.MODEL_ON_NODE: "have a replica of the model already",
    Code.CPUS: "lack cores",
    Code.CPUS_UNKNOWN: "have an unknown number of cores",
    Code.MEMORY: "lack memory",
    Code.MEMORY_UNKNOWN: "have unknown memory",
    Code.DISK: "lack disk space for the weights",
    Code.PORT_RANGE_FULL: "have no free port",
    Code.ADDRESS_UNKNOWN: "have no known address",
    Code.NVLINK_NOT_JOINED: "have not joined an NVLink domain",
    Code.IMEX_NOT_READY: "have no IMEX that is ready",
    Code.FABRIC_UNKNOWN: "are on no known fabric",
    Code.FABRIC_NAMES_DIFFER: "give the fabric another name than others do",
    Code.GANG_TOO_SMALL: "have too few others to work with",
    Code.NO_NODES: "no node has registered",
    Code.NO_PROFILES: "the model has no profile",
}
"""Code -> what is said of many nodes: "12 of 14 nodes lack memory"."""


@dataclass(frozen=True, slots=True)
class Reason:
    """One rule's refusal of one node, with what was needed and what was there."""

    code: Code
    need: str | None = None
    have: str | None = None

    @property
    def sentence(self) -> str:
        """The code's sentence with the numbers in it."""
        return SENTENCES[self.code].format(need=self.need or "-", have=self.have or "-")


def size(mib: float) -> str:
    """MiB as people read it: ``512 MiB``, ``160 GiB``, ``79.65 GiB``."""
    if abs(mib) < 1024:
        return f"{mib:.6g} MiB"
    return f"{mib / 1024:.6g} GiB" if mib % 1024 == 0 else f"{mib / 1024:.2f} GiB"


def cards(count: int) -> str:
    """``1 card``, ``4 cards``."""
    return "1 card" if count == 1 else f"{count} cards"
