"""The facts document of weights, as the values that an estimate of memory needs.

Agents make the document (column `weight.facts`) from a model's configuration and the headers of
its tensors. It comes from outside, so every value is checked here: what is odd is unknown.
Called by `fit.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

MOST: Final = 2**60
"""Larger numbers are nonsense, and would only make absurd sentences."""
DTYPE_BYTES: Final = {
    "float64": 8.0,
    "float32": 4.0,
    "float16": 2.0,
    "bfloat16": 2.0,
    "float8_e4m3fn": 1.0,
    "float8_e5m2": 1.0,
}


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known of a model; None is unknown. Sizes are numbers of values unless named bytes."""

    tensor_bytes: int | None = None
    """All weights as they lie on disk."""
    expert_bytes: int | None = None
    """The part of them that belongs to routed experts."""
    layers: int | None = None
    hidden: int | None = None
    intermediate: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    value_dim: int | None = None
    vocab: int | None = None
    max_length: int | None = None
    dtype: str | None = None
    quantized_bits: float | None = None
    """Bits of one quantised weight; None also where the weights are not quantised."""
    quantized: bool = False
    experts: int | None = None
    experts_active: int | None = None
    expert_size: int | None = None
    tied: bool = False
    multimodal: bool = False
    adapter_of: str | None = None
    kind: str | None = None
    """How it caches: full, sliding, chunked, mla, hybrid, linear, encoder, unknown."""
    full_layers: int = 0
    window_layers: int = 0
    linear_layers: int = 0
    window: int | None = None
    kv_full: int | None = None
    """Cached values of one token in layers that keep everything."""
    kv_window: int = 0
    """Cached values of one token in layers that keep a window."""
    state: int | None = None
    """Values that recurrent layers keep of a sequence, however long it is."""
    mla_rank: int | None = None
    mla_rope: int | None = None
    index_dim: int | None = None
    """Size of the key by which sparse attention finds what to look at, one byte a value."""

    @property
    def dtype_bytes(self) -> float | None:
        """Bytes of one value in the model's own dtype."""
        return DTYPE_BYTES.get(self.dtype or "")

    @property
    def weight_bytes(self) -> float:
        """Bytes of one weight of a layer, at most: two where nobody says."""
        own = self.dtype_bytes or 2.0
        return min(own, self.quantized_bits / 8) if self.quantized_bits else own

    @property
    def mla(self) -> bool:
        """Whether one compressed latent serves all heads, so that cards cannot share it out."""
        return self.mla_rank is not None


def read(document: Mapping[str, Any] | None) -> Facts:
    """The facts of a document; never raises, whatever the document holds."""
    if not isinstance(document, dict):
        return Facts()
    attention, layers = _part(document, "attention"), _part(document, "attention", "layers")
    quantization, experts = _part(document, "quantization"), _part(document, "experts")
    heads, dtype = _number(document, "heads"), document.get("dtype")
    adapter = document.get("adapter_of")
    return Facts(
        tensor_bytes=_number(document, "tensor_bytes"),
        expert_bytes=_number(document, "expert_bytes"),
        layers=_number(document, "layers"),
        hidden=_number(document, "hidden_size"),
        intermediate=_number(document, "intermediate_size"),
        heads=heads,
        kv_heads=_number(document, "kv_heads") or heads,
        head_dim=_number(document, "head_dim"),
        value_dim=_number(document, "v_head_dim") or _number(document, "head_dim"),
        vocab=_number(document, "vocab_size"),
        max_length=_number(document, "max_length"),
        dtype=dtype if isinstance(dtype, str) and dtype in DTYPE_BYTES else None,
        quantized_bits=_bits(quantization),
        quantized=bool(quantization),
        experts=_number(experts, "count"),
        experts_active=_number(experts, "active"),
        expert_size=_number(experts, "intermediate_size"),
        tied=document.get("tie_word_embeddings") is True,
        multimodal=document.get("multimodal") is True,
        adapter_of=adapter if isinstance(adapter, str) else None,
        kind=attention["kind"] if isinstance(attention.get("kind"), str) else None,
        full_layers=_number(layers, "full") or 0,
        window_layers=(_number(layers, "sliding") or 0) + (_number(layers, "chunked") or 0),
        linear_layers=_number(layers, "linear") or 0,
        window=_number(attention, "window"),
        kv_full=_number(attention, "kv_values_full", least=0),
        kv_window=_number(attention, "kv_values_window", least=0) or 0,
        state=_number(attention, "state_values_per_sequence"),
        mla_rank=_number(attention, "kv_lora_rank"),
        mla_rope=_number(attention, "qk_rope_head_dim"),
        index_dim=_number(attention, "index_head_dim"),
    )


def _part(document: Mapping[str, Any], *path: str) -> dict[str, Any]:
    """An object inside the document; empty where there is none."""
    found: Any = document
    for key in path:
        found = found.get(key) if isinstance(found, dict) else None
    return found if isinstance(found, dict) else {}


def _number(document: Mapping[str, Any], key: str, least: int = 1) -> int | None:
    value = document.get(key)
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return value if least <= value <= MOST else None


def _bits(quantization: Mapping[str, Any]) -> float | None:
    """GGUF files have fractions of bits: scales are counted in."""
    value = quantization.get("bits")
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if 1 <= value <= 64 else None
