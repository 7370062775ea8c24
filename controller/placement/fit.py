"""Whether a model fits on cards: the memory that one card needs, line by line.

Pure. Called by `reconcile/snapshot.py` (for the rule `gpu_fit`) and by the API (`llmgwctl fit`).
The estimate errs high: an engine that dies while it loads costs minutes, a card too many costs
a look at this estimate. What nobody knows makes the answer unknown, never zero.

An engine that takes a share of the card (vLLM, SGLang) fits when weights, overhead and the cache of
ONE sequence of the longest length fit into that share; what is left of it holds more sequences.
So `need_mib` is the memory of the smallest card that would do: one number, whatever the card.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING, Any, Final

from controller.placement import fit_facts, fit_memory
from controller.placement.fit_args import Ask, ask
from controller.placement.fit_memory import LEAST_CONTEXT, Missing
from controller.placement.fit_overhead import MIB, Line, fixed, working

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from controller.placement.fit_facts import Facts

ROUNDS: Final = 8
"""Steps to the smallest card: engines change their defaults a few times as cards grow."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """What one card needs. ``fits`` is None when that is unknown: ``missing`` says why."""

    lines: tuple[Line, ...] = ()
    need_mib: int | None = None
    """Memory of the smallest card that would do."""
    card_mib: int | None = None
    fits: bool | None = None
    strict: bool = True
    """Whether the engine fails on a smaller card; llama.cpp may put less there."""
    fault: str | None = None
    """Why the engine starts on no card at all, whatever its memory."""
    context: int | None = None
    """Tokens of one sequence that the cache must hold."""
    sequences: float | None = None
    """How many such sequences the cache of this card holds at once."""
    tokens: int | None = None
    missing: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def estimate(
    document: Mapping[str, Any] | None,
    *,
    engine: str,
    args: Sequence[object] = (),
    env: Mapping[str, object] | None = None,
    gpus: int = 1,
    shards: int = 1,
    fabric: str = "fabric",
    card_mib: int | None = None,
) -> Estimate:
    """The need of a model with these facts, and whether a card of ``card_mib`` MiB is enough.

    Never raises, whatever the document and the arguments hold.
    """
    facts, asks = fit_facts.read(document), _ways(engine, args, env or {}, gpus, shards, fabric)
    found = [_one(facts, asked, card_mib, max(gpus, 1) * max(shards, 1)) for asked in asks]
    # How nodes will be connected is not known here: of ways that start, the one that needs more.
    return max(found, key=lambda one: (one.fault is None, one.need_mib or 0))


def _ways(
    engine: str,
    args: Sequence[object],
    env: Mapping[str, object],
    gpus: int,
    shards: int,
    fabric: str,
) -> list[Ask]:
    """How the agent may start it: what connects nodes decides how vLLM is cut over several."""
    either = shards > 1 and engine == "vllm" and fabric != "nvlink-domain"
    return [ask(engine, args, env, gpus, shards, wide=w) for w in (True, False)[: 1 + either]]


def _one(f: Facts, asked: Ask, card_mib: int | None, cards: int) -> Estimate:
    missing = asked.unclear or _missing(f, asked, card_mib)
    if missing:
        fault = None if asked.unclear else _uncut(f, asked)
        return Estimate(card_mib=card_mib, fault=fault, missing=missing, notes=asked.notes)
    return _Fit(f, asked, card_mib, cards).estimate()


def uncut(
    document: Mapping[str, Any] | None,
    *,
    engine: str,
    args: Sequence[object] = (),
    env: Mapping[str, object] | None = None,
    gpus: int = 1,
    shards: int = 1,
    fabric: str = "fabric",
) -> str | None:
    """Why the engine starts on no card at all, in no way; None when it does, or nobody knows."""
    facts, asks = fit_facts.read(document), _ways(engine, args, env or {}, gpus, shards, fabric)
    found = [None if asked.unclear else _uncut(facts, asked) for asked in asks]
    return found[0] if None not in found else None


def _uncut(f: Facts, asked: Ask) -> str | None:
    """vLLM and SGLang give each card of a tensor as many heads as every other."""
    if asked.engine == "llamacpp" or not f.heads or f.heads % asked.attention_tp == 0:
        return None
    return f"{f.heads} attention heads cannot be cut into {asked.attention_tp} equal parts"


def _missing(f: Facts, asked: Ask, card_mib: int | None) -> tuple[str, ...]:
    """Every fact that the estimate lacks, each once."""
    batched, at_once = fit_memory.step(asked, card_mib)
    parts: tuple[Callable[[], object], ...] = (
        lambda: fit_memory.weights(f, asked),
        lambda: fit_memory.Cache(f, asked, batched),
        lambda: fit_memory.workspace(f, asked, batched, at_once),
        lambda: fit_memory.known(f.layers, "layers"),
        lambda: asked.shortens or fit_memory.known(asked.context or f.max_length, "max_length"),
    )
    found: dict[str, None] = {}
    for part in parts:
        try:
            part()
        except Missing as lack:
            found[str(lack)] = None
    return tuple(found)


def smallest_card(document: Mapping[str, Any] | None, **how: Any) -> int | None:
    """MiB of the smallest card on which the engine starts; None when unknown or up to the engine.

    ``how`` is what `estimate` takes. Engines use other defaults on larger cards, so the smallest
    card is found from below.
    """
    least = 0
    for _ in range(ROUNDS):
        found = estimate(document, **how, card_mib=least)
        if found.need_mib is None or not found.strict:
            return None
        if found.need_mib <= least:
            break
        least = found.need_mib
    return least


class _Fit:
    """One estimate while it is made."""

    def __init__(self, f: Facts, asked: Ask, card_mib: int | None, cards: int) -> None:
        self.f, self.ask, self.card_mib, self.cards = f, asked, card_mib, cards
        self.cache = fit_memory.Cache(f, asked, fit_memory.step(asked, card_mib)[0])
        self.notes = list(asked.notes)
        self.length = self._length()

    def estimate(self) -> Estimate:
        held = [self._weights(), *fixed(self.ask, self.cards)]
        work = working(self.f, self.ask, self.card_mib)
        # SGLang's share holds weights and cache only; what it computes with comes beside it.
        inside, beside = (held, work) if self.ask.engine == "sglang" else ([*held, *work], [])
        cache = self._cached()
        need = self._need(_sum([*inside, cache]), _sum(beside))
        room = self._room(_sum(inside), _sum(beside))
        one = self.cache.sequence(self.length)
        # llama.cpp makes the cache that was asked for; the others fill their share with it.
        fills = room is not None and one > 0 and self.ask.engine != "llamacpp"
        holds = room / one if room is not None and fills else None
        enough = self.ask.cache_bytes is None or one <= self.ask.cache_bytes
        self._remark(need, enough, one)
        fault = _uncut(self.f, self.ask)
        enough = enough and fault is None
        strict = self.ask.engine != "llamacpp" or self.ask.gpu_layers is not None
        fits = None if self.card_mib is None else enough and (need <= self.card_mib or not strict)
        return Estimate(
            lines=tuple(line for line in (*held[:1], cache, *held[1:], *work) if line.mib),
            need_mib=need, card_mib=self.card_mib, fits=fits, strict=strict, fault=fault,
            context=self.length, sequences=None if holds is None else int(holds * 100) / 100,
            tokens=None if holds is None else int(holds * self.length), notes=tuple(self.notes),
        )  # fmt: skip

    def _length(self) -> int:
        wanted, own = self.ask.context, self.f.max_length
        if self.ask.shortens:
            self.notes.append(
                f"no length is asked for, so {self.ask.engine} serves the longest sequences "
                f"that fit{f', up to {own} tokens' if own else ''}"
            )
            return min(own or LEAST_CONTEXT, wanted or LEAST_CONTEXT, LEAST_CONTEXT)
        return int(fit_memory.known(wanted or own, "max_length"))

    def _weights(self) -> Line:
        a = self.ask
        size = fit_memory.weights(self.f, a) / MIB
        total = (self.f.tensor_bytes or 0) / MIB
        how = [f"{n} {v}" for n, v in (("tp", a.tp), ("pp", a.pp), ("dp", a.dp)) if v > 1]
        split = f" over {' x '.join(how)}" if how else ""
        off = f", {a.offload_gib:g} GiB of it in host memory" if a.offload_gib else ""
        return Line("weights", ceil(size), f"{total / 1024:.2f} GiB of tensors{split}{off}")

    def _cached(self) -> Line:
        each = (self.cache.full + self.cache.windowed) / 1024
        if self.ask.cache_bytes is not None:
            why = "as the arguments fix it"
            return Line("cache", ceil(self.ask.cache_bytes / MIB), why)
        why = f"one sequence of {self.length} tokens, {each:.6g} KiB per token and card"
        if self.cache.windowed:
            why += f" ({self.cache.windowed / 1024:.6g} of it for {self.cache.reach:.0f} tokens)"
        return Line("cache", ceil(self.cache.sequence(self.length) / MIB), why)

    def _share(self) -> float | None:
        """The share that bounds weights and cache; a cache of a fixed size asks for none."""
        return self.ask.share if self.ask.cache_bytes is None else None

    def _need(self, inside: int, beside: int) -> int:
        share = self._share()
        return inside + beside if share is None else max(ceil(inside / share), inside + beside)

    def _room(self, inside: int, beside: int) -> float | None:
        """Bytes for the cache on this card."""
        if self.ask.cache_bytes is not None:
            return self.ask.cache_bytes
        if self.card_mib is None:
            return None
        share = self._share()
        usable = self.card_mib - beside
        usable = usable if share is None else min(int(self.card_mib * share), usable)
        return max(usable - inside, 0) * MIB

    def _remark(self, need: int, enough: bool, one: float) -> None:
        a, own = self.ask, self.f.max_length
        if not enough:
            self.notes.append(
                f"a cache of {(a.cache_bytes or 0) / MIB:.0f} MiB does not hold one sequence of "
                f"{self.length} tokens ({one / MIB:.0f} MiB): give it more or lower the length"
            )
        if own and a.context and a.context > own:
            self.notes.append(f"the model was made for {own} tokens, {a.context} are asked for")
        if a.engine == "llamacpp" and a.gpu_layers is None and need > (self.card_mib or need):
            self.notes.append("llama.cpp leaves to host memory what does not fit (no -ngl is set)")


def _sum(lines: Sequence[Line]) -> int:
    return sum(line.mib for line in lines)
