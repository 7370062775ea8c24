"""What each layer of a model keeps per token: the whole context, a window, a fixed state, nothing.

Pure. Called by model_facts.py. Engines size their KV cache by this: a sliding layer stops growing
at its window, a linear (recurrent) one never grows, a layer that shares a cache adds none.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

FULL: Final = "full"
SLIDING: Final = "sliding"
CHUNKED: Final = "chunked"
LINEAR: Final = "linear"
CROSS: Final = "cross"
SHARED: Final = "shared"
NONE: Final = "none"
UNKNOWN: Final = "unknown"

MAX_LAYERS: Final = 4096

PERIOD: Final = {
    "gemma2": 2,
    "vaultgemma": 2,
    "gpt_oss": 2,
    "gemma3": 6,
    "gemma3_text": 6,
    "gemma4_text": 6,
    "gemma3n_text": 5,
    "cohere2": 4,
    "olmo3": 4,
    "exaone4": 4,
    "exaone_moe": 4,
    "afmoe": 4,
    "cwm": 4,
}
"""Families in which every n-th layer sees everything and the others a window, unless told."""
LINEAR_PERIOD: Final = {
    "qwen3_next": 4,
    "qwen3_5": 4,
    "qwen3_5_text": 4,
    "qwen3_5_moe": 4,
    "qwen3_5_moe_text": 4,
    "olmo_hybrid": 4,
    "minimax": 2,
}
"""Families in which every n-th layer has attention and the others a recurrent state."""
ALL_WINDOWED: Final = frozenset({"mistral", "mixtral", "ministral", "phi3", "phimoe", "starcoder2"})
"""Families in which a window is that of every layer. Others have some layers that see everything:
without a word of which, all count as such, for an estimate too high does no harm."""
RECURRENT: Final = frozenset({"mamba", "mamba2", "falcon_mamba", "rwkv", "rwkv5", "rwkv6", "rwkv7"})
_ENCODERS = """bert roberta xlm-roberta camembert distilbert albert electra deberta deberta-v2 mpnet
    nomic_bert modernbert new gte clip siglip clip_vision_model siglip_vision_model vit"""
ENCODERS: Final = frozenset(_ENCODERS.split())
"""Model types that answer in one pass and keep no cache."""
_WORDS: Final = (
    ("sliding", SLIDING),
    ("local", SLIDING),
    ("chunked", CHUNKED),
    ("linear", LINEAR),
    ("mamba", LINEAR),
    ("recurrent", LINEAR),
    ("conv", LINEAR),
    ("delta", LINEAR),
    ("cross", CROSS),
)
_EXACT: Final = {
    "full_attention": FULL,
    "full": FULL,
    "attention": FULL,
    "global": FULL,
    "global_attention": FULL,
    "indexed_attention": FULL,  # sees a chosen part of the context, and keeps all of it
    "hybrid": FULL,  # attention beside a recurrent block: the cache grows with the context
    "mlp": NONE,
    "moe": NONE,
}
_LETTERS: Final = {"M": LINEAR, "*": FULL, "-": NONE, "E": NONE}


def kinds(text: Mapping[str, Any], layers: int) -> list[str]:
    """The kind of each layer. `text` is the part of a config that describes the decoder."""
    layers = min(layers, MAX_LAYERS)
    found = _told(text, layers) or _by_family(text, layers)
    for position in _positions(text.get("cross_attention_layers"), layers):
        found[position] = CROSS
    shared = text.get("num_kv_shared_layers")
    if isinstance(shared, int) and 0 < shared < layers:
        found[layers - shared :] = [SHARED] * shared
    return found


def _told(text: Mapping[str, Any], layers: int) -> list[str] | None:
    """The kinds where the config lists them, in one of the many ways that there are."""
    for key in ("layer_types", "layers_block_type"):
        if (words := _list(text.get(key), layers, str)) is not None:
            return [_kind(word) for word in words]
    blocks = text.get("block_types")
    if isinstance(blocks, list) and blocks and all(isinstance(b, str) for b in blocks):
        pattern = [SLIDING if b == "attention" else _kind(b) for b in blocks[:MAX_LAYERS]]
        return [pattern[i % len(pattern)] for i in range(layers)]
    letters = text.get("hybrid_override_pattern")
    if isinstance(letters, str) and len(letters) >= layers:
        return [_LETTERS.get(letter, UNKNOWN) for letter in letters[:layers]]
    for key, one, zero in (
        ("attn_type_list", FULL, LINEAR),
        ("hybrid_layer_pattern", SLIDING, FULL),
        ("sliding_window_layers", SLIDING, FULL),
    ):
        if (flags := _list(text.get(key), layers, int)) is not None:
            return [one if flag else zero for flag in flags]
    return _told_by_position(text, layers)


def _told_by_position(text: Mapping[str, Any], layers: int) -> list[str] | None:
    """Kinds where only the layers with attention are named."""
    for key in ("attn_layer_indices", "full_attn_idxs"):
        if isinstance(text.get(key), list):
            return _only(_positions(text[key], layers), layers)
    linear = text.get("linear_attn_config")
    if isinstance(linear, dict) and isinstance(linear.get("full_attn_layers"), list):
        # These count from 1.
        return _only({i - 1 for i in _positions(linear["full_attn_layers"], layers + 1)}, layers)
    period, offset = text.get("attn_layer_period"), text.get("attn_layer_offset", 0)
    if isinstance(period, int) and isinstance(offset, int) and period > 0:
        return _only({i for i in range(layers) if i % period == offset}, layers)
    return None


def _by_family(text: Mapping[str, Any], layers: int) -> list[str]:
    family = str(text.get("model_type"))
    if family in RECURRENT:
        return [LINEAR] * layers
    if family in LINEAR_PERIOD:
        period = _period(text, "full_attention_interval") or LINEAR_PERIOD[family]
        return _every(period, layers, LINEAR)
    if _number(text.get("attention_chunk_size")):
        return _chunked(text, layers)
    if not _number(text.get("sliding_window")):
        return [FULL] * layers
    return _windowed(text, family, layers)


def _windowed(text: Mapping[str, Any], family: str, layers: int) -> list[str]:
    if text.get("use_sliding_window") is False:
        return [FULL] * layers
    keys = ("sliding_window_pattern", "_sliding_window_pattern", "global_attn_every_n_layers")
    period = next((p for key in keys if (p := _period(text, key))), None) or PERIOD.get(family)
    if period:
        found = _every(period, layers, SLIDING)
        if family in {"exaone4", "exaone_moe", "gemma4_text"} and found:
            found[-1] = FULL
        return found
    first = text.get("max_window_layers")
    if text.get("use_sliding_window") is True and isinstance(first, int):
        return [SLIDING if i >= first else FULL for i in range(layers)]
    return [SLIDING if family in ALL_WINDOWED else FULL] * layers


def _chunked(text: Mapping[str, Any], layers: int) -> list[str]:
    """Llama 4: layers with rotary positions see a chunk, every fourth has none and sees all."""
    if (rope := _list(text.get("no_rope_layers"), layers, int)) is not None:
        return [CHUNKED if has_rope else FULL for has_rope in rope]
    keys = ("no_rope_layer_interval", "nope_layer_interval")
    return _every(next((p for k in keys if (p := _period(text, k))), 4), layers, CHUNKED)


def _every(period: int, layers: int, other: str) -> list[str]:
    return [other if (i + 1) % period else FULL for i in range(layers)]


def _only(full: set[int], layers: int) -> list[str]:
    return [FULL if i in full else LINEAR for i in range(layers)]


def _period(text: Mapping[str, Any], key: str) -> int | None:
    """A period as a number, or as letters: "LLLG" has four, the last of them global."""
    value = text.get(key)
    if isinstance(value, str) and 0 < len(value) <= MAX_LAYERS and set(value) <= {"L", "G"}:
        return len(value)
    return value if isinstance(value, int) and 0 < value <= MAX_LAYERS else None


def _kind(word: str) -> str:
    exact = _EXACT.get(word)
    if exact is not None or "compressed" in word:
        return exact or UNKNOWN
    return next((kind for part, kind in _WORDS if part in word), UNKNOWN)


def _list(value: Any, layers: int, kind: type) -> list[Any] | None:
    """A list with an entry for each layer; those of extra (draft) layers are cut off."""
    if not isinstance(value, list) or not layers or len(value) < layers:
        return None
    return value[:layers] if all(isinstance(item, kind) for item in value[:layers]) else None


def _positions(value: Any, limit: int) -> set[int]:
    items = value[:MAX_LAYERS] if isinstance(value, list) else []
    return {i for i in items if isinstance(i, int) and 0 <= i < limit}


def _number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def count(found: list[str]) -> dict[str, int]:
    """How many layers there are of each kind."""
    return dict(Counter(found))


def per_token(found: list[str], values: Callable[[int, str], int | None]) -> tuple[int, int] | None:
    """Cached values per token of layers that keep everything and of those with a window.

    `values(layer, kind)` is what one layer keeps of a token; None when a layer is not understood.
    """
    everything = window = 0
    for position, kind in enumerate(found):
        if kind == UNKNOWN:
            return None
        if kind not in {FULL, SLIDING, CHUNKED}:
            continue
        kept = values(position, kind)
        if kept is None:
            return None
        if kind == FULL:
            everything += kept
        else:
            window += kept
    return everything, window
