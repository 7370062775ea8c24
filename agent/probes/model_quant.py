"""How a model's weights are quantised, from the many forms of quantization_config.

Pure. Called by model_facts.py. `bits` is the size of one weight without its scales; the sums of
tensor headers say what the files really hold.
"""

from __future__ import annotations

from typing import Any, Final

METHOD_BITS: Final = {
    "fp8": 8,
    "fbgemm_fp8": 8,
    "mxfp8": 8,
    "mxfp4": 4,
    "nvfp4": 4,
    "modelopt": 8,
    "modelopt_fp4": 4,
    "bitnet": 2,
}
"""Methods whose name says the size, where nothing else does."""
BIT_KEYS: Final = ("bits", "num_bits", "w_bit", "weight_bits", "nbits")
GROUP_KEYS: Final = ("group_size", "q_group_size")


def quantization(*parts: dict[str, Any]) -> dict[str, Any] | None:
    """`{method, bits?, group_size?, kv_cache_bits?}` of the first part that has one, or None."""
    for part in parts:
        for key in ("quantization_config", "compression_config", "quantization"):
            found = part.get(key)
            if isinstance(found, dict) and found:
                return _read(found)
    return None


def _read(found: dict[str, Any]) -> dict[str, Any]:
    # modelopt writes its own file as {"quantization": {...}} and names the algorithm there.
    inner = found.get("quantization")
    found = {**found, **inner} if isinstance(inner, dict) else found
    method = _word(found.get("quant_method")) or _word(found.get("quant_type"))
    algorithm = _word(found.get("quant_algo"))
    weights = _weights(found)
    result = {
        "method": method or ("modelopt" if algorithm else "unknown"),
        "bits": _bits(found, method, algorithm, weights),
        "group_size": _number(found, *GROUP_KEYS) or _number(weights, "group_size"),
        "kv_cache_bits": _kv_cache(found),
    }
    return {key: value for key, value in result.items() if value is not None}


def _bits(
    found: dict[str, Any], method: str | None, algorithm: str | None, weights: dict[str, Any]
) -> int | None:
    for key, bits in (("load_in_4bit", 4), ("load_in_8bit", 8)):
        if found.get(key) is True:
            return bits
    told = _number(found, *BIT_KEYS) or _number(weights, *BIT_KEYS)
    return (
        told
        or _in_name(algorithm)
        or _in_name(_word(weights.get("dtype")))
        or METHOD_BITS.get(method or "")
    )


def _in_name(name: str | None) -> int | None:
    """Bits in a name such as NVFP4, W4A16_AWQ, fp8_e4m3, int4."""
    text = (name or "").lower()
    sizes = (4, 8, 2, 3, 6)
    return next(
        (b for b in sizes if any(f"{word}{b}" in text for word in ("fp", "int", "w"))), None
    )


def _weights(found: dict[str, Any]) -> dict[str, Any]:
    """What compressed-tensors and quark say of weights: the group with the most bits.

    Mixed schemes have several groups; the largest keeps an estimate on the safe side.
    """
    groups: list[Any] = []
    if isinstance(config := found.get("config_groups"), dict):
        groups = [g.get("weights") for g in list(config.values())[:64] if isinstance(g, dict)]
    if isinstance(config := found.get("global_quant_config"), dict):
        groups.append(config.get("weight"))
    known = [group for group in groups if isinstance(group, dict)]
    return max(known, key=lambda group: _number(group, *BIT_KEYS) or 0, default={})


def _kv_cache(found: dict[str, Any]) -> int | None:
    scheme = found.get("kv_cache_scheme")
    if isinstance(scheme, dict):
        return _number(scheme, "num_bits")
    return _in_name(_word(found.get("kv_cache_quant_algo")) or _word(found.get("kv_cache_dtype")))


def _number(found: dict[str, Any], *keys: str) -> int | None:
    for key in keys:
        value = found.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= 65536:
            return value
    return None


def _word(value: Any) -> str | None:
    return (
        value if isinstance(value, str) and 0 < len(value) <= 64 and value.isprintable() else None
    )
