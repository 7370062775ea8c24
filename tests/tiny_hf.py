"""The model of tests/tiny_model.py in Hugging Face's format, for vLLM: `tiny_hf(folder)` writes it.

Same numbers, same tokens: greedy, both engines say the same words.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
from typing import TYPE_CHECKING, Any

from tests.tiny_model import (
    CHAT_TEMPLATE,
    CONTEXT,
    EOS,
    FFN,
    HEAD,
    HEADS,
    HIDDEN,
    KV_HEADS,
    LAYERS,
    PAD,
    SPECIAL,
    tensors,
    vocabulary,
)

if TYPE_CHECKING:
    from pathlib import Path

SHA256 = "7fb06e6c"
"""How the checksum of model.safetensors begins."""
NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def hf_name(name: str) -> str:
    """`blk.0.attn_q.weight` as `model.layers.0.self_attn.q_proj.weight`."""
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
    if layer:
        return f"model.layers.{layer[1]}.{NAMES[layer[2]]}.weight"
    return f"{NAMES[name.removesuffix('.weight')]}.weight"


def straight(blob: bytes, rows: int, heads: int) -> bytes:
    """Rows of queries and keys back from llama.cpp's interleaved order."""
    width, d = len(blob) // rows, rows // heads
    row = [blob[i * width : (i + 1) * width] for i in range(rows)]
    order = (h * d + 2 * j + k for h in range(heads) for k in (0, 1) for j in range(d // 2))
    return b"".join(row[i] for i in order)


def safetensors(tokens: list[str], word_ids: list[int]) -> bytes:
    """The weights as bfloat16: the upper halves of floats that were rounded to it."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, shape, whole in tensors(len(tokens), word_ids):
        blob = whole
        if "attn_q" in name or "attn_k" in name:
            blob = straight(whole, shape[0], HEADS if "attn_q" in name else KV_HEADS)
        half = b"".join(blob[i + 2 : i + 4] for i in range(0, len(blob), 4))
        offsets = [len(data), len(data) + len(half)]
        header[hf_name(name)] = {"dtype": "BF16", "shape": list(shape), "data_offsets": offsets}
        data += half
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    return struct.pack("<Q", len(head)) + head + data


def model_config(tokens: list[str]) -> dict[str, Any]:
    """config.json."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "vocab_size": len(tokens),
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": PAD,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
    }


def tokenizer(tokens: list[str], merges: list[str]) -> dict[str, Any]:
    """tokenizer.json: byte-level BPE."""
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [
        {"id": number, "content": token, "special": True, **plain}
        for number, token in enumerate(tokens)
        if token.startswith("<|")
    ]
    vocab = {token: number for number, token in enumerate(tokens)}
    return {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {**level, "use_regex": True},
        "post_processor": None,
        "decoder": {**level, "use_regex": True},
        "model": {"type": "BPE", "vocab": vocab, "merges": merges},
    }


def tiny_hf(folder: Path) -> Path:
    """Write the model into `folder`; returns it."""
    tokens, merges, word_ids = vocabulary()
    weights = safetensors(tokens, word_ids)
    found = hashlib.sha256(weights).hexdigest()
    assert found.startswith(SHA256), f"the tiny model changed: its sha256 is {found}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.safetensors").write_bytes(weights)
    documents = {
        "config.json": model_config(tokens),
        "generation_config.json": {"bos_token_id": PAD, "eos_token_id": EOS, "pad_token_id": PAD},
        "tokenizer.json": tokenizer(tokens, merges),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": CONTEXT,
            "bos_token": SPECIAL[PAD],
            "eos_token": SPECIAL[EOS],
            "pad_token": SPECIAL[PAD],
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    }
    for name, document in documents.items():
        (folder / name).write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")
    return folder
