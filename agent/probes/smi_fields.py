"""Where nvidia-smi keeps each field of a card: all spellings, XML and text, drivers 418 to 610.

Called by smi_card.py with the trees of smi_tree.py. Pure, and raises nothing: a field that is not
there, or whose value is none ("N/A", "ERR!"), is None, and costs no other field.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from agent.probes import values

if TYPE_CHECKING:
    from agent.probes.smi_tree import Tree

FIELDS: Final[dict[str, tuple[str, ...]]] = {
    # The first spelling that has a value wins; XML and text, newer before older.
    "uuid": ("uuid", "gpu_uuid"),
    "name": ("product_name",),
    "pci": ("pci/pci_bus_id", "pci/bus_id", "id"),
    "total": ("fb_memory_usage/total", "shared_fb_memory_usage/total"),
    "reserved": ("fb_memory_usage/reserved", "shared_fb_memory_usage/reserved"),
    "used": ("fb_memory_usage/used", "shared_fb_memory_usage/used"),
    "addressing": ("addressing_mode",),
    "numa_memory": ("gpu_numa_id", "gpu_numa_node", "numa_id"),
    "utilization": ("utilization/gpu_util", "utilization/gpu"),
    "temperature": ("temperature/gpu_temp", "temperature/gpu_current_temp", "temperature/gpu"),
    "power": (
        "gpu_power_readings/instant_power_draw",
        "gpu_power_readings/instantaneous_power_draw",
        "gpu_power_readings/power_draw",
        "gpu_power_readings/average_power_draw",
        "power_readings/power_draw",
    ),
    "power_limit": (
        "gpu_power_readings/current_power_limit",
        "gpu_power_readings/gpu_ceiling_power_limit/current_power_limit",
        "power_readings/enforced_power_limit",
        "power_readings/power_limit",
    ),
    "sm": ("clocks/sm_clock", "clocks/sm"),
    "sm_max": ("max_clocks/sm_clock", "max_clocks/sm"),
    "memory_clock": ("clocks/mem_clock", "clocks/memory"),
    "memory_clock_max": ("max_clocks/mem_clock", "max_clocks/memory"),
    "gen": (
        "pci/pci_gpu_link_info/pcie_gen/current_link_gen",
        "pci/gpu_link_info/pcie_generation/current",
    ),
    "gen_max": (
        "pci/pci_gpu_link_info/pcie_gen/max_link_gen",
        "pci/gpu_link_info/pcie_generation/max",
    ),
    "width": (
        "pci/pci_gpu_link_info/link_widths/current_link_width",
        "pci/gpu_link_info/link_width/current",
    ),
    "width_max": (
        "pci/pci_gpu_link_info/link_widths/max_link_width",
        "pci/gpu_link_info/link_width/max",
    ),
    "persistence": ("persistence_mode",),
    "ecc": ("ecc_mode/current_ecc", "ecc_mode/current"),
    "mig": ("mig_mode/current_mig", "mig_mode/current"),
    "repair_corrected": (
        "remapped_rows/remapped_row_corr",
        "remapped_rows/correctable_error",
        "retired_pages/multiple_single_bit_retirement/retired_count",
        "retired_pages/single_bit_ecc",
    ),
    "repair_uncorrected": (
        "remapped_rows/remapped_row_unc",
        "remapped_rows/uncorrectable_error",
        "retired_pages/double_bit_retirement/retired_count",
        "retired_pages/double_bit_ecc",
    ),
    "repair_pending": (
        "remapped_rows/remapped_row_pending",
        "remapped_rows/pending",
        "retired_pages/pending_retirement",
        "retired_pages/pending_blacklist",
        "retired_pages/pending_page_blacklist",
        "retired_pages/pending",
    ),
    "repair_failed": (
        "remapped_rows/remapped_row_failure",
        "remapped_rows/remapping_failure_occurred",
    ),
    "channel_repair": ("ecc_errors/channel_repair_pending",),
    "tpc_repair": ("ecc_errors/tpc_repair_pending",),
    "unrepairable": ("ecc_errors/unrepairable_memory",),
    "recovery": ("gpu_recovery_action",),
    "reset_required": ("gpu_reset_status/reset_required",),
    "drain_recommended": ("gpu_reset_status/drain_and_reset_recommended",),
    "fabric_state": ("fabric/state", "fabric"),
    "fabric_status": ("fabric/status",),
    "clique": ("fabric/cliqueid", "fabric/clique_id"),
    "cluster": ("fabric/clusteruuid", "fabric/cluster_uuid"),
    "fabric_health": ("fabric/health/summary",),
    "fabric_bandwidth": ("fabric/health/bandwidth",),
    "route_unhealthy": ("fabric/health/route_unhealthy",),
    "route_recovery": ("fabric/health/route_recovery_in_progress",),
    "access_timeout_recovery": ("fabric/health/access_timeout_recovery",),
    "incorrect_configuration": ("fabric/health/incorrect_configuration",),
    "gi": ("gpu_instance_id",),
    "ci": ("compute_instance_id",),
    "index": ("index",),
    "multiprocessors": ("device_attributes/shared/multiprocessor_count",),
    "pid": ("pid", "process_id"),
    "type": ("type",),
    "process_memory": ("used_memory", "used_gpu_memory"),
}
SWITCHES: Final = {
    "enabled": True,
    "disabled": False,
    "yes": True,
    "no": False,
    "true": True,
    "false": False,
}


def at(tree: Tree, path: str) -> str | Tree | list[Tree] | None:
    """What a path such as `fabric/health/summary` leads to, None where it ends before."""
    here: str | Tree | list[Tree] | None = tree
    for step in path.split("/"):
        here = here.get(step) if isinstance(here, dict) else None
    return here


def text(tree: Tree, field: str) -> str | None:
    """The first spelling that has a value; else the first that says why there is none."""
    printed = [found for path in FIELDS[field] if isinstance(found := at(tree, path), str)]
    told = (value for value in printed if values.reason(value) is None)
    return next(told, None) or next((value for value in printed if value), None)


def word(tree: Tree, field: str) -> str | None:
    """A name or an identifier as it is printed."""
    printed = text(tree, field)
    return None if printed is None or values.reason(printed) is not None else printed[:200]


def number(tree: Tree, field: str, *units: str) -> float | None:
    """A number in one of `units` (lower case), or without a unit."""
    return values.number(text(tree, field), *units)


def whole(tree: Tree, field: str, *units: str) -> int | None:
    """A count of 0 or more in one of `units` (lower case), or without a unit."""
    value = values.number(text(tree, field), *units)
    return int(value) if value is not None and 0 <= value < 2**31 and value % 1 == 0 else None


def mib(tree: Tree, field: str) -> int | None:
    """A size in MiB."""
    return values.mib(text(tree, field))


def switch(tree: Tree, field: str) -> bool | None:
    """Enabled or disabled, yes or no, true or false."""
    return SWITCHES.get((text(tree, field) or "").lower())
