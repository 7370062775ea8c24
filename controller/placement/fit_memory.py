"""How many bytes the parts of a replica take on its fullest card.

Pure arithmetic on what `fit_facts.py` and `fit_args.py` read. A missing fact raises `Missing`,
which `fit.py` turns into "unknown". Where one must choose, the larger number is taken.
"""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from controller.placement.fit_args import Ask
    from controller.placement.fit_facts import Facts

BIG_CARD_MIB: Final = 70 * 1024
"""From here on vLLM works on more tokens and sequences at once."""
BATCHED_BIG, BATCHED_SMALL, UBATCH = 8192, 2048, 512
SEQUENCES_BIG, SEQUENCES_SMALL = 1024, 256
"""Tokens and sequences of one step by default, for vLLM's server; llama.cpp works on 512 tokens."""
LEAST_CONTEXT: Final = 4096
"""An engine that shortens sequences to what fits is of use from about here."""
LOGIT_BYTES: Final = 8
"""Sampling holds the scores of all words in 32 bits, and once more sorted."""
WIDTHS: Final = 3
"""Hidden states and intermediates that live at once: input, output, and one on its way."""
NORMS: Final = 4
STATE_BYTES: Final = 4
"""Recurrent states are kept in 32 bits, or in fewer."""
MLA_QUERY_RANKS: Final = 3
"""Queries of MLA are compressed too, to this many times the rank of the keys (DeepSeek: 1536)."""
GGML_LAYER_VALUES: Final = 8
"""llama.cpp's compute buffer holds about this many intermediates in 32 bits."""
SGLANG_STEPS: Final = ((20, 2048, 8, 8), (35, 2048, 24, 80), (60, 4096, 32, 160),
                       (160, 8192, 256, 512), (10**9, 16384, 512, 512))  # fmt: skip
"""Below so many GiB SGLang works on so many tokens at once and records graphs for so many sequences
by default: the last number is that of four cards and more."""
SGLANG_MANY_CARDS: Final = 4


class Missing(Exception):
    """A fact without which no estimate can be made; the text names it."""


def known(value: float | None, name: str) -> float:
    """The value, or Missing."""
    if value is None:
        raise Missing(name)
    return value


def weights(f: Facts, ask: Ask) -> float:
    """Bytes of weights on the fullest card."""
    if f.adapter_of is not None:
        raise Missing(f"the weights of {f.adapter_of}, which this adapter changes")
    if ask.requantizes is not None and not f.quantized:
        raise Missing(f"the size of the weights after --quantization {ask.requantizes}")
    cast = _cast(f, ask)
    total = known(f.tensor_bytes, "tensor_bytes") * cast
    experts = min((f.expert_bytes or 0) * cast, total)
    if ask.engine == "llamacpp":
        return _ggml_weights(f, ask, total, experts)
    rest = total - experts
    stage, edge = _stage(f, ask), 0.0
    if ask.pp > 1:
        edge = min(known(f.vocab, "vocab_size") * known(f.hidden, "hidden_size") * 2, rest)
        rest = max(rest - edge * (1 if f.tied else 2), 0.0)
    dense = _dense(f, ask, rest * stage) + edge / ask.attention_tp
    found = dense + experts * stage * _expert_part(f, ask)
    return max(found - ask.offload_gib * 2**30, 0.0)


def _cast(f: Facts, ask: Ask) -> float:
    """How weights grow or shrink while they are loaded: engines serve no 32 bits unless told."""
    own = f.dtype_bytes
    if f.quantized or own is None or ask.engine == "llamacpp":
        return 1.0
    wanted = {"float32": 4.0, "float": 4.0, None: min(own, 2.0), "auto": min(own, 2.0)}
    return wanted.get(ask.dtype, 2.0) / own


def _stage(f: Facts, ask: Ask) -> float:
    """The part of the layers that the longest stage of a pipeline has."""
    if ask.pp == 1:
        return 1.0
    layers = int(known(f.layers, "layers"))
    return ceil(layers / ask.pp) / layers


def _dense(f: Facts, ask: Ask, total: float) -> float:
    """What all tokens pass through, on one card: most of it is cut, a little lies everywhere."""
    tp = ask.attention_tp
    if tp == 1:
        return total
    layers = known(f.layers, "layers") * _stage(f, ask)
    hidden = known(f.hidden, "hidden_size")
    widths = NORMS + (f.experts or 0) + (f.mla_rank or 0) * (1 + MLA_QUERY_RANKS)
    whole = min(layers * hidden * (widths + (f.mla_rope or 0)) * 2, total)
    heads, keys = f.kv_heads or 1, 0.0
    if not f.mla and f.head_dim and f.value_dim:
        keys = layers * hidden * heads * (f.head_dim + f.value_dim) * f.weight_bytes
        keys = min(keys, total - whole)
    return whole + (total - whole - keys) / tp + keys * _heads_part(heads, tp)


def _heads_part(heads: int, tp: int) -> float:
    """The part of the KV heads that one card has: at least one, with copies beyond that."""
    return max(ceil(heads / tp), 1) / heads


def _expert_part(f: Facts, ask: Ask) -> float:
    cards = ask.expert_cards
    if ask.expert_parallel and f.experts:
        return ceil(f.experts / cards) / f.experts
    return 1 / cards


def _ggml_weights(f: Facts, ask: Ask, total: float, experts: float) -> float:
    """llama.cpp: so many layers are on cards, each whole unless rows are split."""
    layers = int(known(f.layers, "layers"))
    if ask.experts_off is not None:
        if f.experts and f.expert_bytes is None:
            raise Missing("expert_bytes")
        total -= experts * min(ask.experts_off, layers) / layers
    on_cards = layers + 1 if ask.gpu_layers is None else min(ask.gpu_layers, layers + 1)
    part = min(on_cards / layers, 1.0)
    if ask.heaviest is not None:
        return total * part * ask.heaviest
    if ask.tp == 1 or ask.split == "row":
        return total * part / ask.tp
    # Word embeddings: the first table stays in host memory, the last is on one card whole.
    table = min(known(f.vocab, "vocab_size") * known(f.hidden, "hidden_size") * f.weight_bytes,
                total)  # fmt: skip
    on_one = ceil(min(on_cards, layers) / ask.tp) / layers
    return min((total - table) * on_one + table, total * part)


class Cache:
    """What one card keeps of a sequence, as a function of its length."""

    def __init__(self, f: Facts, ask: Ask, batched: int) -> None:
        self._ask = ask
        self.fixed = self.full = self.windowed = 0.0
        """Bytes of a sequence, of each of its tokens, and of each within the window."""
        self.reach: float = 0
        if f.kind == "encoder":
            return
        values = known(f.kv_full, "attention.kv_values_full")
        size, part = _value_bytes(f, ask), _cache_part(f, ask)
        self.full = values * size * part + _index(f) * _stage(f, ask)
        if f.kv_window:
            self._window(f, batched, f.kv_window * size * part)
        if f.linear_layers:
            state = known(f.state, "attention.state_values_per_sequence")
            self.fixed = state * STATE_BYTES * _stage(f, ask) / ask.attention_tp

    def _window(self, f: Facts, batched: int, each: float) -> None:
        ask = self._ask
        if not ask.hybrid:
            self.full += each
        elif ask.engine == "sglang":
            self.full += each * (ask.window_ratio or 1.0)
        else:
            self.windowed = each * (_padded(f) if ask.engine == "vllm" else 1.0)
            each_of = (ask.sequences or 1) if ask.engine == "llamacpp" else 1
            self.reach = known(f.window, "attention.window") * each_of + batched

    def sequence(self, tokens: int) -> float:
        """Bytes of one sequence of so many tokens."""
        tokens = ceil(tokens / self._ask.block) * self._ask.block
        reach = ceil(self.reach / self._ask.block + 1) * self._ask.block
        return self.fixed + tokens * self.full + min(tokens, reach) * self.windowed


def _value_bytes(f: Facts, ask: Ask) -> float:
    if ask.key_bytes is not None and ask.value_bytes is not None:
        return (ask.key_bytes + ask.value_bytes) / 2 if not f.mla else ask.key_bytes
    if ask.value_bytes is not None:
        return ask.value_bytes
    if ask.dtype in ("float32", "float"):
        return 4.0
    return min(known(f.dtype_bytes, "dtype"), 2.0)


def _cache_part(f: Facts, ask: Ask) -> float:
    """The part of the cached values that one card keeps."""
    if ask.engine == "llamacpp":
        if not ask.cache_on_card:
            return 0.0
        layers = int(known(f.layers, "layers"))
        on_cards = layers if ask.gpu_layers is None else min(ask.gpu_layers, layers)
        # Split by rows, one card keeps the whole cache. MLA: some versions keep values beside keys.
        twice = 1 + (f.mla_rank or 0) / ((f.mla_rank or 0) + (f.mla_rope or 0) or 1)
        if ask.split == "row":
            return on_cards / layers * twice
        on_one = ceil(on_cards / ask.tp) / layers
        return max(on_one, on_cards / layers * (ask.heaviest or 0)) * twice
    heads = 1.0 if f.mla else _heads_part(int(known(f.kv_heads, "kv_heads")), ask.attention_tp)
    return heads * _stage(f, ask)


def _index(f: Facts) -> float:
    """Sparse attention keeps an 8-bit key and its scale for each token of each layer."""
    return f.full_layers * (f.index_dim + 4) if f.index_dim else 0.0


def _padded(f: Facts) -> float:
    """vLLM groups layers of a kind into groups of one size; the last of them has idle places."""
    if not f.full_layers or not f.window_layers:
        return 1.0
    small, large = sorted((f.full_layers, f.window_layers))
    size = large if large < 1.25 * small else small
    return ceil(f.window_layers / size) * size / f.window_layers


def step(ask: Ask, card_mib: int | None) -> tuple[int, int]:
    """Tokens and sequences of one step at most; an unknown card counts as one of 80 GiB."""
    gib = 80.0 if card_mib is None else card_mib / 1024
    if ask.engine == "llamacpp":
        return ask.batched or UBATCH, ask.sequences or 1
    if ask.engine == "sglang":
        usual = next((s for s in SGLANG_STEPS if gib < s[0]), SGLANG_STEPS[-1])
        return ask.batched or usual[1], ask.sequences or usual[2 + (ask.tp >= SGLANG_MANY_CARDS)]
    big = gib * 1024 >= BIG_CARD_MIB
    return (
        ask.batched or (BATCHED_BIG if big else BATCHED_SMALL),
        ask.sequences or (SEQUENCES_BIG if big else SEQUENCES_SMALL),
    )


def workspace(f: Facts, ask: Ask, tokens: int, sequences: int) -> float:
    """Bytes of intermediates of the largest step: those of layers, or the scores of all words."""
    hidden = known(f.hidden, "hidden_size")
    wide = known(f.intermediate or f.expert_size, "intermediate_size")
    vocab = known(f.vocab, "vocab_size")
    if ask.engine == "llamacpp":
        return tokens * 4 * (vocab + GGML_LAYER_VALUES * (hidden + wide))
    width = WIDTHS * hidden + WIDTHS * wide / ask.attention_tp
    if f.experts:
        size = (f.expert_size or wide) / (1 if ask.expert_parallel else ask.expert_cards)
        width += (f.experts_active or 1) * (max(2 * size, hidden) + size + hidden)
    scores = 0.0 if f.kind == "encoder" else sequences * vocab * LOGIT_BYTES
    return max(tokens * width * 2, scores)
