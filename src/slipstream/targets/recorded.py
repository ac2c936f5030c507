"""A target whose texts are known: drafts are held along them without a pass of the model."""

from collections.abc import Iterator, Sequence
from copy import copy
from operator import attrgetter
from typing import Any, final

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from slipstream.core.drafter import FINAL
from slipstream.core.kv_cache import KVCache
from slipstream.core.sampling import Sampler, Sampling, rows_of
from slipstream.core.span import Output
from slipstream.core.target import Target
from slipstream.core.tree import Tree, TreeLayout
from slipstream.core.verify import child_with


@final
class RecordedTarget(Target):
    """Texts of a target. A pass returns the recorded features of its nodes and, in place of logits, the
    text's next token, V = 1, which `law` reads. An engine that admits the prompts in order does what decoding
    would do. All else is the recorded target's own.

    Args:
        target: whose texts they are. It passes over each of them once.
        texts: prompts and answers, in the order in which an engine will admit them.
        taps: the features that drafters will read.
        sampling: how each text was made, whose noise drafts may look at; by default at T = 0.

    Attributes:
        tokens: of prompt and answer, right-padded with −1, which no draft matches.
        prompts, lengths: tokens of each prompt, and of prompt and answer.
    """

    def __init__(
        self,
        target: Target,
        texts: Sequence[tuple[Sequence[int], Sequence[int]]],
        taps: tuple[str, ...],
        sampling: Sequence[Sampling] | None = None,
    ) -> None:
        self.target, self.taps = target, taps
        for name in Target.__annotations__:
            setattr(self, name, getattr(target, name))
        self.captures = False
        self.sampling = rows_of(Sampling(), len(texts)) if sampling is None else list(sampling)
        rows = [[*prompt, *answer] for prompt, answer in texts]
        longest = max(map(len, rows)) + 1  # nothing matches past the longest, either
        self.tokens = torch.tensor([row + [-1] * (longest - len(row)) for row in rows], device=self.device)
        self.prompts = torch.tensor([len(prompt) for prompt, _ in texts], device=self.device)
        self.lengths = torch.tensor([len(row) for row in rows], device=self.device)
        features = [target.features([row], taps) for row in rows]
        self._features = torch.cat([F.pad(f, (0, 0, 0, longest - f.shape[1])) for f in features])

    def tapped(self, taps: Sequence[str], at: Any = ()) -> Float[Tensor, "*n F"]:
        """The features of some of the taps, in that order, of all tokens or `at` some; meaningless in the
        padding."""
        features = self._features[at]
        by_tap = dict(zip(self.taps, features.split(self.target.widths(self.taps), -1), strict=True))
        return torch.cat([features[..., :0], *(by_tap[tap] for tap in taps)], -1)

    def part_of(self, taps: Sequence[str]) -> "RecordedTarget":
        """The same texts with some of the taps."""
        part = copy(self)
        part.taps, part._features = tuple(taps), self.tapped(taps)
        return part

    def with_states(self, tap: str, states: Float[Tensor, "B S H"]) -> "RecordedTarget":
        """The same texts with other states at a tap."""
        changed = copy(self)
        at = sum(self.target.widths(self.taps[: self.taps.index(tap)]))
        changed._features = self._features.clone()
        changed._features[..., at : at + states.shape[-1]] = states
        return changed

    def without(self, start: int) -> "RecordedTarget":
        """The texts without their first tokens, which the target reads again, not having seen those."""
        texts = [
            (row[start:prompt].tolist(), row[prompt:length].tolist())
            for row, prompt, length in zip(self.tokens, self.prompts, self.lengths, strict=True)
        ]
        return RecordedTarget(self.target, texts, self.taps, self.sampling)

    def __call__(
        self, tree: Tree, cache: KVCache, taps: Sequence[str] = (), rows: Int[Tensor, "B K"] | None = None
    ) -> Output:
        cache.reserve(tree.rows)
        at = (cache.lengths[:, None] + tree.layout().depths).expand(len(cache.texts), -1)
        at, text = at.clamp(max=self.tokens.shape[1] - 2), cache.texts[:, None]
        wanted = at if rows is None else at.gather(1, rows)
        nexts = self.tokens[text, wanted + 1].float()
        return Output(nexts[..., None], self.tapped(taps, (text, at)) if taps else None, 0.0)

    @staticmethod
    def law(
        tree: Tree,
        node: Int[Tensor, " B"],
        logits: Float[Tensor, "B 1"],
        position: Int[Tensor, " B"],
        sampler: Sampler,
    ) -> tuple[Int[Tensor, " B"], Int[Tensor, " B"]]:
        """The law of a text that is already written: the child that carries its next token."""
        token = logits[:, 0].long()
        child = child_with(tree, node, token)
        return child.where(token >= 0, -1), token.clamp(min=0)  # behind the end; trees may have empty slots

    def answers(self) -> Iterator[tuple[Int[Tensor, " n"], Float[Tensor, "n V"]]]:
        """The tokens of each answer, and the target's logits where each stands."""
        lm_head = self.lm_head()
        texts = zip(self.tokens, self.prompts, self.lengths, self.tapped([FINAL]), strict=True)
        for tokens, start, end, final_states in texts:
            yield tokens[start:end], lm_head(final_states[start - 1 : end - 1])

    @torch.inference_mode()
    def greedy_share(self) -> float:
        """The share of the answers' tokens that are the target's likeliest."""
        likeliest = torch.cat([logits.argmax(-1) == tokens for tokens, logits in self.answers()])
        return int(likeliest.sum()) / len(likeliest)

    def new_cache(self, batch: int, memory: Tensor | None = None) -> KVCache:
        return KVCache(0, batch, self.device)

    read_bytes = 0
    # All else is the recorded target's own.
    place: Any = property(attrgetter("target.place"))
    generation_config: Any = property(attrgetter("target.generation_config"))
    described: Any = property(attrgetter("target.described"))
    values: Any = property(attrgetter("target.values"))
    lm_head: Any = property(attrgetter("target.lm_head"))
    lend_products: Any = property(attrgetter("target.lend_products"))
    widths: Any = property(attrgetter("target.widths"))
    features: Any = property(attrgetter("target.features"))
    rope: Any = property(attrgetter("target.rope"))
    part: Any = property(attrgetter("target.part"))
    trunk: Any = property(attrgetter("target.trunk"))
    states: Any = property(attrgetter("target.states"))
    explain_non_finite: Any = property(attrgetter("target.explain_non_finite"))

    def extend(
        self, tokens: Int[Tensor, "B R"], layout: TreeLayout, cache: KVCache, after: int
    ) -> Float[Tensor, "B R V"]:
        raise NotImplementedError("a record knows nothing of rows beside its texts")
