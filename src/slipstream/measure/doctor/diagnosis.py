"""What `doctor` looks at: a target, a drafter and how they are used, and what was measured of them, each
thing once."""

from collections.abc import Callable, Mapping, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, cycle
from typing import Any, NamedTuple

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
from slipstream.measure.doctor.head_fit import Change, Fit, changes, fit, shifted
from slipstream.measure.doctor.template_check import framing
from slipstream.measure.runner import first_prompts
from slipstream.measure.tune import Costs, acceptance, proposing
from slipstream.spec import Spec
from slipstream.targets import HFTarget
from slipstream.targets.prompts import encode
from slipstream.targets.recorded import RecordedTarget

ROWS = (1, 4, 8, 16, 32, 64)  # of the passes that are timed
BLOCKS, VOCAB = 4, 256  # of the small model whose passes are timed
REPEATS = 7
FRAMED = 4  # questions whose framing is judged
RIGHT = 0.02  # of first guesses: a change that undoes a fault sets right more of them


class Unmeasured(Exception):
    """A check does not apply; the reason."""


class Outcome(NamedTuple):
    """What a check measured."""

    found: bool  # whether it is a fault
    measured: str  # for the table
    normal: str
    cause: str  # in words, if it is one
    remedy: str
    figures: Mapping[str, float | int]  # what was measured, as numbers


@dataclass
class Diagnosis:
    """A target, a drafter by name, how they are used, and what was measured of them."""

    target: HFTarget
    spec: Spec
    questions: Sequence[Question]
    temperature: float = 0.0
    batch: int = 1
    context: int | None = None  # tokens of the texts in use; None: as many as the questions have
    new: int = 32  # tokens of each answer that is looked at
    progress: Callable[[str], None] = lambda _: None
    _costs: dict[int, Costs] = field(default_factory=dict)
    _small: dict[tuple[torch.dtype, bool], HFTarget] = field(default_factory=dict)

    @cached_property
    def drafter(self) -> Drafter:
        return load_drafter(self.spec, self.target, self.temperature, self.batch)

    @cached_property
    def proposer(self) -> Proposer:
        """What grows the trees: the drafter, or the head in it."""
        return _proposer(self.drafter)

    @cached_property
    def config(self) -> Any:
        """The head's config.json; empty where it has none."""
        home = home_of(self.spec, self.target)
        return {} if home is None else read_json(home / "config.json", "drafter's")

    @property
    def training(self) -> Any:
        return self.config.get("training", {})

    @cached_property
    def prompts(self) -> list[list[int]]:
        return first_prompts(self.target, self.questions, self.new)

    @property
    def framed(self) -> list[str]:
        """The questions whose framing is judged."""
        return [question.turns[0].strip() for question in self.questions[:FRAMED]]

    @cached_property
    def framing(self) -> tuple[float | None, dict[str, float]]:
        return framing(self.target, self.framed)

    def long_prompts(self, tokens: int, count: int) -> list[list[int]]:
        """Prompts of so many tokens: questions in a row, of which the last is to be answered."""
        questions, prompts = [question.turns[0] for question in self.questions], list[list[int]]()
        for first in range(min(count, len(questions))):
            following = cycle([*questions[first:], *questions[:first]])
            text = next(following)
            while len(ids := encode(self.target, text)) < tokens:
                text = f"{next(following)}\n\n{text}"
            prompts.append(ids[len(ids) - tokens :])
        return prompts

    def record(self, prompts: Sequence[Sequence[int]], temperature: float = 0.0) -> RecordedTarget:
        """The target's answers, with the states that the head reads and those one block up and down."""
        self.progress(f"T = {temperature:g}: the target answers")
        taps = [self.proposer.taps, *shifted(self.proposer.taps, self.target.sizes.blocks)]
        distinct = tuple(dict.fromkeys(chain(*taps)))
        recorded = record(self.target, prompts, self.new, distinct, 8, temperature)
        recorded.compiles = False  # so that no head of it is compiled
        return recorded

    @cached_property
    def recorded(self) -> RecordedTarget:
        """Answers at T = 0."""
        return self.record(self.prompts)

    @cached_property
    def head(self) -> HeadDrafter:
        """The head, not compiled. Raises Unmeasured for a drafter without one."""
        head = _proposer(load_drafter(self.spec, self.recorded, self.temperature, self.batch))
        if not isinstance(head, HeadDrafter) or head.probes is not None:
            raise Unmeasured("this drafter has no head that reads states")
        return head

    @cached_property
    def fit(self) -> Fit:
        self.progress("the head's guesses along the answers")
        return fit(self.head, self.recorded)

    @cached_property
    def changes(self) -> list[Change]:
        """Every change that may undo a fault."""
        return changes(self.head, self.recorded, self.target, self.fit, self.progress)

    @property
    def cure(self) -> Change | None:
        """The change that gains most, if it gains for sure, and sets first guesses right."""
        best = max(self.changes, key=lambda change: change.gain.nats, default=None)
        helps = best is not None and best.gain.sure and best.fit.hits > self.fit.hits + RIGHT
        return best if helps else None

    @property
    def coverage(self) -> float:
        """The share of the answers' tokens that the draft vocabulary holds."""
        return float((~self.fit.right.isnan()).double().mean())

    @cached_property
    def predicted(self) -> Prediction:
        """What is accepted along the answers of the tree in use; of a head in `auto`, of its largest."""
        self.progress("the tree along the answers")
        return predict(proposing(self.head, "top-k", self.proposer.tree_spec.name), self.recorded)

    @cached_property
    def rates(self) -> list[list[float]]:
        """Acceptance by depth and rank."""
        self.progress("ranks of right guesses")
        return acceptance(self.head, self.recorded, "top-k")

    def costs(self, batch: int) -> Costs:
        """What passes and draft steps of so many texts cost here."""
        if batch not in self._costs:
            self.progress(f"what a pass over rows of {batch} texts costs")
            use = self.prompts, self.new, batch, self.context
            rows = sorted({*ROWS, self.proposer.rows})
            self._costs[batch] = Costs(self.target, self.proposer, *use, rows)
        return self._costs[batch]

    def small_pass(self, dtype: torch.dtype | None = None, compile: bool | None = None) -> float:
        """Seconds of a pass of a model of this target's kind with a few random blocks."""
        dtype, compile = dtype or self.target.dtype, self.target.compiles if compile is None else compile
        if (dtype, compile) not in self._small:
            config: Any = deepcopy(self.target.plain.config.get_text_config(decoder=True))
            config.num_hidden_layers, config.vocab_size = min(BLOCKS, config.num_hidden_layers), VOCAB
            config.pad_token_id = config.bos_token_id = config.eos_token_id = None
            if getattr(config, "layer_types", None):
                config.layer_types = config.layer_types[:BLOCKS]
            model = AutoModelForCausalLM.from_config(config, dtype=dtype).to(self.target.device).eval()
            small = HFTarget(model, None, "a few blocks", compile, quantize=self.target.quantize)
            self._small[dtype, compile] = small
        return pass_seconds(self._small[dtype, compile], (1,), repeats=REPEATS)[1]


def _proposer(drafter: Drafter) -> Proposer:
    """Raises Unmeasured for a drafter that grows no trees of a head."""
    inner = drafter.hybrid if isinstance(drafter, Auto) else drafter
    inner = inner.head if isinstance(inner, Hybrid) else inner
    if not isinstance(inner, Proposer):
        raise Unmeasured("this drafter has no head")
    return copy(inner)
