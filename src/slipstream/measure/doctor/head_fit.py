"""How well a head's first guesses fit texts of the target, as it is and with something changed.

A head that reads the wrong states, or stands them at the wrong positions, guesses worse than it was trained
to. Each change that may undo such a fault is tried on the same texts, token by token, so that a small gain
shows in a few hundred of them.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass, field, replace
from math import sqrt
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from slipstream.core.drafter import FINAL, INPUT
from slipstream.core.target import Target
from slipstream.core.tree_spec import TreeSpec
from slipstream.drafters.heads import HeadDrafter
from slipstream.drafters.layers import Attention, Rope
from slipstream.engine.replay import one_by_one, steps
from slipstream.provenance import suggested
from slipstream.targets.recorded import RecordedTarget

LEAST = -12.0  # of a log probability: what is no candidate costs so much
GAIN, SURE = 0.1, 4.0  # a change undoes a fault if it gains so many nats a token, so many standard errors
BASES = (1e4, 1e5, 5e5, 1e6)  # of rotary positions, in public models
ONE = TreeSpec.parse("chain-1")


@dataclass(frozen=True)
class Fit:
    """First guesses from every token of recorded answers.

    Attributes:
        before, right, after: log probability of the token that is there already, of the next, which a draft
            should say, and of the one behind it. NaN: outside the draft vocabulary or past the text's end.
        likeliest: whether the first guess is the next token.
        at: position of the next token.
    """

    before: Float[Tensor, " n"]
    right: Float[Tensor, " n"]
    after: Float[Tensor, " n"]
    likeliest: Float[Tensor, " n"]
    at: Int[Tensor, " n"]

    @property
    def hits(self) -> float:
        """The share of first guesses that are right, of tokens that the draft vocabulary holds; 0 where it
        holds none."""
        return float(self._known.mean()) if len(self._known) else 0.0

    @property
    def _known(self) -> Float[Tensor, " m"]:
        return self.likeliest[~self.right.isnan()]


@dataclass(frozen=True)
class Gain:
    """What a change brings: nats a token, and in standard errors."""

    nats: float
    errors: float

    @classmethod
    def of(cls, changed: Float[Tensor, " n"], given: Float[Tensor, " n"]) -> "Gain":
        """Over the tokens that both know."""
        won = changed - given
        won = won[~won.isnan()]
        if len(won) < 2:
            return cls(0.0, 0.0)
        return cls(float(won.mean()), float(won.mean() / (won.std() / sqrt(len(won))).clamp(min=1e-9)))

    @property
    def sure(self) -> bool:
        """Whether it is no accident."""
        return self.nats > GAIN and self.errors > SURE


def fit(head: HeadDrafter, recorded: RecordedTarget) -> Fit:
    """A head's first guesses along a record. No guess is accepted, so that there is one at every token."""
    made, seen = copy(head), list[Tensor]()

    def scores(hidden: Tensor) -> Tensor:
        seen.append(head.logits(hidden))
        return seen[-1]

    made.scores = scores  # type: ignore[method-assign]
    made.grow_as(ONE)
    place = torch.full((made.width + 1,), -1, device=recorded.device)
    place[made.vocab] = torch.arange(len(made.vocab), device=recorded.device)
    last, parts = recorded.tokens.shape[1] - 1, list[Tensor]()
    for engine in steps(made, recorded, one_by_one, ONE):
        span, law = engine.span, seen.pop()[:, 0].log_softmax(-1)
        assert span is not None
        columns = []
        for ahead in range(3):
            tokens = recorded.tokens[engine.cache.texts, (span.start + ahead).clamp(max=last)]
            index = place[tokens]  # −1, past the end, finds the spare place
            log_q = law.gather(1, index.clamp(min=0)[:, None])[:, 0].clamp(min=LEAST)
            columns.append(log_q.masked_fill(index < 0, torch.nan))
            if ahead == 1:
                likeliest = law.argmax(1) == index
        parts.append(torch.stack([*columns, likeliest.to(law), (span.start + 1).to(law)], 1).double())
        seen.clear()
    before, right, after, hits, at = torch.cat(parts).unbind(1)
    return Fit(before, right, after, hits, at.long())


@dataclass(frozen=True)
class Change:
    """Something that may undo a fault: other states to read, or a module that is exchanged meanwhile.

    Attributes:
        fault: the check that it belongs to.
        name: what is changed, in words.
        remedy: how to keep it so.
    """

    fault: str
    name: str
    remedy: str
    head: HeadDrafter
    recorded: RecordedTarget
    meanwhile: Callable[[], AbstractContextManager[Any]] = field(default=nullcontext)

    def fit(self) -> Fit:
        with self.meanwhile():
            return fit(self.head, self.recorded)


def changes(head: HeadDrafter, recorded: RecordedTarget, target: Target) -> Iterator[Change]:
    """All changes that fit this head."""
    plain = recorded.part_of(head.taps)
    for taps in shifted(head.taps, target.sizes.blocks):
        moved = copy(head)
        moved.taps = taps
        remedy = f'in config.json of the drafter: "taps": {json.dumps(taps)}'
        yield Change("tap", f"it reads {', '.join(taps)}", remedy, moved, recorded)
    for name, states in _normed(head, recorded, target):
        remedy = (
            f"give it {name}: import it again ({suggested('import')}), or train it on this target's states"
        )
        yield Change("norm", name, remedy, head, plain.with_states(FINAL, states))
    own: Any = getattr(head.head, "norm", None)
    theirs = final_norm(target)
    if own is not None and theirs is not None and own.weight.shape == theirs.weight.shape:
        remedy = "import the head with its norm.weight, or copy the target's own into its model.safetensors"
        lent = lambda: _weights(own, theirs)  # noqa: E731
        yield Change("norm", "the target's final norm before its LM head", remedy, head, recorded, lent)
    yield from _ropes(head, recorded, target)


def shifted(taps: Sequence[str], blocks: int) -> list[tuple[str, ...]]:
    """The taps one block down and up: those at blocks alone, and all of them; the final state stands behind
    the last block."""
    found = []
    for step in (-1, 1):
        for final_too in (False, True):
            moved = []
            for tap in taps:
                number = blocks if tap == FINAL else int(tap.removeprefix(INPUT)) if INPUT in tap else None
                if number is None or (tap == FINAL and not final_too):
                    moved.append(tap)
                else:
                    to = min(max(number + step, 0), blocks)
                    moved.append(FINAL if to == blocks else f"{INPUT}{to}")
            found.append(tuple(moved))
    return [each for each in dict.fromkeys(found) if each != tuple(taps) and len({*each}) == len(taps)]


def final_norm(target: Target) -> Any:
    """The module that makes the final states of the last block's, if it is a norm."""
    between = [each for each in target.trunk()["between"].modules() if "norm" in type(each).__name__.lower()]
    return between[-1] if between else None


def _normed(
    head: HeadDrafter, recorded: RecordedTarget, target: Target
) -> Iterator[tuple[str, Float[Tensor, "B S H"]]]:
    """Final states before the norm, and normed once more."""
    norm = final_norm(target)
    if norm is None or FINAL not in head.taps:
        return
    yield "the last block's states, before the final norm", _unnormed(recorded, target)
    with torch.inference_mode():
        yield "the final norm applied to the states that it reads", norm(recorded.tapped((FINAL,)))


def _unnormed(recorded: RecordedTarget, target: Target) -> Float[Tensor, "B S H"]:
    """What the last block says of the recorded texts."""
    blocks: Any = target.trunk()["blocks"]
    last: nn.Module = blocks[-1]
    said: list[Tensor] = []

    def keep(module: nn.Module, given: Any, says: Any) -> None:
        said.append(says[0] if isinstance(says, tuple) else says)

    states = torch.zeros_like(recorded.tapped((FINAL,)))
    hook = last.register_forward_hook(keep)
    try:
        for row, (tokens, length) in enumerate(zip(recorded.tokens, recorded.lengths.tolist(), strict=True)):
            said.clear()
            target.features([tokens[:length].tolist()], (FINAL,))
            states[row, :length] = said[-1][0]
    finally:
        hook.remove()
    return states


@contextmanager
def _weights(module: Any, other: Any) -> Iterator[None]:
    """A module with another's weights, for as long as this lasts."""
    kept = module.weight
    module.weight = nn.Parameter(other.weight.detach().to(kept), requires_grad=False)
    try:
        yield
    finally:
        module.weight = kept


def _ropes(head: HeadDrafter, recorded: RecordedTarget, target: Target) -> Iterator[Change]:
    attentions = [each for each in head.head.modules() if isinstance(each, Attention)]
    if not attentions:
        return
    config, own = head.head.config, attentions[0].rope
    frequencies, factor = target.rope(0)
    tried = {target.sizes.rope_theta: Rope(frequencies, factor)} if len(frequencies) else {}
    tried |= {base: Rope.of(replace(config, rope_theta=base)) for base in BASES if base not in tried}
    for base, rope in tried.items():
        if len(rope.frequencies) != len(own.frequencies) or torch.allclose(
            rope.frequencies.cpu(), own.frequencies.cpu(), rtol=1e-3
        ):
            continue
        remedy = f'in config.json of the drafter, head: "rope_theta": {base:.1f}'
        name = f"rotary positions of base {base:,.0f}"
        yield Change("rope", name, remedy, head, recorded, lambda rope=rope: _turned(attentions, rope))  # type: ignore[misc]


@contextmanager
def _turned(attentions: Sequence[Attention], rope: Rope) -> Iterator[None]:
    """Other rotary positions, for as long as this lasts."""
    kept = [each.rope for each in attentions]
    for each in attentions:
        each.rope = rope
    try:
        yield
    finally:
        for each, own in zip(attentions, kept, strict=True):
            each.rope = own
