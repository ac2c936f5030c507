"""EAGLE's objective: the next feature, and the law that the target's LM head reads off it."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from slipstream.core.drafter import Ends
from slipstream.drafters.eagle import TAPS, Eagle, EagleConfig, EagleHead, config_for
from slipstream.train.data import Example
from slipstream.train.recipe import Loss, Recipe


@dataclass(frozen=True)
class Batch:
    """B sequences of pairs: row i holds (f_i, t_{i+1}), and is to say f_{i+1}, which predicts t_{i+2}.

    Attributes:
        features: f_0 … f_T, noise not yet added.
        nexts: t_1 … t_T.
        counts: t_{i+2} is a token to learn.
    """

    features: Float[Tensor, "B T1 H"]
    nexts: Int[Tensor, "B T"]
    counts: Bool[Tensor, "B T"]

    @classmethod
    def collate(cls, examples: Sequence[Example], features: Sequence[Float[Tensor, "_ H"]], device: Any) -> "Batch":
        """Right-padded; padding counts for nothing, and causality keeps it out of sight."""
        T = max(len(e.tokens) for e in examples) - 2
        nexts, counts = torch.zeros(len(examples), T, dtype=torch.long), torch.zeros(len(examples), T, dtype=torch.bool)
        padded = features[0].new_zeros(len(examples), T + 1, features[0].shape[-1])
        for b, (example, f) in enumerate(zip(examples, features, strict=True)):
            n = len(example.tokens) - 2
            nexts[b, :n] = torch.tensor(example.tokens[1:-1])
            counts[b, :n] = torch.tensor(example.loss[2:])
            padded[b, : n + 1] = f[:-1]
        return cls(padded.to(device), nexts.to(device), counts.to(device))


class EagleObjective(nn.Module):
    """What is trained, and its loss.

    An embedding is often far smaller than a feature (SmolLM2: 0.12 against 1.9), and Adam moves every weight by about the
    learning rate, so the fc would take thousands of steps to hear which token comes next. The head is trained on embeddings
    scaled to the features' size, and `drafter` folds the scale into the fc.

    Args:
        ends: the target's embedding and LM head, frozen.
        vocab: draft vocabulary, target ids.
        gain: what embeddings are multiplied by in training.
    """

    taps = TAPS
    lm_head: Tensor
    lm_bias: Tensor | None
    gain: Tensor

    def __init__(self, head: EagleHead, ends: Ends, vocab: Int[Tensor, " Vd"] | None, gain: float = 1.0) -> None:
        super().__init__()
        self.register_buffer("gain", torch.tensor(gain))
        self.head = head
        self._ends, self._vocab = ends, vocab  # plain attributes: neither trained nor saved
        lm_head = ends.head if vocab is None else ends.head[vocab]
        self.register_buffer("lm_head", lm_head.detach().float().clone(), persistent=False)
        bias = None if ends.bias is None else ends.bias if vocab is None else ends.bias[vocab]
        self.register_buffer("lm_bias", None if bias is None else bias.detach().float().clone(), persistent=False)

    @classmethod
    def begin(
        cls, recipe: Recipe, ends: Ends, examples: Sequence[Example], features: Float[Tensor, "T H"]
    ) -> "EagleObjective":
        """An untrained head for this target, that says f̂_{i+1} = f_i. Some features show how large they are."""
        config = config_for(ends, recipe.head.intermediate_size)
        config = EagleConfig(**{**vars(config), "input_norm": recipe.head.input_norm})
        head = EagleHead(config).start_as_identity(torch.Generator().manual_seed(recipe.schedule.seed))
        vocab = frequent(examples, recipe.head.draft_vocab, len(ends.head))
        tokens = torch.tensor([token for example in examples[:64] for token in example.tokens], device=features.device)
        sizes = [x.float().pow(2).mean().sqrt() for x in (features, ends.embed(tokens).detach())]
        return cls(head, ends, vocab, float(sizes[0] / sizes[1]))

    def forward(self, batch: Batch, settings: Loss, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """The loss summed over counting tokens (to be divided by `batch.counts.sum()` of all processes), and for how many
        of them the likeliest token of the first step is the target's."""
        f = batch.features.float()
        inputs, labels = f[:, :-1], f[:, 1:]
        blur = (torch.rand(inputs.shape, generator=generator) * 2 - 1).to(inputs.device) * settings.noise
        inputs, embedded = inputs + blur, self._ends.embed(batch.nexts).detach().float() * self.gain
        unrolled = Unrolled(batch.nexts.shape[1], f.device)
        total = f.new_zeros(())
        agreed = total
        with torch.no_grad():  # the target's own law, once for all steps
            law = self._logits(labels[batch.counts]).softmax(-1)
        for j in range(settings.unroll):
            said = self.head(embedded, inputs, unrolled.positions, unrolled.step)
            counts = batch.counts.clone()
            counts[:, :j] = False  # no row stands j steps behind the first
            mine, theirs = said[counts], labels[counts]
            teacher = law[counts[batch.counts]]
            feature = F.smooth_l1_loss(mine, theirs, reduction="sum") / f.shape[-1]
            logits = self._logits(mine)
            token = -(teacher * logits.log_softmax(-1)).sum()
            total = total + settings.decay**j * (settings.feature * feature + settings.token * token)
            if j == 0:
                agreed = (logits.argmax(-1) == teacher.argmax(-1)).sum()
            inputs = torch.cat([inputs[:, :1], said[:, :-1]], 1)
        return total, agreed

    def _logits(self, features: Tensor) -> Tensor:
        return F.linear(features, self.lm_head, self.lm_bias).float()

    def drafter(self, tree: str, dtype: torch.dtype) -> Eagle:
        """A drafter with a copy of the head as it is now, rounded to `dtype` as it will be stored."""
        head = EagleHead(self.head.config)
        head.load_state_dict(self.head.state_dict())
        head.fc.weight.data[:, : self.head.config.hidden_size] *= self.gain.cpu()
        head.to(dtype).float()
        return Eagle(head, self._ends, self._vocab, tree)


class Unrolled:
    """Attention of a training-time test (EAGLE-3 §3.2, HASS): each step reads the features that the step before guessed.

    In step j row i reads f̂_i as guessed j draft steps after the target's last feature, f_{i−j}. So it sees the pairs of
    step 0 up to row i − j, and of step m = 1 … j row i − j + m: the ones a draft j deep would have in its cache.
    """

    def __init__(self, T: int, device: torch.device) -> None:
        self.positions = torch.arange(T, device=device)[None]
        self._behind = self.positions.T - self.positions  # [row, column]: how far the column lies behind
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def step(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`Attend` of the next step."""
        self._keys.append(key)
        self._values.append(value)
        j = len(self._keys) - 1
        seen = torch.cat([self._behind >= j, *(self._behind == j - m for m in range(1, j + 1))], 1)
        if j:  # the first j rows count for nothing, but a row that sees nothing is NaN
            seen[:j, 0] = True
        return torch.cat(self._keys, 2), torch.cat(self._values, 2), seen[None, None]


def frequent(examples: Iterable[Example], size: int, vocab: int) -> Int[Tensor, " Vd"] | None:
    """Ids of the `size` most frequent tokens to learn, sorted, filled up with the lowest ids; None for all."""
    if not 0 < size < vocab:
        return None
    count: Counter[int] = Counter()
    for example in examples:
        count.update(token for token, learnt in zip(example.tokens, example.loss, strict=True) if learnt)
    chosen = [token for token, _ in sorted(count.items(), key=lambda item: (-item[1], item[0]))[:size]]
    known = set(chosen)
    chosen += [token for token in range(vocab) if token not in known][: size - len(chosen)]
    return torch.tensor(sorted(chosen))


def coverage(examples: Iterable[Example], vocab: Int[Tensor, " Vd"] | None) -> float:
    """The share of the tokens to learn that a draft vocabulary holds."""
    if vocab is None:
        return 1.0
    known = set(vocab.tolist())
    learnt = [t for example in examples for t, own in zip(example.tokens, example.loss, strict=True) if own]
    return sum(token in known for token in learnt) / len(learnt)
