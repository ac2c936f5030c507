"""Span: what the target has just read: a chunk of a prompt, an accepted path or a training sequence."""

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from slipstream.core.device import is_host
from slipstream.core.kv_cache import KVCache
from slipstream.core.tree import Tree
from slipstream.core.verify import Verdict

Join = Callable[[list[Tensor]], Tensor]


@dataclass(frozen=True)
class Output:
    """One pass of the target over R rows, of which the first N are nodes."""

    logits: Float[Tensor, "B K V"]  # at the requested nodes, float32 (float64 models: float64)
    features: Float[Tensor, "B R F"] | None  # the drafter's taps, side by side; None where it has none
    seconds: float  # spent inside the model, without layout and masks


class Probed(NamedTuple):
    """What the probes behind the last token that hosts any have read."""

    features: Float[Tensor, "B M F"]
    since: Int[Tensor, " B"]  # tokens after that host; −1: no token is a host


@dataclass(frozen=True)
class Span:
    """What the target has just read: T columns in each row, of which the first `count` are real. A row has
    none where a longer prompt of its batch is still being read.

    Attributes:
        tokens: the tokens that were read. Column j stands at position start + j.
        nexts: the token after each; after the last, the target's own choice.
        start, count: number of each text's tokens before this span, and in it.
        cache: the target's cache, which includes these tokens.
        features: the target's taps at each token.
        probed: the taps of probes; `None` where the pass had none.
        tree, path, logits: the pass this span came from, and the accepted slots.
    """

    tokens: Int[Tensor, "B T"]
    nexts: Int[Tensor, "B T"]
    start: Int[Tensor, " B"]
    count: Int[Tensor, " B"]
    cache: KVCache
    features: Float[Tensor, "B T F"] | None = None
    probed: Probed | None = None
    tree: Tree | None = None
    path: Int[Tensor, "B T"] | None = None
    logits: Float[Tensor, "B N V"] | None = None

    @property
    def mask(self) -> Bool[Tensor, "B T"]:
        """Which columns are real."""
        return torch.arange(self.tokens.shape[1], device=self.tokens.device) < self.count[:, None]

    @cached_property
    def root(self) -> Int[Tensor, " B"]:
        """The target's choice behind the last token: the root of the next tree."""
        return self.last(self.nexts)

    @property
    def picks(self) -> Int[Tensor, "B N"]:
        """The target's likeliest token after every node, accepted or not."""
        if self.logits is None:
            raise ValueError("this span comes from a prompt or a data set, which has no tree and so no picks")
        return self.logits.argmax(-1)

    def select(self, rows: Int[Tensor, " R"]) -> "Span":
        """The span of some of the rows, without the pass that it came from."""
        return _span([self], lambda parts: parts[0][rows], self.start[rows], self.count[rows], self.cache)

    def latest(self, n: int) -> "Span":
        """The last n tokens of each row, or all where there are fewer, without the pass that read them."""
        if self.tokens.shape[1] <= n:
            return self
        passed = (self.count - n).clamp(min=0)
        at = passed[:, None] + torch.arange(n, device=passed.device)
        rows = torch.arange(len(at), device=at.device)[:, None]
        start, count = self.start + passed, self.count - passed
        return _span([self], lambda parts: parts[0][rows, at], start, count, self.cache)

    def last(self, x: Tensor) -> Tensor:
        """Row b of `x` [B, T, …] at the last real column, [B, …]; column 0 for a row without any."""
        return x[torch.arange(len(x), device=x.device), (self.count - 1).clamp(min=0)]


def commit(tree: Tree, out: Output, verdict: Verdict, cache: KVCache) -> Span:
    """Keep the accepted path in the cache. Returns what was read."""
    start, path, count = cache.lengths, verdict.path, verdict.count
    rows = torch.arange(len(count), device=count.device)
    cache.keep(None if tree.is_chain else path, count)
    if tree.nodes == 1 and tree.probes is None:
        nexts = verdict.next[:, None]
        return Span(tree.tokens, nexts, start, count, cache, out.features, None, tree, path, out.logits)
    tokens = tree.tokens.gather(1, path)
    nexts = torch.cat([tokens[:, 1:], verdict.next[:, None]], 1)
    nexts[rows, (count - 1).clamp(min=0)] = verdict.next
    features, probed = out.features, None
    if features is not None and tree.probes is not None:
        vectors, hosts = tree.probes
        groups = features[:, tree.nodes :].unflatten(1, (-1, len(vectors)))
        column = torch.arange(path.shape[1], device=rows.device)[:, None]
        hosting = (path[:, :, None] == hosts[:, None]) & (column < count[:, None, None])
        at, group = torch.where(hosting, column, -1).amax(1).max(1)
        probed = Probed(groups[rows, group], torch.where(at < 0, at, count - 1 - at))
    features = None if features is None else features[rows[:, None], path]
    return Span(tokens, nexts, start, count, cache, features, probed, tree, path, out.logits)


def merged(spans: Sequence[Span]) -> Span:
    """What the target has read in several passes over the same rows, in order, as one span without a tree."""
    if len(spans) == 1:
        return spans[0]
    mask = torch.cat([span.mask for span in spans], 1)
    count = mask.sum(1)
    order = (~mask).long().sort(dim=1, stable=True).indices  # each row's real columns first
    if is_host(count):
        order = order[:, : int(count.max())]
    rows, start = torch.arange(len(order), device=order.device)[:, None], spans[0].start
    return _span(spans, lambda parts: torch.cat(parts, 1)[rows, order], start, count, spans[-1].cache)


def beside(span: Span, other: Span) -> Span:
    """The rows of two spans as one without a tree, which are as wide as the wider one."""
    width = max(span.tokens.shape[1], other.tokens.shape[1])

    def stacked(parts: list[Tensor]) -> Tensor:
        wide = [x.new_zeros(len(x), width, *x.shape[2:]) for x in parts]
        for goal, x in zip(wide, parts, strict=True):
            goal[:, : x.shape[1]] = x
        return torch.cat(wide)

    cache = copy(span.cache)
    cache.bound = max(span.cache.bound, other.cache.bound)
    start, count = torch.cat([span.start, other.start]), torch.cat([span.count, other.count])
    return _span([span, other], stacked, start, count, cache)


def _span(spans: Sequence[Span], join: Join, start: Tensor, count: Tensor, cache: KVCache) -> Span:
    """A span without a tree, whose columns `join` makes of those of others."""
    tokens, nexts = join([span.tokens for span in spans]), join([span.nexts for span in spans])
    features = [span.features for span in spans if span.features is not None]
    joined = join(features) if len(features) == len(spans) else None
    return Span(tokens, nexts, start, count, cache, joined)
