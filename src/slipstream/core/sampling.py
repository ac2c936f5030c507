"""Sampling: the distribution that decoding must keep, and the draws from it.

`Sampling` holds one row's settings. `Sampler` applies them to a batch, with each row's history, only at nodes
that verification visits: to sort or perturb 49k logits at every node would cost more than the target pass.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from numbers import Integral, Real
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from slipstream.core.device import is_host
from slipstream.core.grammar import Grammar, GrammarState
from slipstream.core.noise import NoiseStream, gumbel, uniform, winner, words

RECENT = 8  # positions of each row whose noise is held
SHORTLIST = 1024  # tokens that top-p looks at before it sorts the whole vocabulary
LARGE = 1e30  # settings above it, or below its inverse, would make scores overflow
Processor = Callable[[Int[Tensor, "1 T"], Float[Tensor, "1 V"]], Float[Tensor, "1 V"]]  # a HF LogitsProcessor


@dataclass(frozen=True)
class Sampling:
    """How one row is sampled: grammar, then in Hugging Face's order penalties, processors, temperature,
    top-k, top-p, min-p, warpers. Raises ValueError for a value of another type or outside its range.

    Attributes:
        temperature: 0 is greedy.
        top_k: keep the k likeliest tokens; 0 keeps all.
        top_p: keep the smallest set of likeliest tokens with at least this mass; in (0, 1].
        min_p: keep tokens that are at least this fraction as likely as the likeliest; in [0, 1).
        repetition_penalty: divides positive logits of tokens seen so far and multiplies negative ones; > 0.
        presence_penalty: subtracted from the logits of tokens in the answer.
        frequency_penalty: subtracted once for every occurrence in the answer.
        seed, row: the key of this row's noise. The rows of a batch share a seed.
        processors: further Hugging Face `LogitsProcessor`s, called with the node's own history.
        warpers: the same after the cuts, for greedy rows too.
        grammar: the texts that the answer may be.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    row: int = 0
    processors: tuple[Processor, ...] = ()
    warpers: tuple[Processor, ...] = ()
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        for name, (kind, ok, allowed) in ALLOWED.items():
            value = getattr(self, name)
            if not (isinstance(value, kind) and not isinstance(value, bool) and ok(value)):
                raise ValueError(f"{name} is {value!r}; it must be {allowed}")
        for name in ("processors", "warpers"):
            if other := [x for x in getattr(self, name) if not callable(x)]:
                raise ValueError(f"{name} holds {other[0]!r}; it must hold Hugging Face LogitsProcessors")
        if not isinstance(self.grammar, Grammar | None):
            raise ValueError(f"grammar is {self.grammar!r}; it must be a Grammar")


def _is_scale(x: Any) -> bool:
    return 1 / LARGE <= x <= LARGE


Allowed = tuple[type, Callable[[Any], bool], str]  # type, range, and the words in which an error gives both
HEAT: Allowed = (Real, lambda x: x == 0 or _is_scale(x), "0 (greedy) or a positive number (1e-30 to 1e30)")
PENALTY: Allowed = (Real, lambda x: abs(x) <= LARGE, "a finite number (up to 1e30), where 0 is off")
KEY: Allowed = (Integral, lambda x: -(2**63) <= x < 2**63, "a 64-bit whole number")
ALLOWED: dict[str, Allowed] = {
    "temperature": HEAT,
    "top_k": (Integral, lambda x: 0 <= x < 2**63, "0 (off) or a positive whole number below 2**63"),
    "top_p": (Real, lambda x: 0 < x <= 1, "in (0, 1], where 1 is off"),
    "min_p": (Real, lambda x: 0 <= x < 1, "in [0, 1), where 0 is off"),
    "repetition_penalty": (Real, _is_scale, "positive (1e-30 to 1e30), where 1 is off"),
    "presence_penalty": PENALTY,
    "frequency_penalty": PENALTY,
    "seed": KEY,
    "row": KEY,
}


class Sampler:
    """B rows of `Sampling` with their histories, which begin with the prompts.

    Every later token passes through `observe` once, when verification accepts it. So the history at each
    node that it visits is that node's own.

    Args:
        vocab: V, the width of the target's logits.
        device: where the logits live.

    Attributes:
        finite: false once a draw of the row had no finite best score.
        temperature: of each row, 0 for a greedy one.
        greedy: all rows have temperature 0.
        grammar_states: of each row, where its history stands in its grammar; None: it has none, or has left
            it.
        remembers: some row's scores depend on its history.
        tempers_only: no row cuts, penalises or processes its scores: its law is a softmax at its temperature.
    """

    def __init__(
        self,
        rows: Sequence[Sampling],
        prompts: Sequence[Sequence[int]],
        vocab: int,
        device: torch.device | str = "cpu",
    ) -> None:
        self.rows, self.vocab, self.device = list(rows), vocab, torch.device(device)
        self.history = [list(prompt) for prompt in prompts]
        self._columns: dict[str, Tensor] = {}  # [B, 1]
        for name, (kind, _, _) in ALLOWED.items():
            dtype = torch.long if kind is Integral else torch.float64
            values = [[getattr(row, name)] for row in self.rows]
            self._columns[name] = torch.tensor(values, dtype=dtype, device=self.device).view(-1, 1)
        self._keys = torch.cat([self._columns["seed"], self._columns["row"]], 1)
        self.temperature: Float[Tensor, "B 1"] = self._columns["temperature"]
        self.finite: Bool[Tensor, " B"] = torch.ones(len(self.rows), dtype=torch.bool, device=self.device)
        self.greedy = all(row.temperature == 0 for row in self.rows)
        self._tempered = any(row.temperature not in (0, 1) for row in self.rows)
        self._cuts = any(row.top_k or row.top_p < 1 or row.min_p for row in self.rows if row.temperature)
        self._processed = any(row.processors or row.warpers for row in self.rows)
        self.grammar_states = [None if row.grammar is None else row.grammar.begin() for row in self.rows]
        self._guided = any(row.grammar for row in self.rows)
        # [B, V]: which tokens stand in prompt or answer, and how often each stands in the answer
        self._seen: tuple[Bool[Tensor, "B V"], Int[Tensor, "B V"]] | None = None
        if any(r.repetition_penalty != 1 or r.presence_penalty or r.frequency_penalty for r in self.rows):
            count = torch.zeros(len(self.rows), vocab, dtype=torch.int32, device=self.device)
            self._seen = count.bool(), count
            for line, prompt in zip(self._seen[0], self.history, strict=True):
                line[torch.tensor(prompt, dtype=torch.long, device=self.device)] = True
        self._recent: list[dict[int, Int[Tensor, " V"]]] = [{} for _ in self.rows]  # words, by position
        self.remembers = self._seen is not None or self._processed or self._guided
        self.tempers_only = not (self._cuts or self.remembers)

    def __len__(self) -> int:
        return len(self.rows)

    def observe(self, tokens: Int[Tensor, " B"], live: Bool[Tensor, " B"]) -> None:
        """Append one token to the history of each live row."""
        if self._seen is not None:
            (occurred, count), at = self._seen, tokens.clamp(min=0)[:, None]
            count.scatter_add_(1, at, live[:, None].int())
            occurred.scatter_(1, at, occurred.gather(1, at) | live[:, None])
        if self._processed or self._guided:
            for row, (token, alive) in enumerate(zip(tokens.tolist(), live.tolist(), strict=True)):
                if alive:
                    self.history[row].append(token)
                    state = self.grammar_states[row]
                    self.grammar_states[row] = state and state.advance(token)

    def scores(
        self,
        logits: Float[Tensor, "B V"],
        slack: float = 0.0,
        states: Sequence[GrammarState | None] | None = None,
        partial: bool = False,
    ) -> Float[Tensor, "B V"]:
        """Log weights of the next token up to a constant, −inf outside the support. For greedy rows they are
        the penalised and processed logits.

        Args:
            slack: an error of the scores. Where positive, all tokens that it may have cut are in the support;
                where negative, those that it may have added are not.
            states: where the rows stand in their grammars, if not behind their histories.
            partial: the logits lack tokens, so processors may leave none.
        """
        if self.greedy and not self.remembers:
            return logits  # whose best are the best in any precision
        x = logits.double()
        if self._guided:
            x = within(x, self.grammar_states if states is None else states)
        if self._seen is not None:
            (occurred, count), penalty = self._seen, self._columns["repetition_penalty"]
            x = torch.where(occurred, torch.where(x > 0, x / penalty, x * penalty), x)
            x = x - self._columns["frequency_penalty"] * count
            x = x - self._columns["presence_penalty"] * (count > 0)
        if self._processed:
            x = self._process(x, "processors", partial)
        if not self.greedy:
            sampled = self.temperature > 0
            if self._tempered:
                x = x / torch.where(sampled, self.temperature, 1.0)
            if self._cuts:
                x = x.masked_fill(sampled & (x < self._threshold(x, slack)), -torch.inf)
        return self._process(x, "warpers", partial) if self._processed else x

    def scores_alone(self, row: int, logits: Float[Tensor, " V"]) -> Float[Tensor, " V"]:
        """The same of one row, if the sampler `tempers_only`."""
        temperature = self.rows[row].temperature
        x = logits if self.greedy else logits.double()
        return x / temperature if temperature not in (0, 1) else x

    def _process(self, x: Float[Tensor, "B V"], which: str, partial: bool) -> Float[Tensor, "B V"]:
        rows = list(x.split(1))
        for b, row in enumerate(self.rows):
            ids = torch.tensor([self.history[b]], dtype=torch.long, device=x.device)
            for processor in getattr(row, which):
                rows[b] = _judged(processor, ids, rows[b], partial)
        return torch.cat(rows)

    def _threshold(self, x: Float[Tensor, "B V"], slack: float) -> Float[Tensor, "B 1"]:
        """The lowest score in the support. Each of the three cuts keeps a set of best tokens."""
        top_k, top_p, min_p = (self._columns[name] for name in ("top_k", "top_p", "min_p"))
        limited = top_k > 0
        # Scores that move by slack / 2 move a set's mass by slack / 4 at most.
        p = torch.where(top_p < 1, top_p + slack / 4, 2.0)
        for width in (SHORTLIST, self.vocab) if is_host(x) else (self.vocab,):
            top = x.topk(min(width, self.vocab)).values
            kth = torch.where(limited, top.gather(1, top_k.clamp(1, top.shape[-1]) - 1), -torch.inf)
            within_k = top.masked_fill(top < kth, -torch.inf)
            total = torch.where(limited, within_k.logsumexp(-1, keepdim=True), x.logsumexp(-1, keepdim=True))
            mass = (within_k - total).exp().cumsum(-1)  # relative to what top-k kept, as in Hugging Face
            enough = torch.where(limited, top_k <= top.shape[-1], (mass[:, -1:] >= p) | (p > 1))
            if width == self.vocab or bool(enough.all()):
                break
        last = (mass < p).sum(-1, keepdim=True).clamp(max=top.shape[-1] - 1)  # the first token that reaches p
        nucleus = torch.where(p <= 1, top.gather(1, last), -torch.inf)
        floor = top[:, :1] + min_p.log()
        return torch.maximum(torch.maximum(kth, nucleus), floor) - slack

    def law(self, logits: Float[Tensor, "B V"]) -> Float[Tensor, "B V"]:
        """The next token's probabilities; all of a greedy row's on its argmax, the lower id in a tie."""
        x = self.scores(logits)
        greedy = torch.zeros_like(x, dtype=torch.float64).scatter_(1, x.argmax(-1, keepdim=True), 1.0)
        return greedy if self.greedy else torch.where(self.temperature > 0, x.softmax(-1), greedy)

    def draw(self, scores: Float[Tensor, "B V"], positions: Int[Tensor, " B"]) -> Int[Tensor, " B"]:
        """argmax(scores + g), the token at each absolute position; g depends on (seed, row, position) alone.
        A row whose best score is not finite is no longer `finite`, and its token has no meaning."""
        if is_host(scores):
            rows = zip(scores, positions.tolist(), strict=True)
            return torch.tensor([self.draw_alone(i, *row) for i, row in enumerate(rows)])
        perturbed = scores if self.greedy else scores + self.noise(positions)
        token = perturbed.argmax(-1)
        finite = perturbed.gather(1, token[:, None])[:, 0].isfinite()
        self.finite.logical_and_(finite)  # in place, so that a captured round updates it
        return token

    def draw_alone(self, row: int, scores: Float[Tensor, " V"], position: int) -> int:
        """The same for one row, on the host."""
        if self.rows[row].temperature == 0:
            token = int(scores.numpy().argmax())  # the lower id in a tie
        else:
            token = winner(scores, self._words(row, position))
        if not math.isfinite(scores[token]):
            self.finite[row] = False
        return token

    def noise(
        self, positions: Int[Tensor, " B"], tokens: Int[Tensor, " n"] | None = None
    ) -> Float[Tensor, "B n"]:
        """The Gumbel noise of `draw`, of some or all tokens; 0 for greedy rows. Under the coupled law a
        drafter may look at it."""
        if is_host(positions):
            bits = torch.stack([self._words(row, at) for row, at in enumerate(positions.tolist())])
        else:
            bits = words(self._keys, NoiseStream.TARGET, positions, self.vocab)
        return gumbel(bits if tokens is None else bits[:, tokens]).mul_(self.temperature > 0)

    def _words(self, row: int, position: int) -> Int[Tensor, " V"]:
        """One row's noise words, cached: drafts ask for the same as verification, and for later positions."""
        held = self._recent[row]
        if position not in held:
            for oldest in list(held)[: max(0, len(held) + 1 - RECENT)]:
                del held[oldest]
            at = torch.tensor([position], device=self.device)
            held[position] = words(self._keys[row : row + 1], NoiseStream.TARGET, at, self.vocab)[0]
        return held[position]

    def uniform(self, stream: NoiseStream, positions: Int[Tensor, " B"], n: int) -> Float[Tensor, "B n"]:
        """Uniforms of another stream than the target's."""
        return uniform(words(self._keys, stream, positions, n))

    def accept(
        self, ratio: Float[Tensor, " B"], positions: Int[Tensor, " B"], sibling: int
    ) -> Bool[Tensor, " B"]:
        """u < ratio, with the `sibling`-th acceptance uniform of the position."""
        return self.uniform(NoiseStream.ACCEPT, positions, sibling + 1)[:, sibling] < ratio

    def select(self, rows: Sequence[int]) -> "Sampler":
        """The sampler of some of the rows, with their histories."""
        return _joined([(self, b) for b in rows], self)

    def join(self, other: "Sampler") -> "Sampler":
        """The sampler of these rows followed by another's."""
        return _joined([(sampler, b) for sampler in (self, other) for b in range(len(sampler))], self)


def _joined(rows: Sequence[tuple[Sampler, int]], like: Sampler) -> Sampler:
    settings, histories = [s.rows[b] for s, b in rows], [s.history[b] for s, b in rows]
    joined = Sampler(settings, histories, like.vocab, like.device)
    for i, (sampler, b) in enumerate(rows):
        if joined._seen is not None and sampler._seen is not None:
            for new, old in zip(joined._seen, sampler._seen, strict=True):
                new[i] = old[b]
        joined.grammar_states[i], joined.finite[i] = sampler.grammar_states[b], sampler.finite[b]
    return joined


def within(x: Float[Tensor, "n V"], states: Sequence[GrammarState | None]) -> Float[Tensor, "n V"]:
    """Scores of n places, −inf where the grammar of a place forbids a token."""
    rows = list(x.split(1))
    for i, state in enumerate(states):
        if state is not None and (allowed := state.allowed) is not None:
            rows[i] = rows[i].masked_fill(~allowed.to(x.device), -torch.inf)
    return torch.cat(rows)


def _judged(
    processor: Processor, ids: Int[Tensor, "1 T"], x: Float[Tensor, "1 V"], partial: bool
) -> Float[Tensor, "1 V"]:
    """A processor's scores. Raises ValueError for anything else, and where none is left, unless `partial`."""
    scores = processor(ids, x)
    name = getattr(processor, "__name__", type(processor).__name__)
    if not isinstance(scores, Tensor):
        raise ValueError(f"processor {name} returned {type(scores).__name__}; it must return a tensor")
    if scores.shape != x.shape or not scores.is_floating_point():
        result, wanted = f"{scores.dtype} of shape {list(scores.shape)}", list(x.shape)
        raise ValueError(f"processor {name} returned {result}; it must return scores of shape {wanted}")
    best = float(scores.max())  # NaN where one score is NaN
    if x.max() > -torch.inf and math.isnan(best):
        raise ValueError(f"processor {name} made NaN of scores: it must return numbers")
    if x.max() > -torch.inf and best == -torch.inf and not partial:
        raise ValueError(f"processor {name} left no token that may come next: let it allow at least one")
    return scores.double()


def rows_of(sampling: Sampling, n: int) -> list[Sampling]:
    """`n` rows of the same settings, each with noise of its own; the first draws what a single row would."""
    return [replace(sampling, row=sampling.row + i) for i in range(n)]
