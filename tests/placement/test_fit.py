"""The memory estimate against published figures: who fits where, and the numbers on the way."""
# ruff: noqa: E501  a table row is easier to compare on one line

from __future__ import annotations

import pytest

from controller.placement.fit import estimate, smallest_card
from tests.placement import fit_models as m
from tests.placement.fit_models import A100, H100, H200, L40S, RTX4090, T4

SHORT = ("--max-model-len", "8192")

TABLE = [
    # An 8B model in 16 bits has 15 GiB; vLLM refuses 128k tokens (16 GiB of cache) on a 24 GB card and serves 8k there.
    (m.LLAMA_8B_FACTS, "vllm", (), 1, H100, True),
    (m.LLAMA_8B_FACTS, "vllm", (), 1, RTX4090, False),
    (m.LLAMA_8B_FACTS, "vllm", SHORT, 1, RTX4090, True),
    (m.LLAMA_8B_FACTS, "vllm", SHORT, 1, T4, False),
    (m.LLAMA_8B_FACTS, "vllm", SHORT, 2, T4, True),
    # SGLang starts without a length and serves what fits.
    (m.LLAMA_8B_FACTS, "sglang", (), 1, RTX4090, True),
    (m.LLAMA_8B_FACTS, "sglang", ("--context-length", "131072"), 1, RTX4090, False),
    # Llama 3 70B in 16 bits is 141 GB: two cards of 80 GB at its 8k; 3.1's 128k need 40 GiB of cache more: four.
    (m.LLAMA_70B_FACTS, "vllm", (), 1, A100, False),
    (m.LLAMA_70B_FACTS, "vllm", (), 2, A100, True),
    (m.LLAMA_70B_FACTS, "vllm", (), 2, H100, True),
    (m.LLAMA_31_70B_FACTS, "vllm", (), 2, H100, False),
    (m.LLAMA_31_70B_FACTS, "vllm", (), 4, H100, True),
    (m.LLAMA_31_70B_FACTS, "sglang", (), 4, H100, True),
    # Published with the words that FP8 makes it fit one server of 8 x H100 (80 GB).
    (m.LLAMA_405B_FACTS, "vllm", (), 8, H100, True),
    (m.LLAMA_405B_FACTS, "vllm", (), 4, H100, False),
    # DeepSeek V3: 671B parameters in FP8; the recommended server is 8 x H200, 8 x H100 are too few.
    (m.DEEPSEEK_FACTS, "vllm", (), 8, H200, True),
    (m.DEEPSEEK_FACTS, "sglang", (), 8, H200, True),
    (m.DEEPSEEK_FACTS, "vllm", (), 8, H100, False),
    (m.DEEPSEEK_FACTS, "vllm", (), 16, H100, True),
    # Gemma 3 27B in 16 bits: 54 GB, one card of 80 GB, not one of 48.
    (m.GEMMA_FACTS, "vllm", ("--max-model-len", "32768"), 1, H100, True),
    (m.GEMMA_FACTS, "vllm", SHORT, 1, L40S, False),
    (m.GEMMA_FACTS, "vllm", SHORT, 2, L40S, True),
    # "gpt-oss-120b ... fits into a single 80GB GPU", with its whole 128k.
    (m.GPT_OSS_FACTS, "vllm", (), 1, H100, True),
    (m.GPT_OSS_FACTS, "vllm", (), 1, L40S, False),
    (m.QWEN_FACTS, "vllm", (), 1, H100, True),
    (m.QWEN_FACTS, "vllm", (), 1, L40S, False),
    (m.QWEN_FACTS, "vllm", (), 2, L40S, True),
    # Mixtral 8x7B in 16 bits: 93 GB, two cards of 80 GB.
    (m.MIXTRAL_FACTS, "vllm", (), 1, A100, False),
    (m.MIXTRAL_FACTS, "vllm", (), 2, A100, True),
    (m.BGE_FACTS, "vllm", (), 1, T4, True),
]  # fmt: skip


@pytest.mark.parametrize(("facts", "engine", "args", "cards", "card_mib", "fits"), TABLE)
def test_published_fits(facts, engine, args, cards, card_mib, fits):
    found = estimate(facts, engine=engine, args=args, gpus=cards, card_mib=card_mib)
    assert found.fits is fits, found
    assert found.missing == ()
    least = smallest_card(facts, engine=engine, args=args, gpus=cards)
    assert (least <= card_mib) is fits, least


def cache_of(facts, tokens, **more):
    """GiB of cache on one card for one sequence."""
    args = ("--max-model-len", str(tokens), *more.pop("args", ()))
    found = estimate(facts, engine="vllm", args=args, card_mib=H200, **more)
    return next(line.mib for line in found.lines if line.name == "cache") / 1024


def test_the_cache_of_published_models():
    assert cache_of(m.LLAMA_8B_FACTS, 8192) == 1.0, "128 KiB a token"
    assert cache_of(m.LLAMA_70B_FACTS, 8192) == 2.5, "320 KiB a token"
    assert cache_of(m.LLAMA_70B_FACTS, 8192, gpus=8) == pytest.approx(2.5 / 8, rel=0.01)
    # 8 KV heads on 16 cards: each card keeps one, so the cache is no smaller than on 8.
    assert cache_of(m.LLAMA_70B_FACTS, 8192, gpus=16) == cache_of(m.LLAMA_70B_FACTS, 8192, gpus=8)
    assert cache_of(m.LLAMA_8B_FACTS, 8192, args=("--kv-cache-dtype", "fp8")) == 0.5
    # MLA: 70,272 bytes a token over 61 layers, the same on every card however many there are.
    mla = 70272 * 131072 / 2**30
    assert cache_of(m.DEEPSEEK_FACTS, 131072) == pytest.approx(mla, rel=0.001)
    assert cache_of(m.DEEPSEEK_FACTS, 131072, gpus=8) == pytest.approx(mla, rel=0.001)
    assert cache_of(m.DEEPSEEK_FACTS, 131072, gpus=8, args=("-pp", "8")) < mla / 7


def test_a_window_stops_growing():
    ten = cache_of(m.GPT_OSS_FACTS, 131072) - cache_of(m.GPT_OSS_FACTS, 65536)
    assert ten == pytest.approx(18 * 2 * 8 * 64 * 2 * 65536 / 2**30, rel=0.01), "18 of 36 layers"
    all_layers = cache_of(m.GPT_OSS_FACTS, 131072, args=("--disable-hybrid-kv-cache-manager",))
    assert all_layers == pytest.approx(36 * 2 * 8 * 64 * 2 * 131072 / 2**30, rel=0.01)


def test_an_estimate_says_how_much_more_fits():
    found = estimate(m.LLAMA_8B_FACTS, engine="vllm", args=SHORT, card_mib=H100)
    # vLLM logs about 54 to 55 GiB of cache for this model on this card.
    assert 52 < found.tokens * 128 / 2**20 < 55.5
    assert found.sequences == pytest.approx(found.tokens / 8192, rel=0.01)
    assert [line.name for line in found.lines] == [
        "weights", "cache", "context", "activations", "graphs",
    ]  # fmt: skip
    assert all(line.why for line in found.lines)
    assert found.need_mib == -(-sum(line.mib for line in found.lines) * 10 // 9)


def test_the_engine_s_share_counts():
    narrow = ("--gpu-memory-utilization", "0.4", *SHORT)
    found = estimate(m.LLAMA_8B_FACTS, engine="vllm", args=narrow, card_mib=A100)
    assert found.fits
    tight = ("--gpu-memory-utilization=0.2", *SHORT)
    assert not estimate(m.LLAMA_8B_FACTS, engine="vllm", args=tight, card_mib=A100).fits
    fixed = ("--kv-cache-memory-bytes", "2G", *SHORT)
    found = estimate(m.LLAMA_8B_FACTS, engine="vllm", args=fixed, card_mib=RTX4090)
    assert (found.fits, found.sequences) == (True, 2.0)
    short = ("--kv-cache-memory-bytes", "512M", *SHORT)
    found = estimate(m.LLAMA_8B_FACTS, engine="vllm", args=short, card_mib=RTX4090)
    assert found.fits is False
    assert "does not hold one sequence of 8192 tokens (1024 MiB)" in found.notes[0]


@pytest.mark.parametrize(("engine", "gpus", "fault"), [
    ("vllm", 8, None), ("vllm", 6, "32 attention heads cannot be cut into 6 equal parts"),
    ("sglang", 3, "32 attention heads cannot be cut into 3 equal parts"), ("llamacpp", 3, None),
])  # fmt: skip
def test_heads_that_cannot_be_shared_out_fit_on_no_card(engine, gpus, fault):
    found = estimate(m.LLAMA_8B_FACTS, engine=engine, args=SHORT, gpus=gpus, card_mib=H200)
    assert (found.fault, found.fits) == (fault, fault is None)
    assert found.need_mib is not None, "the memory is told all the same"


def test_offloading_and_eager_need_less():
    usual = estimate(m.LLAMA_8B_FACTS, engine="vllm", args=SHORT, card_mib=RTX4090)
    less = estimate(
        m.LLAMA_8B_FACTS, engine="vllm", args=(*SHORT, "--cpu-offload-gb", "8"), card_mib=RTX4090
    )
    assert usual.lines[0].mib - less.lines[0].mib == 8 * 1024
    eager = estimate(
        m.LLAMA_8B_FACTS, engine="vllm", args=(*SHORT, "--enforce-eager"), card_mib=RTX4090
    )
    assert usual.need_mib - eager.need_mib == pytest.approx(768 / 0.9, abs=2)


def test_weights_in_32_bits_are_served_in_16():
    single = m.LLAMA_8B_FACTS | {"dtype": "float32", "tensor_bytes": 2 * 16_060_522_496}
    for args, size in (((), 15317), (("--dtype", "float32"), 30634)):
        found = estimate(single, engine="vllm", args=(*args, *SHORT), card_mib=H100)
        assert found.lines[0].mib == size


def test_experts_are_shared_out_among_more_cards_than_attention():
    # DeepSeek's experts are 97 % of it: with data parallel attention each card has an 8th of them.
    facts = m.DEEPSEEK_FACTS | {"expert_bytes": 660_000_000_000}
    args = ("-dp", "8", "-tp", "1", "--enable-expert-parallel", "--max-model-len", "32768")
    found = estimate(facts, engine="vllm", args=args, gpus=8, card_mib=H200)
    expected = (660e9 / 8 + 28_586_727_753) / 2**20
    assert found.lines[0].mib == pytest.approx(expected, abs=1)
    assert found.fits
    args = ("--dp", "8", "--enable-dp-attention")
    found = estimate(facts, engine="sglang", args=args, gpus=8, card_mib=H200)
    assert found.lines[0].mib == pytest.approx(expected, abs=1)


def test_llama_cpp_fits_what_is_asked_for():
    q8 = m.LLAMA_8B_FACTS | {
        "tensor_bytes": 8_532_000_000, "quantization": {"method": "gguf", "bits": 8.5},
    }  # fmt: skip
    full = ("-ngl", "99", "-c", "8192")
    found = estimate(q8, engine="llamacpp", args=full, card_mib=12 * 1024)
    assert found.fits
    # Its own buffer sizes for this file at 8192 tokens: KV 1024 MiB, compute 560 MiB.
    by_name = {line.name: line.mib for line in found.lines}
    assert by_name["cache"] == 1024
    assert 500 < by_name["activations"] < 600
    assert not estimate(q8, engine="llamacpp", args=full, card_mib=8 * 1024).fits
    half = estimate(q8, engine="llamacpp", args=(*full, "-ctk", "q8_0", "-ctv", "q8_0"))
    assert next(line.mib for line in half.lines if line.name == "cache") == 544
    some = estimate(q8, engine="llamacpp", args=("-ngl", "16", "-c", "8192"), card_mib=8 * 1024)
    assert some.fits
    # Without -ngl it leaves to the host what does not fit: nothing to refuse.
    free = estimate(q8, engine="llamacpp", args=("-c", "8192"), card_mib=8 * 1024)
    assert (free.fits, free.strict) == (True, False)
    assert "leaves to host memory" in free.notes[0]
    assert smallest_card(q8, engine="llamacpp", args=("-c", "8192")) is None


UNKNOWN = [
    (m.LLAMA_8B_FACTS | {"tensor_bytes": None}, "vllm", (), 1, "tensor_bytes"),
    (m.LLAMA_8B_FACTS | {"hidden_size": -1}, "vllm", (), 1, "hidden_size"),
    (m.LLAMA_8B_FACTS | {"max_length": True}, "vllm", (), 1, "max_length"),
    (m.LLAMA_8B_FACTS | {"attention": {"kind": "unknown"}}, "vllm", (), 1, "attention.kv_values_full"),
    (m.LLAMA_8B_FACTS | {"attention": {"kind": "hybrid", "layers": {"linear": 3, "full": 1}, "kv_values_full": 9}}, "vllm", (), 1,
     "attention.state_values_per_sequence"),
    (m.LLAMA_8B_FACTS | {"adapter_of": "org/base"}, "vllm", (), 1, "the weights of org/base, which this adapter changes"),
    (m.LLAMA_8B_FACTS, "command", (), 1, "engine command runs what only its user knows"),
    (m.LLAMA_8B_FACTS, "vllm", ("--max-model-len", "long"), 1, "--max-model-len long is no number that can be used"),
    (m.LLAMA_8B_FACTS, "vllm", ("-tp", "4"), 2, "the arguments want 4 cards (tp 4, pp 1, dp 1) and the profile gives 2"),
    (m.LLAMA_8B_FACTS, "vllm", ("--config", "x.yaml"), 1, "--config names a file with arguments that only the node can read"),
    (m.LLAMA_8B_FACTS, "vllm", ("--speculative-config", '{"model": "x"}'), 1, "--speculative-config may load a draft model of unknown size"),
    (m.LLAMA_8B_FACTS, "vllm", ("--quantization", "bitsandbytes"), 1, "the size of the weights after --quantization bitsandbytes"),
    (m.LLAMA_8B_FACTS, "sglang", ("--kv-cache-dtype", "fp5"), 1, "--kv-cache-dtype fp5 is no cache type that is known here"),
    (m.LLAMA_8B_FACTS, "llamacpp", ("-ot", "exps=CPU"), 1, "--override-tensor places tensors by hand"),
]  # fmt: skip


@pytest.mark.parametrize(("facts", "engine", "args", "gpus", "missing"), UNKNOWN)
def test_what_nobody_knows_is_unknown_and_never_zero(facts, engine, args, gpus, missing):
    found = estimate(facts, engine=engine, args=args, gpus=gpus, card_mib=H100)
    assert (found.fits, found.need_mib, found.missing) == (None, None, (missing,))
    assert smallest_card(facts, engine=engine, args=args, gpus=gpus) is None


def test_all_missing_facts_are_told_at_once():
    known = ("tensor_bytes", "attention.kv_values_full", "hidden_size", "max_length")
    assert estimate({"layers": 3}, engine="vllm", card_mib=H100).missing == known
    for nothing in (None, {}, [], "x"):
        assert set(estimate(nothing, engine="vllm").missing) == {*known, "layers"}


def test_nodes_share_a_model_as_the_agent_will_split_it():
    def of(*args, shards=2, gpus=8):
        found = estimate(m.DEEPSEEK_FACTS, engine="vllm", args=args, gpus=gpus, shards=shards)
        return found.lines[0].mib, found.lines[1].mib

    weights, cache = of()
    assert weights < 0.6 * of(shards=1)[0], "16 cards have half of what 8 have"
    assert cache == of(shards=1)[1], "one tensor over all nodes: the latent is on every card"
    # With the tensor's width given, each node becomes a stage with its own layers.
    assert of("-tp", "8")[1] == pytest.approx(cache * 31 / 61, rel=0.01)
    assert of("-tp", "8") == of("-tp", "8", "-pp", "2")
