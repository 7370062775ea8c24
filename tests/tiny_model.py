"""A real Llama chat model of 2 MB that says nothing sensible: `tiny_gguf(path)` writes it.

The same bytes each time, ready in 0.2 s in llama.cpp. The vocabulary is all 256 bytes plus whole
words, and the output head prefers the words: the answers are readable, valid UTF-8 word salad, good
enough for streaming, token counts, stop strings and lengths. For tests of agent, router and CLI.
"""

from __future__ import annotations

import array
import hashlib
import os
import random
import struct
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SHA256 = "4dd2c8a7"
"""How its checksum begins; another one means that the model or the writer changed."""
HIDDEN, HEADS, KV_HEADS, LAYERS, FFN, CONTEXT, SEED = 128, 4, 2, 2, 256, 2048, 7
HEAD = HIDDEN // HEADS
ALIGN = 32
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
PAD, EOS = 0, 2
WORDS = """a about after again all also an and any are as at be because been before but by can cat
come could day did do does dog down each end even every few find first five for four from gateway
get give go good great had has have he her here him his home how I if in into is it its just know
last left like line little long look made make man many may me model more most much must my name
new next no node not now of off old on one only open or other our out over own part people place
queue read right river road said same saw say see she so some still such sun take tell than that
the their them then there these they thing this three time to token tree two under up upon us use
very wait want was water way we well went were what when where which while who why will wind with
word work world would year you young your""".split()  # noqa: SIM905 - 200 quoted words are unreadable
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['content'] is string %}{{ m['content'] }}"
    "{% else %}{% for p in m['content'] or [] %}{{ p['text'] or '' }}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
U32, I32, F32, BOOL, STR, ARR = 4, 5, 6, 7, 8, 9  # GGUF's value types


def byte_alphabet() -> dict[int, str]:
    """GPT-2's table of printable characters for bytes, which byte-level vocabularies use."""
    keep = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = (b for b in range(256) if b not in set(keep))
    return {b: chr(b) for b in keep} | {b: chr(256 + i) for i, b in enumerate(others)}


def vocabulary() -> tuple[list[str], list[str], list[int]]:
    """Tokens in the order of their ids, merges, and the ids of whole words."""
    table = byte_alphabet()
    tokens = SPECIAL + [table[b] for b in range(256)]
    known, merges, words = set(tokens), [], []
    for word in WORDS:
        left, *rest = [table[b] for b in f" {word}".encode()]
        for char in rest:
            if left + char not in known:
                known.add(left + char)
                tokens.append(left + char)
                merges.append(f"{left} {char}")
            left += char
        words.append(left)
    ids = {token: number for number, token in enumerate(tokens)}
    word_ids = [ids[word] for word in words] + [ids[table[ord(c)]] for c in ".,?\n"]
    while len(tokens) % 64:  # engines like padded vocabularies
        tokens.append(f"<|unused{len(tokens)}|>")
    return tokens, merges, word_ids


def rounded(values: list[float]) -> bytes:
    """float32 bytes with the precision of bfloat16: the same numbers as the vLLM twin's."""
    bits = array.array("I", array.array("f", values).tobytes())
    short = (min((b + 0x7FFF + ((b >> 16) & 1)) >> 16, 0xFFFF) for b in bits)
    return array.array("I", (s << 16 for s in short)).tobytes()


def rotated(blob: bytes, rows: int, heads: int) -> bytes:
    """Rows in the interleaved order in which llama.cpp rotates queries and keys."""
    width, d = len(blob) // rows, rows // heads
    row = [blob[i * width : (i + 1) * width] for i in range(rows)]
    order = (h * d + k * (d // 2) + j for h in range(heads) for j in range(d // 2) for k in (0, 1))
    return b"".join(row[i] for i in order)


def tensors(vocab: int, word_ids: list[int]) -> Iterator[tuple[str, tuple[int, ...], bytes]]:
    """Name, shape and float32 bytes of each tensor, drawn in a fixed order."""
    rng = random.Random(SEED)

    def matrix(rows: int, columns: int, std: float) -> bytes:
        return rounded([rng.gauss(0, std) for _ in range(rows * columns)])

    yield "token_embd.weight", (vocab, HIDDEN), matrix(vocab, HIDDEN, 1.0)
    for layer in range(LAYERS):
        p, s = f"blk.{layer}.", HIDDEN**-0.5
        q, kv = HEADS * HEAD, KV_HEADS * HEAD
        yield p + "attn_norm.weight", (HIDDEN,), rounded([1.0] * HIDDEN)
        yield p + "attn_q.weight", (q, HIDDEN), rotated(matrix(q, HIDDEN, s), q, HEADS)
        yield p + "attn_k.weight", (kv, HIDDEN), rotated(matrix(kv, HIDDEN, s), kv, KV_HEADS)
        yield p + "attn_v.weight", (kv, HIDDEN), matrix(kv, HIDDEN, s)
        yield p + "attn_output.weight", (HIDDEN, q), matrix(HIDDEN, q, s)
        yield p + "ffn_norm.weight", (HIDDEN,), rounded([1.0] * HIDDEN)
        yield p + "ffn_gate.weight", (FFN, HIDDEN), matrix(FFN, HIDDEN, s)
        yield p + "ffn_up.weight", (FFN, HIDDEN), matrix(FFN, HIDDEN, s)
        yield p + "ffn_down.weight", (HIDDEN, FFN), matrix(HIDDEN, FFN, FFN**-0.5)
    yield "output_norm.weight", (HIDDEN,), rounded([1.0] * HIDDEN)
    # Words, and weakly the end, get logits of deviation 4, all else 0: sampling stays with words.
    live = dict.fromkeys(word_ids, 4.0) | {EOS: 3.0}
    head: list[float] = []
    for token in range(vocab):
        std = live.get(token, 0.0) * HIDDEN**-0.5
        head += [rng.gauss(0, std) if std else 0.0 for _ in range(HIDDEN)]
    yield "output.weight", (vocab, HIDDEN), rounded(head)


def text(value: str) -> bytes:
    """A GGUF string."""
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def packed(kind: int, value: Any) -> bytes:
    """A GGUF value."""
    if kind == STR:
        return text(value)
    if kind == ARR:
        item, items = value
        return struct.pack("<IQ", item, len(items)) + b"".join(packed(item, i) for i in items)
    return struct.pack({U32: "<I", I32: "<i", F32: "<f", BOOL: "<?"}[kind], value)


def metadata(tokens: list[str], merges: list[str]) -> list[tuple[str, int, Any]]:
    """GGUF's keys: sizes, tokenizer and chat template."""
    kinds = [3 if token.startswith("<|") else 1 for token in tokens]
    return [
        ("general.architecture", STR, "llama"),
        ("general.name", STR, "llmgw-tiny"),
        ("general.file_type", U32, 0),
        ("general.alignment", U32, ALIGN),
        ("llama.vocab_size", U32, len(tokens)),
        ("llama.context_length", U32, CONTEXT),
        ("llama.embedding_length", U32, HIDDEN),
        ("llama.block_count", U32, LAYERS),
        ("llama.feed_forward_length", U32, FFN),
        ("llama.attention.head_count", U32, HEADS),
        ("llama.attention.head_count_kv", U32, KV_HEADS),
        ("llama.attention.layer_norm_rms_epsilon", F32, 1e-5),
        ("llama.rope.freq_base", F32, 10000.0),
        ("llama.rope.dimension_count", U32, HEAD),
        ("tokenizer.ggml.model", STR, "gpt2"),
        ("tokenizer.ggml.pre", STR, "gpt-2"),
        ("tokenizer.ggml.tokens", ARR, (STR, tokens)),
        ("tokenizer.ggml.token_type", ARR, (I32, kinds)),
        ("tokenizer.ggml.merges", ARR, (STR, merges)),
        ("tokenizer.ggml.bos_token_id", U32, PAD),
        ("tokenizer.ggml.eos_token_id", U32, EOS),
        ("tokenizer.ggml.padding_token_id", U32, PAD),
        ("tokenizer.ggml.add_bos_token", BOOL, False),
        ("tokenizer.chat_template", STR, CHAT_TEMPLATE),
    ]


def gguf_bytes() -> bytes:
    """The whole file."""
    tokens, merges, word_ids = vocabulary()
    infos, data = b"", b""
    listed = list(tensors(len(tokens), word_ids))
    for name, shape, blob in listed:
        infos += text(name) + struct.pack("<I", len(shape))
        infos += b"".join(struct.pack("<Q", n) for n in reversed(shape))
        infos += struct.pack("<IQ", 0, len(data))
        data += blob + b"\0" * (-len(blob) % ALIGN)
    meta = metadata(tokens, merges)
    head = b"GGUF" + struct.pack("<IQQ", 3, len(listed), len(meta))
    head += b"".join(text(k) + struct.pack("<I", kind) + packed(kind, v) for k, kind, v in meta)
    head += infos
    return head + b"\0" * (-len(head) % ALIGN) + data


def tiny_gguf(path: Path) -> Path:
    """Write the model to `path` unless it lies there already; returns the path."""
    if path.exists():
        return path
    content = gguf_bytes()
    found = hashlib.sha256(content).hexdigest()
    assert found.startswith(SHA256), f"the tiny model changed: its sha256 is {found}"
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_bytes(content)
    temporary.replace(path)
    return path
