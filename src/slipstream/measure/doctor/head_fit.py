"""How well a head's first guesses fit texts of the target, as it is and with something changed.

A head that reads the wrong states, or puts them at the wrong positions, guesses worse than it was trained to.
Each change that may undo such a fault is tried on the same texts, token by token, so that a small gain shows
in a few hundred of them.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, replace
from itertools import product
from math import sqrt
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from slipstream.core.drafter import FINAL, INPUT
from slipstream.core.target import Target
from slipstream.core.tree_spec import TreeSpec
from slipstream.drafters.heads import HeadDrafter
from slipstream.drafters.layers import Attention, Rope
from slipstream.engine.replay import one_by_one, steps
from slipstream.provenance import suggested
from slipstream.targets.recorded import RecordedTarget

LEAST = -12.0  # the log probability of a token that is no candidate
GAIN, SURE = 0.1, 4.0  # a change undoes a fault if it gains so many nats a token, so many standard errors
BASES = (1e4, 1e5, 5e5, 1e6)  # of rotary positions, in public models
ONE = TreeSpec.parse("chain-1")


@dataclass(frozen=True)
class Fit:
    """First guesses from every token of recorded answers: log probabilities, NaN outside the draft vocabulary
    or past the text's end."""

    before: Float[Tensor, " n"]  # of the token that is there already
    right: Float[Tensor, " n"]  # of the next one, which a draft should say
    after: Float[Tensor, " n"]  # of the one behind it
    likeliest: Float[Tensor, " n"]  # whether the first guess is the next token

    @property
    def hits(self) -> float:
        """The share of right guesses of the tokens that the draft vocabulary holds; 0 where it holds none."""
        known = self.likeliest[~self.right.isnan()]
        return float(known.mean()) if len(known) else 0.0


class Gain(NamedTuple):
    """What a change brings: nats a token, and in standard errors."""

    nats: float
    errors: float

    @classmethod
    def of(cls, changed: Float[Tensor, " n"], unchanged: Float[Tensor, " n"]) -> "Gain":
        """Over the tokens that both know."""
        gains = changed - unchanged
        gains = gains[~gains.isnan()]
        if len(gains) < 2:
            return cls(0.0, 0.0)
        error = (gains.std() / sqrt(len(gains))).clamp(min=1e-9)
        return cls(float(gains.mean()), float(gains.mean() / error))

    @property
    def sure(self) -> bool:
        """Whether it is no accident."""
        return self.nats > GAIN and self.errors > SURE


def fit(head: HeadDrafter, recorded: RecordedTarget) -> Fit:
    """A head's first guesses along a record. No guess is accepted, so that there is one at every token."""
    probe, logits = copy(head), list[Tensor]()

    def scores(hidden: Tensor) -> Tensor:
        logits.append(head.logits(hidden))
        return logits[-1]

    probe.scores = scores  # type: ignore[method-assign]
    probe.grow_as(ONE)
    index_of = torch.full((probe.width + 1,), -1, device=recorded.device)  # the last: of −1, past the end
    index_of[probe.vocab] = torch.arange(len(probe.vocab), device=recorded.device)
    ahead, parts = torch.arange(3, device=recorded.device), list[Tensor]()
    for engine in steps(probe, recorded, one_by_one, ONE):
        assert engine.span is not None
        log_q = logits.pop()[:, 0].log_softmax(-1)
        logits.clear()
        places = (engine.span.start[:, None] + ahead).clamp(max=recorded.tokens.shape[1] - 1)
        index = index_of[recorded.tokens[engine.cache.texts[:, None], places]]
        known = log_q.gather(1, index.clamp(min=0)).clamp(min=LEAST).masked_fill(index < 0, torch.nan)
        likeliest = (log_q.argmax(1) == index[:, 1]).to(log_q)
        parts.append(torch.cat([known, likeliest[:, None]], 1).double())
    return Fit(*torch.cat(parts).unbind(1))


class Change(NamedTuple):
    """Something that may undo a fault: how well the head fits with it, and what it gains."""

    fault: str  # the check that it belongs to
    name: str  # what is changed, in words
    remedy: str  # how to keep it so
    fit: Fit
    gain: Gain


def changes(
    head: HeadDrafter,
    recorded: RecordedTarget,
    target: Target,
    unchanged: Fit,
    progress: Callable[[str], None],
) -> list[Change]:
    """All changes that suit this head."""
    tried: list[Change] = []

    def attempt(
        fault: str, name: str, remedy: str, head: HeadDrafter = head, recorded: RecordedTarget = recorded
    ) -> None:
        progress(f"the head's guesses if {name}")
        changed = fit(head, recorded)
        tried.append(Change(fault, name, remedy, changed, Gain.of(changed.right, unchanged.right)))

    for taps in shifted(head.taps, target.sizes.blocks):
        moved = copy(head)
        moved.taps = taps
        remedy = f'in config.json of the drafter: "taps": {json.dumps(taps)}'
        attempt("tap", f"it reads {', '.join(taps)}", remedy, moved)

    norm, own = final_norm(target), getattr(head.head, "norm", None)
    if norm is not None and FINAL in head.taps:
        with torch.inference_mode():
            normed = norm(recorded.tapped((FINAL,)))
        for name, states in {
            "the last block's states, before the final norm": unnormed(recorded, target),
            "the final norm applied to the states that it reads": normed,
        }.items():
            again = f"import it again ({suggested('import')}), or train it on this target's states"
            changed = recorded.part_of(head.taps).with_states(FINAL, states)
            attempt("norm", name, f"give it {name}: {again}", recorded=changed)
    if norm is not None and own is not None and own.weight.shape == norm.weight.shape:
        remedy = "import the head with its norm.weight, or copy the target's own into its model.safetensors"
        weight = nn.Parameter(norm.weight.detach().to(own.weight), requires_grad=False)
        with _swapped([own], "weight", weight):
            attempt("norm", "the target's final norm before its LM head", remedy)

    for base, rope in _ropes(head, target).items():
        remedy = f'in config.json of the drafter, head: "rope_theta": {base:.1f}'
        with _swapped(_attentions(head), "rope", rope):
            attempt("rope", f"rotary positions of base {base:,.0f}", remedy)
    return tried


def shifted(taps: Sequence[str], blocks: int) -> list[tuple[str, ...]]:
    """The taps one block down and up: those at blocks alone, and all of them. The final state comes from the
    last block."""

    def moved(tap: str, step: int, final_too: bool) -> str:
        if not (INPUT in tap or (tap == FINAL and final_too)):
            return tap
        block = blocks if tap == FINAL else int(tap.removeprefix(INPUT))
        block = min(max(block + step, 0), blocks)
        return FINAL if block == blocks else f"{INPUT}{block}"

    ways = product((-1, 1), (False, True))
    every = [tuple(moved(tap, *way) for tap in taps) for way in ways]
    return [other for other in dict.fromkeys(every) if other != tuple(taps) and len({*other}) == len(taps)]


def final_norm(target: Target) -> Any:
    """The module that makes the final states of the last block's, if it is a norm."""
    between = target.trunk()["between"].modules()
    norms = [module for module in between if "norm" in type(module).__name__.lower()]
    return norms[-1] if norms else None


def unnormed(recorded: RecordedTarget, target: Target) -> Float[Tensor, "B S H"]:
    """The last block's states of the recorded texts."""
    blocks: Any = target.trunk()["blocks"]
    outputs: list[Any] = []
    states = torch.zeros_like(recorded.tapped((FINAL,)))
    hook = blocks[-1].register_forward_hook(lambda module, inputs, output: outputs.append(output))
    try:
        for row, (tokens, length) in enumerate(zip(recorded.tokens, recorded.lengths.tolist(), strict=True)):
            target.features([tokens[:length].tolist()], (FINAL,))
            output = outputs.pop()
            states[row, :length] = (output[0] if isinstance(output, tuple) else output)[0]
    finally:
        hook.remove()
    return states


def _attentions(head: HeadDrafter) -> list[Attention]:
    return [module for module in head.head.modules() if isinstance(module, Attention)]


def _ropes(head: HeadDrafter, target: Target) -> dict[float, Rope]:
    """By base: the target's rotary positions and those of public models, where the head's are others."""
    attentions = _attentions(head)
    if not attentions:
        return {}
    own = attentions[0].rope.frequencies.cpu()
    config, (frequencies, factor) = head.head.config, target.rope(0)
    ropes = {target.sizes.rope_theta: Rope(frequencies, factor)} if len(frequencies) else {}
    ropes |= {base: Rope.of(replace(config, rope_theta=base)) for base in BASES if base not in ropes}
    return {
        base: rope
        for base, rope in ropes.items()
        if len(rope.frequencies) == len(own) and not torch.allclose(rope.frequencies.cpu(), own, rtol=1e-3)
    }


@contextmanager
def _swapped(modules: Sequence[Any], name: str, value: Any) -> Iterator[None]:
    """Modules with another attribute, for as long as this lasts."""
    before = [getattr(module, name) for module in modules]
    for module in modules:
        setattr(module, name, value)
    try:
        yield
    finally:
        for module, own in zip(modules, before, strict=True):
            setattr(module, name, own)
