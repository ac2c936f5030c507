"""What `doctor` looks at: a target, a drafter and how they are used, and what was measured of them, each
thing once."""

import os
from collections.abc import Callable, Mapping, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass
from functools import cached_property
from itertools import cycle
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from slipstream.core.drafter import Drafter
from slipstream.drafters import load_drafter
from slipstream.drafters.auto import Auto
from slipstream.drafters.drafter_cache import home_of
from slipstream.drafters.heads import HeadDrafter
from slipstream.drafters.hybrid import Hybrid
from slipstream.drafters.proposer import Proposer
from slipstream.engine.replay import Prediction, predict, record
from slipstream.files import read_json
from slipstream.measure.cost import pass_seconds
from slipstream.measure.datasets import Question
from slipstream.measure.doctor.head_fit import Change, Fit, Gain, changes, fit, shifted
from slipstream.measure.doctor.template_check import Framing, framing
from slipstream.measure.runner import first_prompts
from slipstream.measure.tune import Costs, acceptance, proposing
from slipstream.spec import Spec
from slipstream.targets import HFTarget
from slipstream.targets.prompts import encode
from slipstream.targets.recorded import RecordedTarget

ROWS = (1, 4, 8, 16, 32, 64)  # of the passes that are timed
BLOCKS, VOCAB = 4, 256  # of the small model whose passes are timed
REPEATS = 7
ASKED = 4  # questions whose framing is judged
RIGHT = 0.02  # of first guesses: a change that undoes a fault sets right more of them


class Unmeasured(Exception):
    """A check does not apply; the reason."""


@dataclass(frozen=True)
class Seen:
    """What a check measured.

    Attributes:
        found: whether it is a fault.
        measured, normal: for the table.
        cause, remedy: in words, if it is one.
        figures: what was measured, as numbers.
    """

    found: bool
    measured: str
    normal: str
    cause: str
    remedy: str
    figures: Mapping[str, float | int]


@dataclass(frozen=True)
class Tried:
    """A change, how well the head fits with it, and what it gains."""

    change: Change
    fit: Fit
    gain: Gain


@dataclass
class Patient:
    """A target, a drafter by name, and how they are used.

    Attributes:
        context: tokens of the texts in use; None: as many as the questions have.
        new: tokens of each answer that is looked at.
    """

    target: HFTarget
    spec: Spec
    questions: Sequence[Question]
    temperature: float = 0.0
    batch: int = 1
    context: int | None = None
    new: int = 32
    progress: Callable[[str], None] = lambda _: None

    @cached_property
    def drafter(self) -> Drafter:
        return load_drafter(self.spec, self.target, self.temperature, self.batch)

    @cached_property
    def grower(self) -> Proposer:
        """What grows the trees: the drafter, or the head in it."""
        return _grower(self.drafter)

    @property
    def chooses(self) -> bool:
        """Whether the drafter takes another tree in every round."""
        return bool(self.drafter.rungs)

    @cached_property
    def config(self) -> dict[str, Any]:
        """The head's config.json; empty where it has none."""
        home = home_of(self.spec, self.target)
        return {} if home is None else read_json(home / "config.json", "drafter's")

    @property
    def training(self) -> dict[str, Any]:
        found: dict[str, Any] = self.config.get("training", {})
        return found

    @cached_property
    def promised(self) -> list[float]:
        """Acceptance by depth, as training measured it. Raises Unmeasured where it did not."""
        found: list[float] = self.training.get("predicted", {}).get("acceptance", [])
        if not found:
            raise Unmeasured("its config.json holds no acceptance of its training")
        return found

    @cached_property
    def prompts(self) -> list[list[int]]:
        return first_prompts(self.target, self.questions, self.new)

    @cached_property
    def asked(self) -> list[str]:
        """The questions whose framing is judged."""
        return [question.turns[0].strip() for question in self.questions[:ASKED]]

    @cached_property
    def framing(self) -> Framing:
        return framing(self.target, self.asked)

    def long_prompts(self, tokens: int, count: int) -> list[list[int]]:
        """Prompts of so many tokens: questions one behind the other, of which the last is to be answered."""
        asked, made = [question.turns[0] for question in self.questions], list[list[int]]()
        for first in range(min(count, len(asked))):
            turning = cycle([*asked[first:], *asked[:first]])
            text = next(turning)
            while len(ids := encode(self.target, text)) < tokens:
                text = f"{next(turning)}\n\n{text}"
            made.append(ids[len(ids) - tokens :])
        return made

    @property
    def own_base(self) -> str:
        """The name of the change to the target's own rotary positions."""
        return f"rotary positions of base {self.target.sizes.rope_theta:,.0f}"

    def record(self, prompts: Sequence[Sequence[int]], temperature: float = 0.0) -> RecordedTarget:
        """The target's answers, with the states that the head reads and those one block beside them. Heads
        of the record are not compiled."""
        self.progress(f"T = {temperature:g}: the target answers")
        taps = [self.grower.taps, *shifted(self.grower.taps, self.target.sizes.blocks)]
        every = tuple(dict.fromkeys(tap for some in taps for tap in some))
        made = record(self.target, prompts, self.new, every, 8, temperature)
        made.compiles = False
        return made

    @cached_property
    def recorded(self) -> RecordedTarget:
        """Answers at T = 0."""
        return self.record(self.prompts)

    @cached_property
    def head(self) -> HeadDrafter:
        """The head, not compiled. Raises Unmeasured for a drafter without one."""
        made = _grower(load_drafter(self.spec, self.recorded, self.temperature, self.batch))
        if not isinstance(made, HeadDrafter) or made.probes is not None:
            raise Unmeasured("this drafter has no head that reads states")
        return made

    @cached_property
    def fit(self) -> Fit:
        self.progress("the head's guesses along the answers")
        return fit(self.head, self.recorded)

    @cached_property
    def tried(self) -> list[Tried]:
        """Every change that may undo a fault."""
        tried = []
        for change in changes(self.head, self.recorded, self.target):
            self.progress(f"the head's guesses if {change.name}")
            found = change.fit()
            tried.append(Tried(change, found, Gain.of(found.right, self.fit.right)))
        return tried

    @property
    def undoes(self) -> Tried | None:
        """The change that gains most, if one gains for sure, and first guesses are right more often with
        it."""
        best = max(self.tried, key=lambda each: each.gain.nats, default=None)
        helps = best is not None and best.gain.sure and best.fit.hits > self.fit.hits + RIGHT
        return best if helps else None

    @property
    def coverage(self) -> float:
        """The share of the answers' tokens that the draft vocabulary holds."""
        return float((~self.fit.right.isnan()).double().mean())

    @cached_property
    def drafted(self) -> Prediction:
        """What is accepted along the answers of the tree in use; of a head in `auto`, of its largest."""
        self.progress("the tree along the answers")
        return predict(proposing(self.head, "top-k", self.grower.shape.name), self.recorded)

    @cached_property
    def rates(self) -> list[list[float]]:
        """Acceptance by depth and rank."""
        self.progress("ranks of right guesses")
        return acceptance(self.head, self.recorded, "top-k")

    def costs(self, batch: int) -> Costs:
        """What passes and draft steps of so many texts cost here."""
        if batch not in self._costs:
            self.progress(f"what a pass over rows of {batch} texts costs")
            rows = sorted({*ROWS, self.grower.rows})
            self._costs[batch] = Costs(
                self.target, self.grower, self.prompts, self.new, batch, self.context, rows
            )
        return self._costs[batch]

    @cached_property
    def _costs(self) -> dict[int, Costs]:
        return {}

    def small_pass(self, dtype: torch.dtype | None = None, compile: bool | None = None) -> float:
        """Seconds of a pass of a model of this target's kind with a few random blocks."""
        dtype, compile = dtype or self.target.dtype, self.target.compiles if compile is None else compile
        if (dtype, compile) not in self._small:
            self._small[dtype, compile] = self._made(dtype, compile)
        return pass_seconds(self._small[dtype, compile], (1,), repeats=REPEATS)[1]

    @cached_property
    def _small(self) -> dict[tuple[torch.dtype, bool], HFTarget]:
        return {}

    def _made(self, dtype: torch.dtype, compile: bool) -> HFTarget:
        config: Any = deepcopy(self.target.plain.config.get_text_config(decoder=True))
        config.num_hidden_layers, config.vocab_size = min(BLOCKS, config.num_hidden_layers), VOCAB
        config.pad_token_id = config.bos_token_id = config.eos_token_id = None
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:BLOCKS]
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).to(self.target.device).eval()
        return HFTarget(model, None, "a few blocks", compile, quantize=self.target.quantize)


def cores() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _grower(drafter: Drafter) -> Proposer:
    """Raises Unmeasured for a drafter that grows no trees of a head."""
    made = drafter.hybrid if isinstance(drafter, Auto) else drafter
    made = made.head if isinstance(made, Hybrid) else made
    if not isinstance(made, Proposer):
        raise Unmeasured("this drafter has no head")
    return copy(made)
