"""Predicted τ: drafts along texts whose features are known, held against the text itself. No pass of the
target.

Along the target's own text this is what decoding would do: the walk, the drafts, their cache and the noise
are the same, only the target's answers come from a record.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from slipstream.core.cache import KVCache
from slipstream.core.drafter import FINAL, Drafter
from slipstream.core.grow import Expand
from slipstream.core.sampling import Sampler, Sampling, rows_of
from slipstream.core.shape import Shape
from slipstream.core.span import Output, Span, commit
from slipstream.core.target import Target
from slipstream.core.tree import Tree, chain
from slipstream.core.verify import child_with, verify
from slipstream.decode.generate import Generation, generate
from slipstream.decode.settings import resolve_sampling


@dataclass(frozen=True)
class Record:
    """Texts of the target.

    Attributes:
        tokens: prompt and answer, right-padded with −1, which no draft matches.
        prompts, lengths: tokens of each prompt, and of prompt and answer.
        features: of every token; meaningless in the padding.
        taps, widths: what they are, and how wide each is.
        sampling: how each text was made: its noise, which drafts may look at.
        vocab: V.
    """

    tokens: Int[Tensor, "B S"]
    prompts: Int[Tensor, " B"]
    lengths: Int[Tensor, " B"]
    features: Float[Tensor, "B S F"]
    taps: tuple[str, ...]
    widths: list[int]
    sampling: list[Sampling]
    vocab: int

    @classmethod
    def of(
        cls,
        target: Target,
        prompts: Sequence[Sequence[int]],
        new: int,
        taps: tuple[str, ...],
        batch: int = 32,
        temperature: float = 0.0,
    ) -> "Record":
        """Let the target answer with at most `new` tokens."""
        sampling = resolve_sampling(target, temperature=temperature)
        answered: list[tuple[Generation, Sampling]] = []
        for i in range(0, len(prompts), batch):
            some = prompts[i : i + batch]
            made = generate(target, some, "vanilla", max_new_tokens=new, temperature=temperature)
            answered += zip(made, rows_of(sampling, len(some)), strict=True)
        answered = [(answer, row) for answer, row in answered if len(answer.tokens) > 1]
        if not answered:
            raise ValueError(
                "every prompt is answered by the end token at once: give prompts that the target answers"
            )
        texts = [(answer.prompt, answer.tokens) for answer, _ in answered]
        return cls.along(target, texts, taps, [row for _, row in answered])

    @classmethod
    def along(
        cls,
        target: Target,
        texts: Sequence[tuple[list[int], list[int]]],
        taps: tuple[str, ...],
        sampling: list[Sampling] | None = None,
    ) -> "Record":
        """Of prompts and answers that the target gave before, by default at T = 0."""
        rows = [prompt + answer for prompt, answer in texts]
        width = max(map(len, rows)) + 1  # past the longest, too, nothing matches
        features = torch.cat([_padded(target.features([row], taps), width) for row in rows])
        tokens = torch.tensor([row + [-1] * (width - len(row)) for row in rows])
        lengths, starts = (
            torch.tensor([len(row) for row in rows]),
            torch.tensor([len(prompt) for prompt, _ in texts]),
        )
        at, made_with, widths = target.device, sampling or rows_of(Sampling(), len(rows)), target.widths(taps)
        return cls(
            tokens.to(at), starts.to(at), lengths.to(at), features, taps, widths, made_with, target.vocab
        )

    def tapped(self, taps: Sequence[str]) -> Float[Tensor, "B S F"]:
        """Features of some of the taps, in that order."""
        every = dict(zip(self.taps, self.features.split(self.widths, -1), strict=True))
        return torch.cat([self.features[..., :0], *(every[tap] for tap in taps)], -1)

    @torch.inference_mode()
    def greedy_share(self, target: Target) -> float:
        """The share of the answers' tokens that are the target's likeliest."""
        right, total, lm_head = 0, 0, target.lm_head()
        texts = zip(self.tokens, self.prompts, self.lengths, self.tapped([FINAL]), strict=True)
        for tokens, start, end, final in texts:
            likeliest = lm_head(final[start - 1 : end - 1]).argmax(-1)
            right, total = right + int((likeliest == tokens[start:end]).sum()), total + int(end - start)
        return right / total


@dataclass(frozen=True)
class Prediction:
    """Acceptance over all rounds.

    Attributes:
        committed: tokens of each round, the target's own included; 0 where the text is over.
        depth: of the tree.
    """

    committed: Int[Tensor, "rounds B"]
    depth: int

    @property
    def rounds(self) -> int:
        """Target passes."""
        return int((self.committed > 0).sum())

    @property
    def tau(self) -> float:
        """Tokens a target pass."""
        return int(self.committed.sum()) / self.rounds

    @property
    def acceptance(self) -> list[float]:
        """By depth d: the share of the rounds that accept d drafted tokens or more."""
        return [int((self.committed > d).sum()) / self.rounds for d in range(1, self.depth + 1)]


@torch.inference_mode()
def predict(drafter: Drafter, record: Record) -> Prediction:
    """τ of a drafter along the record, counted as decoding counts it: tokens past an answer's end are none.

    Raises:
        ValueError: the drafter's probes ride in the target's passes, of which there are none here: `decoded`.
    """
    if drafter.probes is not None:
        raise ValueError(
            "this drafter guesses in the target's own passes, which a record does not have: measure it by "
            "bench"
        )
    B = len(record.tokens)
    rows = torch.arange(B, device=record.tokens.device)[:, None]
    sampler = Sampler(record.sampling, [[]] * B, record.vocab, record.tokens.device)
    cache = KVCache(0, B, record.tokens.device)
    state = drafter.start(B, record.tokens.device)
    width = int(record.prompts.max())
    at = torch.arange(width, device=rows.device).expand(B, -1)
    cache.reserve(width)
    cache.keep(None, record.prompts)
    prompt = record.tokens.clamp(min=0)
    tapped = record.tapped(drafter.taps)
    drafter.absorb(
        Span(
            prompt[:, :width],
            prompt[:, 1 : width + 1],
            0 * record.prompts,
            record.prompts,
            cache,
            tapped[rows, at],
        ),
        state,
    )
    accepted: list[Tensor] = []

    def known(
        tree: Tree, node: Tensor, logits: Tensor, position: Tensor, _: Sampler
    ) -> tuple[Tensor, Tensor]:
        """The law of a text that is already written."""
        token = record.tokens.gather(1, position.clamp(max=record.tokens.shape[1] - 1)[:, None])[:, 0]
        return child_with(tree, node, token), token.clamp(min=0)

    while bool((live := cache.lengths + 1 < record.lengths).any()):
        cache.settle(cache.lengths.tolist())
        tree = drafter.propose(state, sampler)
        cache.reserve(tree.rows)
        position = (cache.lengths[:, None] + tree.layout().depths).clamp(max=record.tokens.shape[1] - 1)
        out = Output(tapped.new_zeros(B, tree.nodes, 1), tapped[rows, position.expand(B, -1)], 0.0)
        verdict = verify(tree, out.logits, cache.lengths, sampler, known)
        left = (record.lengths - cache.lengths - 1).clamp(min=0)
        accepted.append(torch.where(live, torch.minimum(verdict.count, left), 0))
        drafter.absorb(commit(tree, out, verdict, cache), state)
    return Prediction(torch.stack(accepted).cpu(), drafter.depth)


def decoded(target: Target, drafter: Drafter, record: Record) -> Prediction:
    """The same by decoding the record's prompts: for a drafter that is the target itself."""
    prompts = [tokens[:n].tolist() for tokens, n in zip(record.tokens, record.prompts, strict=True)]
    new = int((record.lengths - record.prompts).max())
    answers = generate(target, prompts, drafter, max_new_tokens=new, temperature=0.0)
    kept = [torch.tensor([r.kept for r in answer.rounds]) for answer in answers]
    return Prediction(torch.nn.utils.rnn.pad_sequence(kept), drafter.depth)


@dataclass(frozen=True)
class Following(Shape):
    """No tree, but a draft along a record's own text from every position of it, which tells the ranks of its
    tokens."""

    record: Record
    ranks: list[Int[Tensor, "B D"]] = field(default_factory=list)  # `children` where missed, −1 past the end
    confidences: list[Float[Tensor, "B D"]] = field(default_factory=list)  # of the likeliest candidates

    @classmethod
    def along(cls, record: Record, depth: int, children: int) -> "Following":
        """Ranks below `children`, for tokens up to `depth` behind each position."""
        return cls("following", tuple((0,) * d for d in range(1, depth + 1)), depth, 1, 0, children, record)

    def grow(self, root: Int[Tensor, " B"], expand: Expand) -> Tree:
        """A bare root, so that the next draft starts one token further on."""
        at = self.record.prompts + len(self.ranks)
        frontier, found, sure = root[:, None], [], []
        for depth in range(1, self.depth + 1):
            ids, log_q = expand(frontier, torch.zeros_like(frontier))
            sure.append(log_q[:, 0, 0].exp())
            last = self.record.tokens.shape[1] - 1
            frontier = self.record.tokens.gather(1, (at + depth).clamp(max=last)[:, None])
            rank = (ids[:, 0] == frontier).int()
            rank = torch.where(rank.any(1), rank.argmax(1), self.children)
            found.append(torch.where(frontier[:, 0] >= 0, rank, -1))
            frontier = frontier.clamp(min=0)
        self.ranks.append(torch.stack(found, 1))
        self.confidences.append(torch.stack(sure, 1))
        return chain(root[:, None])

    def acceptance(self) -> list[list[float]]:
        """[d][r]: how often the token after an accepted node of depth d is the r-th candidate."""
        ranks = torch.cat(self.ranks)
        rates = []
        for column in ranks.unbind(1):
            counts = torch.bincount(column[column >= 0], minlength=self.children + 1)
            rates.append((counts[:-1] / counts.sum().clamp(min=1)).tolist())
        return rates


def _padded(features: Tensor, width: int) -> Tensor:
    return F.pad(features, (0, 0, 0, width - features.shape[1]))
