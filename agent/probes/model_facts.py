"""A model's config.json as the facts that a memory estimate needs.

Pure; called by weights_files.py, for GGUF with what gguf_config.py makes of it. Nothing here
raises: what is not understood is left out, and a fact that is missing is unknown, never 0.
"""

from __future__ import annotations

import json
from typing import Any, Final

from agent.probes.model_cache import DTYPE_BYTES, KV_HEADS, attention, number
from agent.probes.model_defaults import DEFAULTS
from agent.probes.model_quant import quantization

Config = dict[str, Any]

MAX_CONFIG: Final = 4 * 2**20
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
    if layers and "num_hidden_layers" not in full and text.get("model_type") == "longcat_flash":
        layers *= 2  # each of its layers has two attentions
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
    facts |= attention(full, facts)
    return {key: value for key, value in facts.items() if value is not None and value != {}}


def text_part(config: Config) -> Config:
    """The part that describes the decoder: the innermost text configuration, else the whole."""
    for _ in range(3):
        nested = next((n for key in NESTED if isinstance(n := config.get(key), dict) and n), None)
        if nested is None:
            break
        config = nested
    return config


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
