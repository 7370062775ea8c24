"""GGUF and safetensors headers: sums that are exact, damage that is told, bounds that hold."""

from __future__ import annotations

import io
import json
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.probes import gguf, safetensors_header
from agent.probes.gguf import MAX_HEADER, parse_gguf, read_gguf
from agent.probes.gguf_config import as_config, quantization
from agent.probes.gguf_types import TENSOR_TYPES
from agent.probes.model_facts import model_facts
from agent.probes.safetensors_header import Tensors, parameters, parse_header, read_header

LAYOUT = {4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q"}


def string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def value(kind: int, given_value) -> bytes:
    if kind == 8:
        return string(given_value)
    if kind == 9:
        inner, items = given_value
        return struct.pack("<IQ", inner, len(items)) + b"".join(value(inner, i) for i in items)
    return struct.pack(LAYOUT[kind], given_value)


def make(meta: dict, tensors: list, *, version: int = 3, data: bool = True) -> bytes:
    """A GGUF file. `meta` is key -> (type, value), `tensors` are (name, shape, type)."""
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(meta))
    for key, (kind, given_value) in meta.items():
        head += string(key) + struct.pack("<I", kind) + value(kind, given_value)
    offset = 0
    for name, shape, kind in tensors:
        head += string(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
        head += struct.pack("<IQ", kind, offset)
        _, block, held = TENSOR_TYPES[kind]
        size = 1
        for length in shape:
            size *= length
        offset += -(-(size // block * held) // 32) * 32
    head += b"\0" * (-len(head) % 32)
    return head + (b"\0" * offset if data else b"")


META = {
    "general.architecture": (8, "llama"),
    "general.file_type": (4, 15),
    "llama.block_count": (4, 2),
    "llama.embedding_length": (4, 256),
    "llama.attention.head_count": (4, 4),
    "llama.attention.head_count_kv": (4, 2),
    "llama.context_length": (4, 8192),
    "tokenizer.ggml.tokens": (9, (8, ["a", "b", "c"])),
    "tokenizer.chat_template": (8, "x" * 5000),
}
TENSORS = [
    ("token_embd.weight", [256, 3], 14),
    ("blk.9.ffn_up_exps.weight", [256, 4, 2], 12),
    ("blk.1.attn_norm.weight", [256], 0),
]


def parse(data: bytes, size: int | None = None) -> gguf.Gguf:
    return parse_gguf(io.BytesIO(data), len(data) if size is None else size)


def facts(meta: dict, tensors: list = TENSORS) -> dict:
    return model_facts(as_config(parse(make(meta, tensors))))


def test_sums_and_facts_of_a_small_file():
    data = make(META, TENSORS)
    found = parse(data)
    assert (found.error, found.cut, found.tensors) == (None, None, 3)
    assert found.parameters == 256 * 3 + 256 * 8 + 256
    assert found.types == {"Q6_K": 3 * 210, "Q4_K": 8 * 144, "F32": 1024}
    assert found.bytes == sum(found.types.values())
    assert found.expert_bytes == 8 * 144
    assert "tokenizer.chat_template" not in found.meta
    assert quantization(found)["name"] == "Q4_K_M"
    config = model_facts(as_config(found))
    assert (config["layers"], config["head_dim"], config["vocab_size"]) == (2, 64, 3)
    assert config["kv_bytes_per_token"] == 2 * 2 * (64 + 64) * 2
    assert config["tie_word_embeddings"] is True


def test_captured_header_of_llama_8b_in_our_own_bytes(captures):
    """The capture is a header as JSON: written as a file again, the sums are its own totals."""
    path = captures / "models/gguf-llama-3.1-8b-instruct-q8_0.header.json"
    capture = json.loads(path.read_text())
    meta = {}
    for item in capture["header"]["metadataKV"]:
        kind, held = item["valueType"], item["value"]
        if kind == 9:
            held = (8, ["t"] * 5)  # the capture has only the sizes of its arrays
        meta[item["key"]] = (kind, held)
    tensors = [(t["name"], t["dimensions"], t["type"]) for t in capture["tensorInfos"]]
    data = make(meta, tensors, data=False)
    found = parse(data, len(data) + capture["modelSize"])
    assert found.error is None
    assert found.cut is None
    assert found.parameters == capture["modelParameters"] == 8_030_261_312
    assert found.size == len(data) + capture["modelSize"]
    assert found.tensors == 292
    assert parse(data, len(data) + capture["modelSize"] - 1).cut is not None
    config = model_facts(as_config(found))
    assert (config["layers"], config["kv_heads"], config["max_length"]) == (32, 8, 131_072)
    assert config["kv_bytes_per_token"] == 131_072
    assert config["vocab_size"] == 128_256
    assert quantization(found) == {"method": "gguf", "name": "Q8_0", "bits": 8.5}


def arch(name: str, **more) -> dict:
    base = {
        "general.architecture": (8, name),
        f"{name}.block_count": (4, 12),
        f"{name}.embedding_length": (4, 256),
        f"{name}.attention.head_count": (4, 4),
        f"{name}.attention.head_count_kv": (4, 2),
    }
    return base | {f"{name}.{key.replace('__', '.')}": given for key, given in more.items()}


def test_layers_of_other_architectures():
    gemma = facts(arch("gemma3", attention__sliding_window=(4, 512)))
    assert gemma["attention"]["layers"] == {"sliding": 10, "full": 2}
    oss = facts(arch("gpt-oss", attention__sliding_window=(4, 128)))
    assert oss["attention"]["layers"] == {"sliding": 6, "full": 6}
    phi = facts(arch("phi3", attention__sliding_window=(4, 2047)))
    assert phi["attention"]["kind"] == "full"
    llama4 = facts(arch("llama4"))
    assert llama4["attention"]["layers"] == {"chunked": 9, "full": 3}
    flags = (9, (7, [True, False] * 6))
    window = {"attention__sliding_window": (4, 64), "attention__sliding_window_pattern": flags}
    listed = facts(arch("x", **window))
    assert listed["attention"]["layers"] == {"sliding": 6, "full": 6}


def test_recurrent_layers_have_no_heads():
    found = facts(arch("lfm2", attention__head_count_kv=(9, (5, [0, 0, 2] * 4))))
    assert found["attention"]["layers"] == {"linear": 8, "full": 4}
    assert found["kv_heads"] == 2
    assert found["attention"]["kv_values_full"] == 4 * 2 * 128


def test_deepseek_is_compressed_only_where_the_file_says_so():
    sizes = {"attention__kv_lora_rank": (4, 512), "rope__dimension_count": (4, 64)}
    heads = {"attention__key_length": (4, 576), "attention__value_length": (4, 512)}
    new = {"attention__key_length_mla": (4, 192), "attention__value_length_mla": (4, 128)}
    found = facts(arch("deepseek2", **sizes, **heads, **new))
    assert found["attention"]["kind"] == "mla"
    assert found["kv_bytes_per_token"] == 12 * 576 * 2
    old = {"attention__key_length": (4, 192), "attention__value_length": (4, 128)}
    found = facts(arch("deepseek2", **sizes, **old))
    assert found["kv_bytes_per_token"] == 12 * 2 * (192 + 128) * 2


def test_draft_layers_are_not_counted():
    found = facts(arch("glm4moe", nextn_predict_layers=(4, 1)))
    assert (found["layers"], found["mtp_layers"]) == (11, 1)


def begun(tensors: int, keys: int, *rest: bytes) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, keys) + b"".join(rest)


KEY = string("k")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"GGML" + b"\0" * 60, "does not start with its four letters"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (make({}, [], version=1), "version 1; versions 2 and 3"),
        (make({}, [], version=9), "version 9"),
        (begun(2**60, 0), "claims"),
        (begun(0, 2**60), "claims"),
        (begun(0, 1, KEY, struct.pack("<I", 77)), "type 77"),
        (begun(0, 1, KEY, struct.pack("<IIQ", 9, 4, 2**62)), "claims an array"),
        (begun(0, 1, KEY, struct.pack("<IIQ", 9, 8, 2**25)), "strings"),
        (begun(0, 1, KEY, struct.pack("<IIQ", 9, 9, 1), struct.pack("<IQ", 9, 1) * 9), "type 9"),
        (begun(1, 0, KEY, struct.pack("<IQIQ", 1, 256, 99, 0)), "unknown type 99"),
        (begun(1, 0, KEY, struct.pack("<IQIQ", 1, 100, 12, 0)), "cannot hold"),
        (begun(1, 0, KEY, struct.pack("<IQIQ", 1, 2**50, 0, 0)), "absurd size"),
        (begun(1, 0, KEY, struct.pack("<I", 2**30)), "dimensions"),
        (make({"general.alignment": (4, 0)}, TENSORS), "alignment"),
    ],
)
def test_files_that_are_refused(data, words):
    found = parse(data)
    assert words in (found.error or "")
    assert found.tensors == 0


def test_every_cut_is_seen():
    data = make(META, TENSORS)
    for length in range(0, len(data), 7):
        found = parse(data[:length])
        assert found.cut is not None, length
        assert found.error is None
    assert parse(b"").cut is not None


def test_only_the_header_is_read():
    class Counted(io.BytesIO):
        taken = 0

        def read(self, size=-1):
            piece = super().read(size)
            Counted.taken += len(piece)
            return piece

    huge = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + string("k") + struct.pack("<IQ", 8, 2**62)
    found = parse_gguf(Counted(huge + b"\0" * (MAX_HEADER + 2**20)), 2**40)
    assert "more than" in (found.error or "")
    assert Counted.taken <= MAX_HEADER + 2**20


def test_a_directory_or_a_missing_file_is_a_reason(tmp_path):
    assert "cannot be read" in (read_gguf(tmp_path).error or "")
    assert "cannot be read" in (read_header(tmp_path / "none").error or "")


@settings(max_examples=250, deadline=None)
@given(st.data())
def test_damaged_gguf_never_raises(data):
    good = make(META, TENSORS)
    header = len(make(META, TENSORS, data=False))
    bad = bytearray(good)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, header - 1))
        bad[at] = data.draw(st.integers(0, 255))
    found = parse(bytes(bad[: data.draw(st.integers(0, len(bad)))]))
    if found.error is None and found.cut is None:
        found_facts = model_facts(as_config(found)) | {"quantization": quantization(found)}
        json.dumps(found_facts, allow_nan=False).encode()


# safetensors


def shard(tensors: dict, data: int | None = None) -> bytes:
    head = json.dumps(tensors).encode()
    end = max((t["data_offsets"][1] for t in tensors.values() if "data_offsets" in t), default=0)
    return struct.pack("<Q", len(head)) + head + b"\0" * (end if data is None else data)


def tensor(dtype: str, shape: list[int], begin: int, end: int) -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


GOOD = {
    "__metadata__": {"format": "pt"},
    "model.layers.0.mlp.experts.1.up_proj.weight": tensor("BF16", [4, 8], 0, 64),
    "model.norm.weight": tensor("F32", [8], 64, 96),
}


def header(data: bytes) -> Tensors:
    file = io.BytesIO(data)
    return parse_header(file.read(8), len(data), file.read)


def test_sums_of_a_safetensors_header():
    found = header(shard(GOOD))
    assert found == Tensors(2, 96, 64, {"BF16": 32, "F32": 8})
    assert safetensors_header.main_dtype(found) == "bfloat16"
    assert parameters(found, None) == 40


def test_packed_weights_are_counted_and_scales_are_not():
    quantised = {
        "a.qweight": tensor("I32", [2, 8], 0, 64),
        "a.scales": tensor("F16", [2, 2], 64, 72),
        "a.qzeros": tensor("I32", [2], 72, 80),
        "b.bias": tensor("F16", [4], 80, 88),
    }
    found = header(shard(quantised))
    assert found.bytes == 88
    assert parameters(found, 4) == 16 * 8 + 4


@pytest.mark.parametrize("number", [1, 2])
def test_captured_shards(captures, number):
    path = captures / f"models/tiny-random-PhiModel/model-{number}-of-2.safetensors"
    found = read_header(path)
    assert (found.error, found.cut) == (None, None)
    assert (found.count, found.bytes) == (31, path.stat().st_size - 8 - 2872)
    assert found.elements == {"F32": 46_282}


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (struct.pack("<Q", 2**40) + b"{}", "header would have"),
        (struct.pack("<Q", 0) + b"{}", "header would have"),
        (struct.pack("<Q", 4) + b"[[]]", "is no safetensors file"),
        (struct.pack("<Q", 4) + b"\xff\xff\xff\xff", "is no safetensors file"),
        (struct.pack("<Q", 90_000) + b"[" * 90_000, "is no safetensors file"),
        (shard({"a": {"dtype": "F32"}}), "is not described"),
        (shard({"a": tensor("F32", [2], 0, 4)}), "its size disagree"),
        (shard({"a": tensor("F32", [1], 4, 0)}, 8), "its size disagree"),
        (shard({"a": tensor("F32", [1], 4, 8)}), "overlap or leave gaps"),
        (shard({"a": tensor("F32", [1], 0, 4), "b": tensor("F32", [1], 0, 4)}), "overlap"),
        (shard({"a": tensor("F32", [-1], 0, 4)}, 4), "is not described"),
        (shard({"a": tensor("F32", [True], 0, 4)}, 4), "is not described"),
    ],
)
def test_safetensors_that_are_refused(data, words):
    assert words in (header(data).error or "")


def test_safetensors_that_were_cut_off():
    data = shard(GOOD)
    for length in range(0, len(data), 5):
        assert header(data[:length]).cut is not None, length
    assert header(data).cut is None


@settings(max_examples=250, deadline=None)
@given(st.data())
def test_damaged_safetensors_never_raise(data):
    bad = bytearray(shard(GOOD))
    for _ in range(data.draw(st.integers(1, 4))):
        bad[data.draw(st.integers(0, len(bad) - 1))] = data.draw(st.integers(0, 255))
    found = header(bytes(bad[: data.draw(st.integers(0, len(bad)))]))
    assert found.bytes >= 0
    parameters(found, 4)
