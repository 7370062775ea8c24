"""A model's config.json as the facts that a memory estimate needs.

Pure; called by weights_scan.py, and by gguf.py, which words GGUF metadata as such a config. Nothing
here raises: what is not understood is left out, and a fact that is missing is unknown, never 0.

The KV cache of one token is, over the layers that cache anything (model_layers.py),

    ordinary attention    kv_heads * (key size + value size)
    MLA (DeepSeek)        kv_lora_rank + qk_rope_head_dim, once for all heads

values, times the bytes of one value. Layers with a window stop growing at it, so a sequence of n
tokens takes n * kv_values_full + min(n, window) * kv_values_window values. `kv_bytes_per_token` is
the sum of both at the model's own dtype: what engines take by default (llama.cpp: 2 bytes).
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from agent.probes import model_layers
from agent.probes.model_defaults import DEFAULTS
from agent.probes.model_quant import quantization

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

Config = dict[str, Any]

MAX_CONFIG: Final = 4 * 2**20
MAX_NUMBER: Final = 2**40
NESTED: Final = (
    "text_config",
    "language_config",
    "llm_config",
    "thinker_config",
    "pretrained_config",
    "decoder",
)
"""Where a model of several parts describes the part that writes text."""
SENSES: Final = ("vision_config", "audio_config", "visual", "mm_vision_tower", "vision_encoder")
DTYPE_BYTES: Final = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}
DTYPE_NAMES: Final = {"half": "float16", "float": "float32", "bf16": "bfloat16", "fp16": "float16"}
LAYERS: Final = ("num_hidden_layers", "n_layers", "n_layer", "num_layers", "decoder_layers")
HIDDEN: Final = ("hidden_size", "d_model", "n_embd", "dim")
HEADS: Final = (
    "num_attention_heads",
    "n_heads",
    "n_head",
    "decoder_attention_heads",
    "num_query_heads",
    "num_heads",
)
KV_HEADS: Final = (
    "num_key_value_heads",
    "n_kv_heads",
    "num_kv_heads",
    "n_head_kv",
    "kv_n_heads",
    "attn_config.kv_n_heads",
)
INTERMEDIATE: Final = (
    "intermediate_size",
    "ffn_hidden_size",
    "ffn_config.ffn_hidden_size",
    "hidden_dim",
    "n_inner",
    "ffn_dim",
    "decoder_ffn_dim",
    "d_ff",
)
LENGTH: Final = (
    "max_position_embeddings",
    "max_seq_len",
    "seq_length",
    "n_positions",
    "max_sequence_length",
    "max_target_positions",
    "n_ctx",
)
EXPERTS: Final = (
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "moe_num_experts",
    "ffn_config.moe_num_experts",
    "moe.num_experts",
)
ACTIVE: Final = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "experts_per_token",
    "top_k_experts",
    "moe_topk",
    "moe_k",
    "moe_top_k",
    "ffn_config.moe_top_k",
    "moe.num_experts_per_tok",
)
EXPERT_SIZE: Final = ("moe_intermediate_size", "expert_ffn_hidden_size")
SHARED_EXPERTS: Final = (
    "n_shared_experts",
    "num_shared_experts",
    "num_shared_expert",
    "moe_num_shared_experts",
)
INDEX_SCALE_BYTES: Final = 4
"""DeepSeek's sparse attention keeps an 8-bit index key with a float scale beside each token."""


def parse_config(data: bytes | str) -> tuple[Config, str | None]:
    """A JSON file as a dictionary; empty with a reason when it is none."""
    try:
        if len(data) > MAX_CONFIG:
            return {}, f"has more than {MAX_CONFIG} bytes: no configuration of a model is so long"
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        return {}, f"is no JSON: {str(error)[:100] or type(error).__name__}"
    return (found, None) if isinstance(found, dict) else ({}, "holds no JSON object")


def model_facts(config: Config) -> dict[str, Any]:
    """Facts of a parsed config.json; unknown ones are left out. Sizes are numbers of values."""
    text = text_part(config)
    family = DEFAULTS.get(str(text.get("model_type")), {})
    full: Config = {**family, **text}
    layers = number(full, *LAYERS)
    facts: dict[str, Any] = {
        "architecture": _architecture(config, text),
        "model_type": _word(config.get("model_type")) or _word(text.get("model_type")),
        "layers": layers,
        "hidden_size": number(full, *HIDDEN),
        "intermediate_size": number(full, *INTERMEDIATE),
        "heads": number(full, *HEADS),
        **_head_sizes(full),
        "vocab_size": number(full, "vocab_size", "padded_vocab_size")
        or number(config, "vocab_size"),
        "max_length": _max_length(full) or _max_length(config),
        "dtype": dtype_of(text) or dtype_of(config),
        "quantization": quantization(config, text),
        "experts": _experts(full),
        "tie_word_embeddings": _tied(text, config, family),
        "mtp_layers": number(full, "num_nextn_predict_layers", "mtp_num_hidden_layers"),
        "multimodal": True if any(config.get(key) for key in SENSES) else None,
    }
    facts |= _attention(full, facts)
    return {key: value for key, value in facts.items() if value is not None and value != {}}


def text_part(config: Config) -> Config:
    """The part that describes the decoder: the innermost text configuration, else the whole."""
    for _ in range(3):
        nested = next((n for key in NESTED if isinstance(n := config.get(key), dict) and n), None)
        if nested is None:
            break
        config = nested
    return config


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


def _word(value: Any) -> str | None:
    """A name that is safe to report: printable and short."""
    return (
        value if isinstance(value, str) and 0 < len(value) <= 100 and value.isprintable() else None
    )


def _architecture(config: Config, text: Config) -> str | None:
    for part in (config, text):
        names = part.get("architectures")
        if isinstance(names, list) and names and (name := _word(names[0])):
            return name
    return _word(config.get("architecture")) or _word(text.get("architecture"))


def dtype_of(config: Config) -> str | None:
    """The dtype of the weights as torch names it, without its prefix."""
    word = _word(config.get("torch_dtype")) or _word(config.get("dtype")) or ""
    name = word.removeprefix("torch.").lower()
    name = DTYPE_NAMES.get(name, name)
    return name if name in DTYPE_BYTES else None


def _head_sizes(full: Config) -> dict[str, int | None]:
    heads, hidden = number(full, *HEADS), number(full, *HIDDEN)
    size = number(full, "head_dim", "kv_channels", "d_kv", "head_size")
    nope, rope = number(full, "qk_nope_head_dim"), number(full, "qk_rope_head_dim")
    if nope and rope:  # DeepSeek's config also has a head_dim at times: that of the rotary part
        size = nope + rope
    if size is None and heads and hidden:
        size = hidden // heads or None
    value = number(full, "v_head_dim")
    return {
        "kv_heads": _kv_heads(full) or heads,
        "head_dim": size,
        "v_head_dim": value if value != size else None,
    }


def _kv_heads(full: Config) -> int | None:
    if full.get("new_decoder_architecture") is not True and full.get("multi_query") is True:
        return 1  # Falcon 7B and StarCoder write num_kv_heads beside it and do not mean it
    groups = number(full, "multi_query_group_num")
    if groups and full.get("multi_query_attention") is not False:
        return groups
    return number(full, *KV_HEADS)


def _max_length(full: Config) -> int | None:
    """The longest context: positions, stretched where the rotary scaling starts from fewer."""
    length = number(full, *LENGTH)
    scaling = full.get("rope_scaling") or full.get("rope_parameters")
    if length is None or not isinstance(scaling, dict):
        return length
    kind = scaling.get("rope_type") or scaling.get("type")
    factor, original = scaling.get("factor"), number(scaling, "original_max_position_embeddings")
    if not isinstance(factor, int | float) or isinstance(factor, bool) or not 1 < factor < 10_000:
        return length
    if kind == "yarn":
        return int((original or length) * factor)
    # Gemma 3 has linear scaling too and counts it in its positions already.
    plain = kind in {"linear", "dynamic"} and "gemma3" not in str(full.get("model_type"))
    return int(length * factor) if plain else length


def _experts(full: Config) -> dict[str, int] | None:
    count = number(full, *EXPERTS)
    if count is None or count < 2:
        return None
    shared = number(full, *SHARED_EXPERTS)
    if shared is None and number(full, "shared_expert_intermediate_size"):
        shared = 1
    found = {
        "count": count,
        "active": number(full, *ACTIVE),
        "shared": shared,
        "intermediate_size": number(full, *EXPERT_SIZE) or number(full, *INTERMEDIATE),
    }
    return {key: value for key, value in found.items() if value is not None}


def _tied(*parts: Config) -> bool | None:
    for part in parts:
        if isinstance(tied := part.get("tie_word_embeddings"), bool):
            return tied
    return None


def _attention(full: Config, facts: Mapping[str, Any]) -> dict[str, Any]:
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
    """KV heads, key and value size in layers of a kind: Gemma 4 and MiMo have two kinds of heads."""
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
