"""What a profile asks of an engine, in numbers: how the model is split and what is cached.

Reads the engine's own arguments (and llama.cpp's environment) as that engine would. What cannot
be read becomes a sentence in `Ask.unclear`: the estimate is then unknown, not wrong.
Called by `fit.py`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from controller.placement.fit_options import Options

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

ENGINES: Final = ("vllm", "sglang", "llamacpp")
"""Those whose memory can be estimated; engine `command` runs what only its user knows."""
VLLM_SHARE: Final = 0.9
SWA_RATIO: Final = 0.8
"""SGLang keeps this part of the full layers' tokens for layers with a window."""
BLOCK: Final = 16
REQUANTIZES: Final = ("bitsandbytes", "torchao")
_OWN_DRAFT: Final = re.compile(r'"method"\s*:\s*"(ngram|suffix|mtp|[a-z0-9_]+_mtp)"')
"""Ways to speculate that need no weights beside the model's own."""


@dataclass(frozen=True, slots=True)
class Ask:
    """How one replica shall run. Parts of the model go to `tp * pp` cards, `dp` times over."""

    engine: str
    tp: int = 1
    pp: int = 1
    dp: int = 1
    attention_tp: int = 1
    """Cards that share one attention; the others have copies of it."""
    expert_cards: int = 1
    """Cards among which routed experts are shared out."""
    expert_parallel: bool = False
    """Experts whole on their cards, not each cut into pieces."""
    context: int | None = None
    """Longest sequence wanted, in tokens; None is the model's own."""
    shortens: bool = False
    """With less memory the engine serves shorter sequences, and starts all the same."""
    sequences: int | None = None
    batched: int | None = None
    """Tokens that one step works on at most."""
    share: float | None = None
    """Part of the card that weights and cache may take; None: SGLang's own, or all of it."""
    share_set: bool = False
    cache_bytes: int | None = None
    """A cache of a fixed size per card."""
    key_bytes: float | None = None
    value_bytes: float | None = None
    """Bytes of a cached value; None is the model's dtype."""
    window_ratio: float | None = None
    hybrid: bool = True
    """Whether layers with a window keep no more than it."""
    block: int = BLOCK
    offload_gib: float = 0.0
    eager: bool = False
    dtype: str | None = None
    gpu_layers: int | None = None
    """llama.cpp: layers on cards; None: it puts there what fits."""
    split: str = "layer"
    heaviest: float | None = None
    """llama.cpp: the largest part that one card gets."""
    cache_on_card: bool = True
    experts_off: int | None = None
    """llama.cpp: layers whose experts stay in host memory."""
    requantizes: str | None = None
    """A method that makes weights of another size while they are loaded."""
    unclear: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Gang:
    """Cards of each node, nodes, and whether one tensor spans them."""

    gpus: int
    shards: int
    wide: bool


def ask(
    engine: str,
    args: Sequence[object],
    env: Mapping[str, object],
    gpus: int,
    shards: int,
    *,
    wide: bool = True,
) -> Ask:
    """What a profile asks for. ``gpus`` is the number of cards of each of ``shards`` nodes.

    Of several nodes the agent makes one tensor (``wide``), or a stage of a pipeline of each,
    depending on what connects them, where the profile does not say.
    """
    if engine not in ENGINES:
        return Ask(engine, unclear=(f"engine {engine} runs what only its user knows",))
    options = Options(args, env)
    gang = Gang(max(gpus, 1), max(shards, 1), wide)
    found = {"vllm": _vllm, "sglang": _sglang, "llamacpp": _llamacpp}[engine](options, gang)
    if engine != "llamacpp" and options.text("--config") is not None:
        options.unclear.append("--config names a file with arguments that only the node can read")
    return replace(found, unclear=tuple(options.unclear))


def _split(
    options: Options, gang: Gang, tp: int | None, pp: int | None, dp: int
) -> tuple[int, int, list[str]]:
    """Cards of a tensor and stages of a pipeline: the agent fills in what is not given."""
    cards = gang.gpus * gang.shards
    if pp is None and gang.shards > 1:
        pp = cards // (tp * dp) if tp else (1 if gang.wide or dp > 1 else gang.shards)
    pp = max(pp or 1, 1)
    tp = max(cards // (pp * dp), 1) if tp is None else tp
    if tp * pp * dp > cards:
        options.unclear.append(
            f"the arguments want {tp * pp * dp} cards (tp {tp}, pp {pp}, dp {dp}) "
            f"and the profile gives {cards}"
        )
    left = cards - tp * pp * dp
    return tp, pp, [f"{left} of {cards} cards stay unused by its arguments"] if left > 0 else []


def _vllm(o: Options, gang: Gang) -> Ask:
    stages = o.whole("--pipeline-parallel-size", "-pp")
    dp = o.one("--data-parallel-size", "-dp")
    tp, pp, notes = _split(o, gang, o.whole("--tensor-parallel-size", "-tp"), stages, dp)
    length = o.text("--max-model-len")
    auto = length in ("auto", "-1")
    share = o.number("--gpu-memory-utilization", least=0.01)
    if share is not None and share > 1:
        o.unclear.append(f"--gpu-memory-utilization {share:g} is more than the whole card")
    method = o.text("--quantization", "-q")
    draft = o.text("--speculative-config", "-sc")
    if draft is not None and not _OWN_DRAFT.search(draft):
        o.unclear.append("--speculative-config may load a draft model of unknown size")
    if o.flag("--enable-lora"):
        notes.append("adapters (--enable-lora) are not counted")
    return Ask(
        "vllm", tp, pp, dp, attention_tp=tp, expert_cards=tp * dp,
        expert_parallel=o.flag("--enable-expert-parallel", "-ep"),
        context=None if auto else o.whole("--max-model-len"), shortens=auto,
        sequences=o.whole("--max-num-seqs"), batched=o.whole("--max-num-batched-tokens"),
        share=share or VLLM_SHARE, share_set=share is not None,
        cache_bytes=o.whole("--kv-cache-memory-bytes", "--kv-cache-memory"),
        value_bytes=o.cached("--kv-cache-dtype"),
        hybrid=not o.flag("--disable-hybrid-kv-cache-manager"), block=o.whole("--block-size")
        or BLOCK, offload_gib=o.number("--cpu-offload-gb", least=0) or 0.0,
        eager=o.flag("--enforce-eager"), dtype=o.text("--dtype"), notes=tuple(notes),
        requantizes=method if method in REQUANTIZES else None,
    )  # fmt: skip


def _sglang(o: Options, gang: Gang) -> Ask:
    stages = o.whole("--pp-size", "--pipeline-parallel-size")
    dp = o.one("--dp-size", "--dp", "--data-parallel-size")
    spread = o.flag("--enable-dp-attention")  # then dp is a part of tp, not beside it
    given = o.whole("--tp-size", "--tp", "--tensor-parallel-size")
    tp, pp, notes = _split(o, gang, given, stages, 1 if spread else dp)
    share = o.number("--mem-fraction-static", least=0.01)
    if share is not None and share > 1:
        o.unclear.append(f"--mem-fraction-static {share:g} is more than the whole card")
    length = o.whole("--context-length")
    if o.text("--speculative-draft-model-path", "--speculative-draft-model") is not None:
        o.unclear.append("--speculative-draft-model-path loads a draft model of unknown size")
    alone, method = o.flag("--disable-hybrid-swa-memory"), o.text("--quantization")
    return Ask(
        "sglang", tp, pp, 1 if spread else dp, attention_tp=max(tp // dp, 1) if spread else tp,
        expert_cards=tp, expert_parallel=o.one("--ep-size", "--ep", "--expert-parallel-size") > 1,
        context=length, shortens=length is None, sequences=o.whole("--max-running-requests"),
        batched=o.whole("--chunked-prefill-size"), share=share, share_set=share is not None,
        value_bytes=o.cached("--kv-cache-dtype"), hybrid=not alone,
        window_ratio=o.number("--swa-full-tokens-ratio", least=0.01) or SWA_RATIO,
        block=o.one("--page-size"), offload_gib=o.number("--cpu-offload-gb", least=0) or 0.0,
        eager=o.flag("--disable-cuda-graph"), dtype=o.text("--dtype"), notes=tuple(notes),
        requantizes=method if method in REQUANTIZES else None,
    )  # fmt: skip


def _llamacpp(o: Options, gang: Gang) -> Ask:
    cards = gang.gpus * gang.shards
    layers = o.text("-ngl", "--gpu-layers", "--n-gpu-layers", "LLAMA_ARG_N_GPU_LAYERS")
    everything = layers in ("all", "-2")
    context = o.whole("-c", "--ctx-size", "LLAMA_ARG_CTX_SIZE", least=0)
    split = o.text("-sm", "--split-mode", "LLAMA_ARG_SPLIT_MODE") or "layer"
    names = ("-ngl", "--gpu-layers", "--n-gpu-layers", "LLAMA_ARG_N_GPU_LAYERS")
    on_cards = None if layers in (None, "auto", "-1") or everything else o.whole(*names, least=0)
    if o.text("-ot", "--override-tensor", "LLAMA_ARG_OVERRIDE_TENSOR") is not None:
        o.unclear.append("--override-tensor places tensors by hand")
    if o.text("-md", "--model-draft", "--spec-draft-model", "LLAMA_ARG_MODEL_DRAFT") is not None:
        o.unclear.append("--model-draft loads a draft model of unknown size")
    off = o.whole("-ncmoe", "--n-cpu-moe", "LLAMA_ARG_N_CPU_MOE", least=0)
    return Ask(
        "llamacpp", tp=1 if split == "none" else cards, context=context or None,
        shortens=not context, sequences=o.whole("-np", "--parallel", "LLAMA_ARG_N_PARALLEL"),
        batched=o.whole("-ub", "--ubatch-size", "LLAMA_ARG_UBATCH"),
        key_bytes=o.cached("-ctk", "--cache-type-k", "LLAMA_ARG_CACHE_TYPE_K") or 2.0,
        value_bytes=o.cached("-ctv", "--cache-type-v", "LLAMA_ARG_CACHE_TYPE_V") or 2.0,
        hybrid=not o.flag("--swa-full", "LLAMA_ARG_SWA_FULL"), block=256,
        gpu_layers=10**6 if everything else on_cards, split=split,
        heaviest=_heaviest(o.text("-ts", "--tensor-split", "LLAMA_ARG_TENSOR_SPLIT"), cards),
        cache_on_card=not o.flag("-nkvo", "--no-kv-offload", "LLAMA_ARG_NO_KV_OFFLOAD"),
        experts_off=10**6 if o.flag("-cmoe", "--cpu-moe", "LLAMA_ARG_CPU_MOE") else off,
    )  # fmt: skip


def _heaviest(split: str | None, cards: int) -> float | None:
    """The largest of proportions such as 3,1; None where they are not given or make no sense."""
    parts = [p for p in re.split(r"[,/]", split or "") if re.fullmatch(r"\d{1,9}(\.\d{1,9})?", p)]
    numbers = [float(part) for part in parts[:cards]]
    return max(numbers) / sum(numbers) if numbers and sum(numbers) > 0 else None
