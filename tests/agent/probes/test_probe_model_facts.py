"""Facts of models: published figures of captured configurations, odd forms, and nonsense."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.probes import model_layers
from agent.probes.model_facts import MAX_CONFIG, model_facts, parse_config

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 32768,
    "torch_dtype": "bfloat16",
}
GEMMA_4B = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
    "vision_config": {"hidden_size": 1152},
}


def layers(config) -> dict[str, int]:
    return model_facts(config)["attention"]["layers"]


PUBLISHED = {
    "deepseek_v3": (61, 70_272, "mla"),
    "kimi_k2_instruct": (61, 70_272, "mla"),
    "llama3_1": (80, 327_680, "full"),
    "llama3_1_405b": (126, 516_096, "full"),
    "llama3_2_1b": (16, 32_768, "full"),
    "llama3_2_3b": (28, 114_688, "full"),
    "skywork_reward_llama": (32, 131_072, "full"),
    "mixtral": (32, 131_072, "full"),
    "mistral": (32, 131_072, "sliding"),
    "qwen2.5_7b": (28, 57_344, "full"),
    "qwen2.5_72b": (80, 327_680, "full"),
    "qwen2.5_vl_7b": (28, 57_344, "full"),
    "qwen3_4b": (36, 147_456, "full"),
    "qwen3_30b": (48, 98_304, "full"),
    "qwen3_8b_fp8": (36, 147_456, "full"),
    "qwen3_5_35b_a3b": (48, 49_152, "hybrid"),
    "phi3": (32, 393_216, "full"),
    "phimoe": (32, 131_072, "full"),
    "chatglm3_6b": (28, 28_672, "full"),
    "dbrx_132b": (48, 294_912, "full"),
    "gemma3": (62, 507_904, "sliding"),
    "gemma3_text": (26, 26_624, "sliding"),
    "gpt_oss_20b": (24, 49_152, "sliding"),
    "gpt_oss_120b": (36, 73_728, "sliding"),
    "llama4": (48, 196_608, "chunked"),
    "llama3_2_11b_vision": (40, 131_072, "full"),
    "bge_large": (24, 0, "encoder"),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_captured_configurations_give_the_published_figures(captures, name):
    config, error = parse_config((captures / f"models/config.{name}.json").read_bytes())
    facts = model_facts(config)
    assert error is None
    found = (facts["layers"], facts["kv_bytes_per_token"], facts["attention"]["kind"])
    assert found == PUBLISHED[name]


def test_every_captured_configuration_has_the_facts_of_an_estimate(captures):
    for path in sorted((captures / "models").glob("**/config*.json")):
        facts = model_facts(parse_config(path.read_bytes())[0])
        needed = {"architecture", "layers", "hidden_size", "heads", "kv_heads", "head_dim"}
        assert facts.keys() >= needed | {"vocab_size", "max_length", "dtype"}, path.name


def test_layers_with_windows_are_told_apart(captures):
    def attention(name):
        text = (captures / f"models/config.{name}.json").read_bytes()
        return model_facts(parse_config(text)[0])["attention"]

    assert attention("gemma3")["layers"] == {"sliding": 52, "full": 10}
    assert attention("gemma3")["window"] == 1024
    assert attention("gemma_2_9b")["layers"] == {"sliding": 21, "full": 21}
    assert attention("llama4")["layers"] == {"chunked": 36, "full": 12}
    assert attention("llama4")["window"] == 8192
    assert attention("gpt_oss_20b")["kv_values_window"] == 12 * 2 * 8 * 64
    assert attention("qwen3_5_35b_a3b")["layers"] == {"linear": 36, "full": 12}
    assert attention("llama3_2_11b_vision")["layers"] == {"full": 32, "cross": 8}
    assert "window" not in attention("phi3")


def test_experts_and_quantisation_of_captures(captures):
    def facts(name):
        return model_facts(parse_config((captures / f"models/config.{name}.json").read_bytes())[0])

    assert facts("deepseek_v3")["experts"] == {
        "count": 256,
        "active": 8,
        "shared": 1,
        "intermediate_size": 2048,
    }
    assert facts("dbrx_132b")["experts"] == {"count": 16, "active": 4, "intermediate_size": 10752}
    assert facts("gpt_oss_120b")["quantization"] == {"method": "mxfp4", "bits": 4}
    assert facts("llama3_1_405b")["quantization"] == {"method": "fbgemm_fp8", "bits": 8}
    assert facts("llama4")["quantization"] == {"method": "compressed-tensors", "bits": 8}
    assert facts("qwen3_4b")["tie_word_embeddings"] is True


def test_kv_cache_of_llama_8b():
    facts = model_facts(LLAMA)
    assert (facts["head_dim"], facts["kv_bytes_per_token"]) == (128, 131_072)
    assert facts["attention"]["kv_values_full"] == 65_536


def test_values_that_a_family_leaves_out_are_those_of_its_class():
    facts = model_facts(GEMMA_4B)
    assert (facts["heads"], facts["kv_heads"], facts["head_dim"]) == (8, 4, 256)
    assert (facts["max_length"], facts["vocab_size"]) == (131_072, 262_208)
    assert facts["attention"]["layers"] == {"sliding": 29, "full": 5}
    assert facts["multimodal"] is True
    # An explicit null is no gap: Mistral 7B of 0.2 and later has no window.
    mistral = {**LLAMA, "model_type": "mistral"}
    assert layers(mistral) == {"sliding": 32}
    assert layers({**mistral, "sliding_window": None}) == {"full": 32}


def test_mla_counts_one_compressed_row_for_all_heads():
    config = {
        **LLAMA,
        "model_type": "deepseek_v32",
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "index_head_dim": 128,
    }
    facts = model_facts(config)
    assert facts["kv_bytes_per_token"] == 32 * (576 * 2 + 128 + 4)
    assert (facts["head_dim"], facts["v_head_dim"]) == (192, 128)
    assert model_facts({**config, "model_type": "minicpm3"})["attention"]["kind"] == "full"


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"layer_types": ["full_attention", "linear_attention"] * 16}, {"full": 16, "linear": 16}),
        ({"layer_types": ["full_attention"] * 40}, {"full": 32}),
        ({"layer_types": ["compressed_sparse_attention"] * 32}, {"unknown": 32}),
        ({"layers_block_type": ["mamba"] * 30 + ["attention"] * 2}, {"linear": 30, "full": 2}),
        ({"hybrid_override_pattern": "M-M*" * 8}, {"linear": 16, "none": 8, "full": 8}),
        ({"attn_type_list": [0, 0, 0, 1] * 8}, {"linear": 24, "full": 8}),
        ({"hybrid_layer_pattern": [0, 1] * 16, "sliding_window": 128}, {"full": 16, "sliding": 16}),
        ({"attn_layer_indices": [9, 18, 27]}, {"linear": 29, "full": 3}),
        ({"attn_layer_period": 8, "attn_layer_offset": 4}, {"linear": 28, "full": 4}),
        ({"linear_attn_config": {"full_attn_layers": [4, 8, 32]}}, {"linear": 29, "full": 3}),
        ({"block_types": ["recurrent", "recurrent", "attention"]}, {"linear": 22, "sliding": 10}),
        ({"sliding_window": 4096, "sliding_window_pattern": "LLLG"}, {"sliding": 24, "full": 8}),
        ({"num_kv_shared_layers": 10}, {"full": 22, "shared": 10}),
        ({"sliding_window": 4096}, {"full": 32}),  # a family we do not know: the safe side
        ({"layer_types": ["indexed_attention"] * 32}, {"full": 32}),
        ({"model_type": "mamba2"}, {"linear": 32}),
        ({"model_type": "qwen3_next"}, {"linear": 24, "full": 8}),
        (
            {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 28},
            {"full": 28, "sliding": 4},
        ),
        (
            {"attention_chunk_size": 8192, "no_rope_layers": [1, 1, 1, 0] * 8},
            {"chunked": 24, "full": 8},
        ),
    ],
)
def test_ways_to_tell_what_each_layer_does(config, expected):
    assert layers({**LLAMA, **config}) == expected


def test_an_unknown_kind_of_layer_makes_the_cache_unknown_and_nothing_else():
    facts = model_facts({**LLAMA, "layer_types": ["novel_thing"] * 32})
    assert "kv_bytes_per_token" not in facts
    assert facts["layers"] == 32


def test_recurrent_state_is_counted_for_each_sequence():
    qwen = {**LLAMA, "model_type": "qwen3_next", "num_hidden_layers": 48}
    one = 32 * 128 * 128 + 3 * (2 * 16 * 128 + 32 * 128)
    assert model_facts(qwen)["attention"]["state_values_per_sequence"] == 36 * one


def test_heads_that_differ_between_layers():
    listed = {**LLAMA, "num_hidden_layers": 4, "num_key_value_heads": [8, 0, 4, 8]}
    assert model_facts(listed)["attention"]["kv_values_full"] == 20 * 2 * 128
    mimo = {
        **LLAMA,
        "num_hidden_layers": 2,
        "hybrid_layer_pattern": [0, 1],
        "sliding_window": 128,
        "head_dim": 192,
        "v_head_dim": 128,
        "num_key_value_heads": 4,
        "swa_num_key_value_heads": 8,
        "swa_head_dim": 192,
        "swa_v_head_dim": 128,
    }
    found = model_facts(mimo)["attention"]
    assert (found["kv_values_full"], found["kv_values_window"]) == (4 * 320, 8 * 320)
    assert model_facts({**LLAMA, "multi_query": True})["kv_heads"] == 1


@pytest.mark.parametrize(
    ("scaling", "length"),
    [
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, 131_072),
        ({"rope_type": "yarn", "factor": 40, "original_max_position_embeddings": 4096}, 163_840),
        ({"rope_type": "llama3", "factor": 8.0}, 40_000),
        ({"type": "dynamic", "factor": 2.0}, 80_000),
        ({"type": "yarn", "factor": 1e300}, 40_000),
        ({"type": "yarn", "factor": "4"}, 40_000),
        (None, 40_000),
    ],
)
def test_length_after_rotary_scaling(scaling, length):
    config = {**LLAMA, "max_position_embeddings": 40_000, "rope_scaling": scaling}
    assert model_facts(config)["max_length"] == length


@pytest.mark.parametrize(
    ("quant", "expected"),
    [
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, ("awq", 4, 128)),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1}, ("gptq", 8, None)),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, ("bitsandbytes", 4, None)),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, ("fp8", 8, None)),
        ({"quant_algo": "NVFP4", "group_size": 16}, ("modelopt", 4, 16)),
        ({"quantization": {"quant_algo": "W4A16_AWQ"}}, ("modelopt", 4, None)),
        (
            {"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "fp4"}}},
            ("quark", 4, None),
        ),
        ({"odd": 1}, ("unknown", None, None)),
    ],
)
def test_forms_of_quantisation(quant, expected):
    found = model_facts({**LLAMA, "quantization_config": quant})["quantization"]
    assert (found["method"], found.get("bits"), found.get("group_size")) == expected


def test_quantised_cache_is_told():
    quant = {"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8}}
    found = model_facts({**LLAMA, "quantization_config": quant})["quantization"]
    assert found["kv_cache_bits"] == 8


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "is no JSON"),
        (b"\xff\xfe\x00", "is no JSON"),
        (b"[1]", "holds no JSON object"),
        (b"[" * 100_000, "is no JSON"),
        (b'{"a": ' + b"9" * 10_000 + b"}", "is no JSON"),
        (b" " * (MAX_CONFIG + 1), "no configuration of a model is so long"),
    ],
)
def test_files_that_are_no_configuration(data, words):
    config, error = parse_config(data)
    assert config == {}
    assert words in (error or "")


ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=8),
    st.lists(st.one_of(st.integers(-3, 300), st.text(max_size=4), st.none()), max_size=40),
    st.dictionaries(st.text(max_size=4), st.integers(), max_size=3),
)
KEYS = sorted(
    set(LLAMA)
    | {"layer_types", "sliding_window", "rope_scaling", "quantization_config", "text_config"}
    | {"num_experts", "kv_lora_rank", "qk_rope_head_dim", "linear_attn_config", "block_types"}
    | {"attn_layer_period", "attn_layer_offset", "hybrid_override_pattern", "no_rope_layers"}
    | {"sliding_window_pattern", "num_kv_shared_layers", "cross_attention_layers", "head_dim"}
)
FAMILIES = st.sampled_from(["gemma3_text", "qwen3_next", "llama4_text", "mamba", "bert", "jamba"])


@settings(max_examples=250, deadline=None)
@given(st.dictionaries(st.sampled_from(KEYS), ODD, max_size=8), st.none() | FAMILIES)
def test_no_value_of_any_key_breaks_the_facts(odd, family):
    config = {**LLAMA, **odd} | ({"model_type": family} if family else {})
    for wrapped in (config, {"text_config": config}):
        facts = model_facts(wrapped)
        json.dumps(facts, allow_nan=False).encode()


def test_a_config_of_absurd_size_is_bounded():
    facts = model_facts({**LLAMA, "num_hidden_layers": 2**39})
    assert sum(facts["attention"]["layers"].values()) == model_layers.MAX_LAYERS
