"""Configurations of well-known models, cut to what a memory estimate reads, as agents report them.

The sizes are what the published files hold in tensors (`total_size` of their indexes, or the sum of
their tensor headers).
"""

from __future__ import annotations

from agent.probes.model_facts import model_facts

H100 = 81559
"""MiB that the driver reports for H100 80GB HBM3; others of NVIDIA's as named."""
A100, H200, L40S, RTX4090, T4 = 81920, 143771, 46068, 24564, 15360

LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_key_value_heads": 8,
    "vocab_size": 128256, "torch_dtype": "bfloat16", "tie_word_embeddings": False,
}  # fmt: skip
LLAMA_8B = LLAMA | {
    "num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 14336,
    "num_attention_heads": 32, "max_position_embeddings": 131072,
}  # fmt: skip
LLAMA_70B = LLAMA | {
    "num_hidden_layers": 80, "hidden_size": 8192, "intermediate_size": 28672,
    "num_attention_heads": 64, "max_position_embeddings": 8192,
}  # fmt: skip
LLAMA_405B_FP8 = LLAMA | {
    "num_hidden_layers": 126, "hidden_size": 16384, "intermediate_size": 53248,
    "num_attention_heads": 128, "max_position_embeddings": 131072,
    "quantization_config": {"quant_method": "fbgemm_fp8"},
}  # fmt: skip
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3", "num_hidden_layers": 61, "hidden_size": 7168,
    "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_attention_heads": 128,
    "num_key_value_heads": 128, "n_routed_experts": 256, "num_experts_per_tok": 8,
    "n_shared_experts": 1, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "vocab_size": 129280, "torch_dtype": "bfloat16",
    "max_position_embeddings": 163840, "tie_word_embeddings": False,
    "quantization_config": {"quant_method": "fp8"},
}  # fmt: skip
GEMMA_3_27B = {
    "model_type": "gemma3",
    "text_config": {
        "model_type": "gemma3_text", "num_hidden_layers": 62, "hidden_size": 5376,
        "intermediate_size": 21504, "num_attention_heads": 32, "num_key_value_heads": 16,
        "head_dim": 128, "sliding_window": 1024, "vocab_size": 262208,
        "max_position_embeddings": 131072,
    },
    "torch_dtype": "bfloat16", "tie_word_embeddings": True, "vision_config": {"hidden_size": 1152},
}  # fmt: skip
GPT_OSS_120B = {
    "model_type": "gpt_oss", "num_hidden_layers": 36, "hidden_size": 2880,
    "intermediate_size": 2880, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
    "num_local_experts": 128, "num_experts_per_tok": 4, "sliding_window": 128,
    "vocab_size": 201088, "max_position_embeddings": 131072, "torch_dtype": "bfloat16",
    "quantization_config": {"quant_method": "mxfp4"}, "tie_word_embeddings": False,
}  # fmt: skip
QWEN3_30B_A3B = {
    "model_type": "qwen3_moe", "num_hidden_layers": 48, "hidden_size": 2048,
    "intermediate_size": 6144, "moe_intermediate_size": 768, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
    "vocab_size": 151936, "max_position_embeddings": 40960, "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}  # fmt: skip
MIXTRAL_8X7B = {
    "model_type": "mixtral", "num_hidden_layers": 32, "hidden_size": 4096,
    "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
    "num_local_experts": 8, "num_experts_per_tok": 2, "vocab_size": 32000,
    "max_position_embeddings": 32768, "torch_dtype": "bfloat16", "tie_word_embeddings": False,
}  # fmt: skip
BGE_LARGE = {
    "model_type": "bert", "num_hidden_layers": 24, "hidden_size": 1024, "intermediate_size": 4096,
    "num_attention_heads": 16, "vocab_size": 30522, "max_position_embeddings": 512,
    "torch_dtype": "float32",
}  # fmt: skip


def facts(config, tensor_bytes, **more):
    """The document that an agent reports of whole weights."""
    return model_facts(config) | {"tensor_bytes": int(tensor_bytes)} | more


LLAMA_8B_FACTS = facts(LLAMA_8B, 16_060_522_496)
LLAMA_70B_FACTS = facts(LLAMA_70B, 141_107_412_992)
LLAMA_31_70B_FACTS = LLAMA_70B_FACTS | {"max_length": 131072}
LLAMA_405B_FACTS = facts(LLAMA_405B_FP8, 487e9)
DEEPSEEK_FACTS = facts(DEEPSEEK_V3, 688_586_727_753)
GEMMA_FACTS = facts(GEMMA_3_27B, 54_864_541_408)
GPT_OSS_FACTS = facts(GPT_OSS_120B, 65_248_815_744)
QWEN_FACTS = facts(QWEN3_30B_A3B, 61_064_245_248)
MIXTRAL_FACTS = facts(MIXTRAL_8X7B, 93_405_585_408)
BGE_FACTS = facts(BGE_LARGE, 1_340_000_000)
ALL = (
    LLAMA_8B_FACTS, LLAMA_70B_FACTS, LLAMA_31_70B_FACTS, LLAMA_405B_FACTS, DEEPSEEK_FACTS,
    GEMMA_FACTS, GPT_OSS_FACTS, QWEN_FACTS, MIXTRAL_FACTS, BGE_FACTS,
)  # fmt: skip
