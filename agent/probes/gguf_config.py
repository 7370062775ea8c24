"""GGUF metadata in the words of a config.json.

So one set of rules, model_facts.py, reads both. Pure. Called by weights_files.py. llama.cpp caches
in 16 bits whatever the weights are: that is the dtype said here, and with it `kv_bytes_per_token`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from agent.probes.gguf_types import FILE_TYPES

if TYPE_CHECKING:
    from collections.abc import Callable

    from agent.probes.gguf import Gguf

    Told = Callable[[str], Any]


def quantization(found: Gguf) -> dict[str, Any]:
    """The file's own name for its quantisation, and the bits of a weight that it comes to."""
    code = found.meta.get("general.file_type")
    name = FILE_TYPES.get(code) if isinstance(code, int) else None
    if name is None and found.types:
        name = max(found.types, key=lambda kind: found.types[kind])
    bits = round(found.bytes * 8 / found.parameters, 2) if found.parameters else None
    return {k: v for k, v in {"method": "gguf", "name": name, "bits": bits}.items() if v}


FAMILY: Final = {
    "gemma3": "gemma3_text",
    "gemma3n": "gemma3n_text",
    "gemma4": "gemma4_text",
    "gpt-oss": "gpt_oss",
    "qwen3next": "qwen3_next",
    "qwen35": "qwen3_5_text",
    "qwen35moe": "qwen3_5_moe_text",
    "olmo2": "olmo3",
    "llama4": "llama4_text",
}
"""llama.cpp's architecture -> the family whose layers model_layers.py knows."""
KEYS: Final = {
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "v_head_dim": "attention.value_length",
    "swa_head_dim": "attention.key_length_swa",
    "swa_v_head_dim": "attention.value_length_swa",
    "vocab_size": "vocab_size",
    "max_position_embeddings": "context_length",
    "sliding_window": "attention.sliding_window",
    "num_kv_shared_layers": "attention.shared_kv_layers",
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "n_shared_experts": "expert_shared_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "full_attention_interval": "full_attention_interval",
    "num_nextn_predict_layers": "nextn_predict_layers",
}


def as_config(found: Gguf) -> dict[str, Any]:
    """The metadata in the words of a config.json, for model_facts."""
    architecture = str(found.meta.get("general.architecture", ""))

    def told(key: str) -> Any:
        return found.meta.get(f"{architecture}.{key}")

    config = {name: value for name, key in KEYS.items() if (value := told(key)) is not None}
    vocabulary = found.meta.get("tokenizer.ggml.tokens")
    if "vocab_size" not in config:
        counted = vocabulary.get("count") if isinstance(vocabulary, dict) else None
        config["vocab_size"] = found.vocab or counted
    config |= _mla(told) | _windows(architecture, told) | _recurrent(config)
    config["model_type"] = FAMILY.get(architecture, architecture)
    config["dtype"] = "float16"
    config["tie_word_embeddings"] = not found.has_output
    layers, drafts = config.get("num_hidden_layers"), config.get("num_nextn_predict_layers")
    if isinstance(layers, int) and isinstance(drafts, int) and layers > drafts:
        config["num_hidden_layers"] = layers - drafts  # llama.cpp counts them, config.json not
    return config


def _mla(told: Told) -> dict[str, Any]:
    """Files that keep DeepSeek's compressed cache say the sizes of the heads beside it."""
    if told("attention.key_length_mla") is None:
        return {}
    return {
        "kv_lora_rank": told("attention.kv_lora_rank"),
        "qk_rope_head_dim": told("rope.dimension_count"),
        "head_dim": told("attention.key_length_mla"),
        "v_head_dim": told("attention.value_length_mla"),
    }


def _windows(architecture: str, told: Told) -> dict[str, Any]:
    window, pattern = told("attention.sliding_window"), told("attention.sliding_window_pattern")
    if architecture == "llama4":
        return {"attention_chunk_size": window or 8192, "sliding_window": None}
    if architecture == "phi3":  # written into the file, but llama.cpp does not use it
        return {"sliding_window": None}
    if isinstance(pattern, list):
        return {"sliding_window_layers": [int(flag) for flag in pattern if isinstance(flag, int)]}
    return {"sliding_window_pattern": pattern} if isinstance(pattern, int) else {}


def _recurrent(config: dict[str, Any]) -> dict[str, Any]:
    """Layers without KV heads are recurrent ones (Jamba, LFM2, Nemotron-H)."""
    heads = config.get("num_key_value_heads")
    if not isinstance(heads, list) or 0 not in heads:
        return {}
    return {"layer_types": ["attention" if count else "mamba" for count in heads]}
