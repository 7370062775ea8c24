"""What a published config.json leaves out because the family's own defaults say it.

Called by model_facts.py. A library writes only what differs from the defaults of its config class,
so that the text part of Gemma 3 4B names no heads at all and those of Qwen 3.5 no head size; such
a model loads only because its class knows. Values as in transformers 5.
"""

from __future__ import annotations

from typing import Any, Final

_LLAMA: Final = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}
_MISTRAL: Final = {
    **_LLAMA,
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
}
_QWEN2: Final = {
    **_LLAMA,
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
    "use_sliding_window": False,
    "max_window_layers": 28,
}
_QWEN2_VL: Final = {
    **_QWEN2,
    "vocab_size": 152064,
    "hidden_size": 8192,
    "intermediate_size": 29568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_window_layers": 80,
}
_GEMMA2: Final = {
    "vocab_size": 256000,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
_GEMMA3: Final = {**_GEMMA2, "vocab_size": 262208, "max_position_embeddings": 131072}
_DELTA_NET: Final = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
_QWEN3_5: Final = {
    **_DELTA_NET,
    "vocab_size": 248320,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
}
_EXPERTS_512: Final = {"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512}
_DEEPSEEK: Final = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "tie_word_embeddings": False}

_WIDE_HEADS: Final = """afmoe cohere2_moe ernie4_5 glm glm4 hy_v3 iquestcoder minimax_m2
    minimax_m3_vl_text ministral3 nemotron_h seed_oss solar_open step3p5 cwm"""
"""Families with heads of 128 values, whatever the hidden size divided by them is."""

DEFAULTS: Final[dict[str, dict[str, Any]]] = {
    **{family: {"head_dim": 128} for family in _WIDE_HEADS.split()},
    "mimo_v2_flash": {"head_dim": 192},
    "vaultgemma": {"head_dim": 256},
    "llama": _LLAMA,
    "mistral": {**_MISTRAL, "sliding_window": 4096},
    "mixtral": {**_MISTRAL, "num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen2": _QWEN2,
    "qwen2_moe": {"use_sliding_window": False, "tie_word_embeddings": False},
    "qwen2_vl": _QWEN2_VL,
    "qwen2_vl_text": _QWEN2_VL,
    "qwen2_5_vl": _QWEN2_VL,
    "qwen2_5_vl_text": _QWEN2_VL,
    "qwen3": {**_QWEN2, "head_dim": 128},
    "qwen3_moe": {
        "num_key_value_heads": 4,
        "use_sliding_window": False,
        "tie_word_embeddings": False,
    },
    "qwen3_vl_text": {"num_key_value_heads": 32, "head_dim": 128, "vocab_size": 151936},
    "qwen3_next": {
        **_QWEN3_5,
        **_EXPERTS_512,
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 48,
        "num_key_value_heads": 2,
        "num_experts": 512,
        "num_experts_per_tok": 10,
    },
    "qwen3_5_text": _QWEN3_5,
    "qwen3_5_moe_text": {
        **_QWEN3_5,
        **_EXPERTS_512,
        "intermediate_size": None,
        "hidden_size": 2048,
        "num_hidden_layers": 40,
        "num_key_value_heads": 2,
        "num_experts": 256,
        "num_experts_per_tok": 8,
    },
    "gemma": {
        "vocab_size": 256000,
        "head_dim": 256,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
    "gemma2": _GEMMA2,
    "gemma3_text": _GEMMA3,
    "gemma3n_text": {
        **_GEMMA2,
        "vocab_size": 262400,
        "hidden_size": 2048,
        "intermediate_size": 16384,
        "num_hidden_layers": 35,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
        "sliding_window": 512,
        "num_kv_shared_layers": 15,
    },
    "gemma4_text": {
        **_GEMMA3,
        "vocab_size": 262144,
        "num_hidden_layers": 30,
        "sliding_window": 512,
        "global_head_dim": 512,
    },
    "llama4_text": {
        "vocab_size": 202048,
        "hidden_size": 5120,
        "intermediate_size": 8192,
        "num_hidden_layers": 48,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "attention_chunk_size": 8192,
        "num_local_experts": 16,
        "num_experts_per_tok": 1,
        "tie_word_embeddings": False,
    },
    "gpt_oss": {
        "num_key_value_heads": 8,
        "head_dim": 64,
        "sliding_window": 128,
        "tie_word_embeddings": False,
    },
    "cohere2": {"sliding_window": 4096, "tie_word_embeddings": True},
    "olmo3": {"sliding_window": 4096, "tie_word_embeddings": False},
    "phi3": {"tie_word_embeddings": False},
    "phimoe": {"tie_word_embeddings": False},
    "deepseek_v2": _DEEPSEEK,
    "deepseek_v3": _DEEPSEEK,
    "jamba": {"attn_layer_period": 8, "attn_layer_offset": 4},
}
