"""What a model caches of each token and of each sequence.

Pure. Called by model_facts.py. The KV cache of one token is, over the layers that cache anything
(model_layers.py),

    ordinary attention    kv_heads * (key size + value size)
    MLA (DeepSeek)        kv_lora_rank + qk_rope_head_dim, once for all heads

values, times the bytes of one value. Layers with a window stop growing at it, so a sequence of n
tokens takes n * kv_values_full + min(n, window) * kv_values_window values. `kv_bytes_per_token` is
the sum of both at the model's own dtype: what engines take by default (llama.cpp: 2 bytes).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from agent.probes import model_layers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

Config = dict[str, Any]

MAX_NUMBER: Final = 2**40
DTYPE_BYTES: Final = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}
KV_HEADS: Final = (
    "num_key_value_heads",
    "n_kv_heads",
    "num_kv_heads",
    "n_head_kv",
    "kv_n_heads",
    "attn_config.kv_n_heads",
)
INDEX_SCALE_BYTES: Final = 4
"""DeepSeek's sparse attention keeps an 8-bit index key with a float scale beside each token."""


def number(config: Mapping[str, Any], *keys: str) -> int | None:
    """The first of these keys with a positive whole number; of a list per layer its largest."""
    for key in keys:
        value: Any = config
        for part in key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        if isinstance(value, list):
            value = max((v for v in value[:4096] if _whole(v)), default=None)
        if _whole(value):
            return int(value)
    return None


def _whole(value: Any) -> bool:
    """Writers turn numbers into 4096.0 at times; True is no number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return 0 < value <= MAX_NUMBER and value == int(value)


def attention(full: Config, facts: Mapping[str, Any]) -> dict[str, Any]:
    """What is cached, as `attention` and `kv_bytes_per_token`."""
    family, layers = str(full.get("model_type")), facts["layers"]
    if family in model_layers.ENCODERS:
        return {"attention": {"kind": "encoder"}, "kv_bytes_per_token": 0}
    if layers is None:
        return {}
    kinds = _short_windows_only(full, facts, model_layers.kinds(full, layers))
    counts = model_layers.count(kinds)
    window = number(full, "attention_chunk_size", "sliding_window", "attention_window_size")
    mla = _mla(full)
    found: dict[str, Any] = {
        "kind": _name(counts, mla is not None),
        "layers": counts,
        "window": window if counts.keys() & {model_layers.SLIDING, model_layers.CHUNKED} else None,
        **(mla or {}),
    }
    kept = model_layers.per_token(kinds, _cached(full, facts, mla))
    found |= _state(full, counts)
    if kept is not None:
        found |= {"kv_values_full": kept[0], "kv_values_window": kept[1] or None}
    size = DTYPE_BYTES.get(facts["dtype"] or "")
    index = mla["index_head_dim"] + INDEX_SCALE_BYTES if mla and "index_head_dim" in mla else 0
    return {
        "attention": {key: value for key, value in found.items() if value is not None},
        "kv_bytes_per_token": sum(kept) * size + index * counts.get(model_layers.FULL, 0)
        if kept is not None and size
        else None,
    }


def _short_windows_only(full: Config, facts: Mapping[str, Any], kinds: list[str]) -> list[str]:
    """A window that no context reaches is none: Phi 3 has one of 262144 tokens for 131072."""
    window, length = number(full, "sliding_window"), facts["max_length"]
    if not window or not length or window < length:
        return kinds
    return [model_layers.FULL if kind == model_layers.SLIDING else kind for kind in kinds]


def _name(counts: Mapping[str, int], mla: bool) -> str:
    """One word for the model: the least common thing that its layers do."""
    if mla:
        return "mla"
    if model_layers.UNKNOWN in counts:
        return "unknown"
    if model_layers.LINEAR in counts:
        return "hybrid" if counts.keys() & {model_layers.FULL, model_layers.SLIDING} else "linear"
    return next((k for k in (model_layers.CHUNKED, model_layers.SLIDING) if k in counts), "full")


def _mla(full: Config) -> dict[str, int] | None:
    """The compressed cache of DeepSeek and its kin. MiniCPM 3 is served uncompressed."""
    rank, rope = number(full, "kv_lora_rank"), number(full, "qk_rope_head_dim")
    if not rank or not rope or full.get("model_type") == "minicpm3":
        return None
    found = {"kv_lora_rank": rank, "qk_rope_head_dim": rope}
    index = number(full, "index_head_dim")
    return found | ({"index_head_dim": index} if index else {})


def _cached(
    full: Config, facts: Mapping[str, Any], mla: Mapping[str, int] | None
) -> Callable[[int, str], int | None]:
    """A function that says what one layer keeps of one token, in values."""
    if mla is not None:
        return lambda _layer, _kind: mla["kv_lora_rank"] + mla["qk_rope_head_dim"]
    per_layer = next((v for key in KV_HEADS if isinstance(v := full.get(key), list)), None)

    def values(layer: int, kind: str) -> int | None:
        heads, size, value = _heads_of(full, facts, kind)
        if per_layer is not None:
            heads = per_layer[layer] if layer < len(per_layer) else None
        if not isinstance(heads, int) or not 0 <= heads <= 2**20 or not size:
            return None
        return heads * (size + (value or size))

    return values


def _heads_of(
    full: Config, facts: Mapping[str, Any], kind: str
) -> tuple[int | None, int | None, int | None]:
    """KV heads, key and value size in layers of a kind: Gemma 4 and MiMo have two sorts."""
    if kind == model_layers.FULL:
        size, value = number(full, "global_head_dim"), None
        heads = number(full, "num_global_key_value_heads")
    else:
        size, value = number(full, "swa_head_dim"), number(full, "swa_v_head_dim")
        heads = number(full, "swa_num_key_value_heads")
    usual = facts["v_head_dim"] if size is None else None
    return heads or facts["kv_heads"], size or facts["head_dim"], value or usual


def _state(full: Config, counts: Mapping[str, int]) -> dict[str, int]:
    """Values that recurrent layers keep of each sequence, however long: state and convolution."""
    layers = counts.get(model_layers.LINEAR)
    one = _delta_net(full) or _mamba(full)
    return {"state_values_per_sequence": layers * one} if layers and one else {}


def _delta_net(full: Config) -> int | None:
    names = (
        "linear_num_key_heads",
        "linear_key_head_dim",
        "linear_num_value_heads",
        "linear_value_head_dim",
        "linear_conv_kernel_dim",
    )
    sizes = _all(number(full, name) for name in names)
    if sizes is None:
        return None
    keys, key, values, value, kernel = sizes
    return values * key * value + (kernel - 1) * (2 * keys * key + values * value)


def _mamba(full: Config) -> int | None:
    heads = number(full, "mamba_n_heads", "mamba_num_heads")
    size = number(full, "mamba_d_head", "mamba_head_dim")
    sizes = _all(
        (
            heads,
            size,
            number(full, "mamba_d_state", "ssm_state_size"),
            number(full, "mamba_n_groups", "n_groups"),
            number(full, "mamba_d_conv", "conv_kernel"),
        )
    )
    if sizes is None:
        return None
    heads, size, state, groups, kernel = sizes
    return heads * size * state + (kernel - 1) * (heads * size + 2 * groups * state)


def _all(sizes: Iterable[int | None]) -> list[int] | None:
    found = list(sizes)
    known = [size for size in found if size is not None]
    return known if len(known) == len(found) else None
