"""What must hold of any memory estimate (hypothesis)."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from controller.placement.fit import estimate, smallest_card
from controller.placement.fit_args import ENGINES
from tests.placement import fit_models as m

models = st.sampled_from(m.ALL)
engines = st.sampled_from(["vllm", "sglang"])
cards = st.sampled_from([None, m.T4, m.RTX4090, m.L40S, m.H100, m.H200])
tokens = st.integers(1, 200_000)
LENGTH = {"vllm": "--max-model-len", "sglang": "--context-length"}
PIPELINE = {"vllm": "--pipeline-parallel-size", "sglang": "--pp-size"}


def need(facts, engine, args=(), gpus=1, card=m.H100, without=()):
    found = estimate(facts, engine=engine, args=args, gpus=gpus, card_mib=card)
    assert not found.missing
    return sum(line.mib for line in found.lines if line.name not in without), found.need_mib


@given(models, engines, st.sampled_from([1, 2, 3, 4, 8]), st.integers(1, 5), tokens)
def test_more_cards_never_need_more_of_each(facts, engine, few, times, length):
    args = (LENGTH[engine], str(length))
    # Buffers between cards, and what SGLang sets aside for them, come with the second card.
    added = ("communication", "reserve")
    by_tensors = need(facts, engine, args, few * times, without=added)[0]
    assert by_tensors <= need(facts, engine, args, few, without=added)[0]
    stages = (*args, PIPELINE[engine])
    by_layers = need(facts, engine, (*stages, str(few * times)), few * times, without=added)[0]
    assert by_layers <= need(facts, engine, (*stages, str(few)), few, without=added)[0]


@given(models, engines, tokens, tokens, st.sampled_from([1, 2, 8]), cards)
def test_a_shorter_context_never_needs_more(facts, engine, one, other, gpus, card):
    short, long = sorted((one, other))
    name = LENGTH[engine]
    less = need(facts, engine, (name, str(short)), gpus, card)
    more = need(facts, engine, (name, str(long)), gpus, card)
    assert less <= more


@given(models, st.sampled_from(["vllm", "sglang"]), st.sampled_from([1, 2, 8]), tokens)
def test_a_smaller_cache_type_never_needs_more(facts, engine, gpus, length):
    args = (LENGTH[engine], str(length), "--kv-cache-dtype")
    sizes = [need(facts, engine, (*args, kind), gpus) for kind in ("fp8_e4m3", "bfloat16")]
    assert sizes == sorted(sizes)
    whole = ("--dtype", "float32", LENGTH[engine], str(length))
    half = ("--dtype", "bfloat16", LENGTH[engine], str(length))
    assert need(facts, engine, half, gpus) <= need(facts, engine, whole, gpus)


@given(models, engines, st.sampled_from([1, 2, 4, 8]), cards)
def test_the_smallest_card_is_the_line_between_fits_and_not(facts, engine, gpus, card):
    least = smallest_card(facts, engine=engine, gpus=gpus)
    assert estimate(facts, engine=engine, gpus=gpus, card_mib=least).fits
    assert not estimate(facts, engine=engine, gpus=gpus, card_mib=least - 1).fits
    if card is not None:
        fits = estimate(facts, engine=engine, gpus=gpus, card_mib=card).fits
        assert fits is (card >= least)


odd = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)
keys = st.sampled_from(sorted({key for facts in m.ALL for key in facts} | {"expert_bytes"}))
words = st.sampled_from(
    ["--max-model-len", "--tensor-parallel-size=2", "-tp", "--kv-cache-dtype", "--block-size",
     "--gpu-memory-utilization", "--tp", "--dp", "--enable-dp-attention", "--context-length",
     "-ngl", "-c", "-ts", "-sm", "row", "none", "q8_0", "fp8", "auto", "-1", "0", "4", "1e9",
     "--cpu-offload-gb", "--kv-cache-memory-bytes", "8K", "--mem-fraction-static", "0.5", "3,1"]
) | st.text(max_size=6) | st.integers()  # fmt: skip


@given(
    models,
    st.dictionaries(keys, odd, max_size=4),
    st.dictionaries(st.sampled_from(["kind", "layers", "window", "kv_values_full"]), odd),
    st.sampled_from([*ENGINES, "command", ""]),
    st.lists(words, max_size=6),
    st.integers(-1, 9),
    st.integers(-1, 4),
    st.integers(-1, 2**20) | st.none(),
)
def test_odd_documents_and_arguments_never_raise(
    facts, changed, attention, engine, args, gpus, shards, card
):
    document = facts | {"attention": {**facts.get("attention", {}), **attention}} | changed
    how = {"engine": engine, "args": args, "env": {"LLAMA_ARG_CTX_SIZE": "x"}}
    found = estimate(document, **how, gpus=gpus, shards=shards, card_mib=card)
    assert (found.fits is None) == (card is None or bool(found.missing))
    assert (found.need_mib is None) == bool(found.missing)
    smallest_card(document, **how, gpus=gpus, shards=shards)


@given(odd)
def test_anything_at_all_is_no_document(document):
    assert estimate(document, engine="vllm", card_mib=m.H100).fits is None
