"""Objectives: a head learns the target's next states, and the laws that the LM head makes of them. It may
begin as a trained one (`head.start`)."""

from abc import abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass
from itertools import chain, compress
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.utils.rnn import pad_sequence

from slipstream.core.drafter import CACHE, FINAL
from slipstream.core.target import Target
from slipstream.drafters import drafter_class
from slipstream.drafters.heads import HeadDrafter, layer_sizes
from slipstream.drafters.proposer import Vocab
from slipstream.drafters.recipe import HeadSettings, Recipe
from slipstream.drafters.store import find_drafter, read_drafter, restored, stored
from slipstream.files import understood

ROWS = 32  # of logits that are taken together
SMALL = 2**27  # weights that a head may have for any target
Examples = Sequence[Any]  # of `training.data`: `tokens`, and `loss`, which of them are learnt
Gains = Float[Tensor, " taps1"]  # factors, in training, of the embeddings and of the states of each tap
Tokens = Int[Tensor, "B T1"]
States = Float[Tensor, "B T F"]
Steps = Iterator[Float[Tensor, "B T H"]]
Logits = Float[Tensor, "n Vd"]


@dataclass(frozen=True)
class Batch:
    """B sequences of pairs: row i holds (f_i, t_{i+1}), and is to predict f_{i+1}, which gives t_{i+2}."""

    features: Float[Tensor, "B T1 F"]  # f_0 … f_T without noise; of several taps, the LM head's comes last
    tokens: Int[Tensor, "B T2"]  # t_0 … t_{T+1}
    counts: Bool[Tensor, "B T"]  # t_{i+2} is a token to learn

    @classmethod
    def collate(cls, examples: Examples, features: Sequence[Float[Tensor, "_ F"]], device: Any) -> "Batch":
        """Right-padded. Padding does not count, and no real token attends to it."""
        tokens = pad_sequence([torch.tensor(e.tokens) for e in examples], batch_first=True)
        counts = pad_sequence([torch.tensor(e.loss[2:]) for e in examples], batch_first=True)
        read = pad_sequence([f[:-1] for f in features], batch_first=True)
        return cls(read.to(device), tokens.to(device), counts.to(device))


class LossOfLaw(torch.autograd.Function):
    """token · soft cross-entropy + acceptance · −log Σ min(p, q) of each row, where q = softmax(logits).

    On a CPU a few rows are taken at a time, with their gradient, so that what lies between logits and loss
    stays in a core's cache. For all rows it is several times as large as the logits.
    """

    @staticmethod
    def forward(ctx: Any, logits: Logits, p: Logits, token: float, acceptance: float) -> Float[Tensor, " n"]:
        losses, gradients = logits.new_empty(len(logits)), torch.empty_like(logits)
        rows = ROWS if logits.device.type == "cpu" else len(logits)  # a GPU's time would go into launches
        parts = (x.split(rows) for x in (logits, p, losses, gradients))
        for some, teacher, loss, gradient in zip(*parts, strict=True):
            with torch.enable_grad():
                log_q = (z := some.detach().requires_grad_()).log_softmax(-1)
                own = token * -(teacher * log_q).sum(-1)
                if acceptance:
                    accepted = torch.minimum(teacher, log_q.exp()).sum(-1)
                    own = own - acceptance * accepted.clamp(min=1e-6).log()
            loss.copy_(own.detach())
            gradient.copy_(*torch.autograd.grad(own, z, torch.ones_like(own)))
        ctx.save_for_backward(gradients)
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by: Float[Tensor, " n"]) -> tuple[Tensor, None, None, None]:
        (gradients,) = ctx.saved_tensors
        return gradients * by[:, None], None, None, None


@dataclass(frozen=True)
class WarmStart:
    """A trained head, in float32."""

    name: str  # the recipe's: a method whose weights ship, or a directory
    method: str
    head: Any
    vocab: Vocab | None  # None: all tokens

    @classmethod
    def read(cls, name: str, target: Target, draft_vocab: int) -> "WarmStart":
        """From weights as they are stored. Raises ValueError if there are none, or if the size of their draft
        vocabulary is not `draft_vocab` (0: all tokens)."""
        config, tensors = read_drafter(find_drafter(name, target), target)
        with understood(f"drafter directory {name}"):
            kind = drafter_class(config.get("method"), f"drafter directory {name}")
            if not issubclass(kind, HeadDrafter):
                raise ValueError(f"head.start={name!r} is a {kind.method} drafter, which has no head")
            head, vocab, _ = kind.unpack(config, tensors)
        wanted, size = draft_vocab or target.vocab, target.vocab if vocab is None else len(vocab)
        if size != min(wanted, target.vocab):
            raise ValueError(
                f"head.start={name!r} has a draft vocabulary of {size} tokens, which is kept, and "
                f"head.draft_vocab asks for {wanted}: set head.draft_vocab={size}"
            )
        return cls(name, kind.method, head.float(), None if vocab is None else vocab.long())

    def as_is(self, config: Any) -> Any:
        """The head itself. Raises ValueError if it has not the sizes of `config`."""
        own = self.head.config
        if type(own) is not type(config):
            raise ValueError(
                f"head.start={self.name!r} is of the method {self.method}: name a head of the same method"
            )
        theirs, ours = asdict(own), asdict(config)
        if wrong := [f"{key} {theirs[key]}, not {ours[key]}" for key in ours if theirs[key] != ours[key]]:
            raise ValueError(f"head.start={self.name!r} has other sizes than this recipe: {'; '.join(wrong)}")
        return self.head


@dataclass(frozen=True)
class NewHead:
    """What `Objective.new` makes a head from."""

    settings: Any  # the section `head` of the method's recipe
    sizes: dict[str, Any]  # of a layer, and the taps
    lm_head: nn.Module  # the target's over the draft vocabulary, float32
    vocab: int  # tokens of the draft vocabulary
    states: Sequence[Float[Tensor, "T _"]]  # some of each recorded tap, the final ones last
    gains: Gains
    target: Target
    generator: torch.Generator
    start: WarmStart | None

    def unscaled(self, head: Any) -> Any:
        """A head that reads plain inputs, changed to say the same of inputs that are scaled by `gains`."""
        with torch.no_grad():
            head.scale_inputs(1 / self.gains[0], 1 / self.gains[1:])
        return head.requires_grad_()

    def check_cache(self) -> None:
        """Raise ValueError where keys and values have other sizes than the configuration names."""
        wanted = 2 * self.sizes["num_key_value_heads"] * self.sizes["head_dim"]
        if (width := self.target.widths([f"{CACHE}0"])[0]) != wanted:
            raise ValueError(
                f"this method reads the target's cache, of {wanted} numbers a token; {self.target.name} has "
                f"{width}, as with multi-head latent attention: train eagle, eagle3, fasteagle or medusa"
            )


class Objective(nn.Module):
    """A head in training, and its loss. The target's embedding and LM head are read, and stay as they are.

    States differ in size from tap to tap, and an embedding is often far smaller (SmolLM2: 0.12 against 1.9).
    Adam moves every weight by about the learning rate, so it would take thousands of steps to learn from
    embeddings. So `gains` scale the inputs to the size of the final state, and `drafter` folds them into the
    head's weights.
    """

    drafts: ClassVar[Any]
    reads_features: ClassVar[bool] = True  # otherwise `forward` makes the target's passes itself
    gains: Gains

    def __init__(self, head: Any, target: Target, vocab: Vocab | None, gains: Gains | None = None) -> None:
        super().__init__()
        gains = torch.ones(1 + len(head.config.taps)) if gains is None else gains.float().cpu()
        self.register_buffer("gains", gains)
        self.head = head
        self._target = target  # plain attributes: neither trained nor saved
        self.take_vocab(vocab)

    def take_vocab(self, vocab: Vocab | None) -> None:
        """Draft from these tokens; None: from all."""
        self._vocab = vocab
        self.lm_head = deepcopy(self._target.lm_head(vocab)).float()

    @classmethod
    def begin(cls, recipe: Recipe, target: Target, examples: Examples, features: Tensor) -> "Objective":
        """An untrained head for this target. Some features [T, F] show how large they are."""
        settings, name = recipe.head, getattr(recipe.head, "start", None)
        start = None if name is None else WarmStart.read(name, target, settings.draft_vocab)
        vocab = frequent(examples, settings.draft_vocab, target.vocab) if start is None else start.vocab
        sizes = layer_sizes(target, getattr(settings, "intermediate_size", None))
        check_size(settings, sizes, target)
        sizes["taps"] = settings.reads(target.sizes.blocks)
        final = features[:, -target.sizes.hidden_size :].float()
        states = [*_by_tap(features.float(), sizes["taps"], final.shape[1]), final]
        tokens = torch.tensor([*chain.from_iterable(example.tokens for example in examples[:64])])
        embedded, size = target.embed(tokens.to(features.device)).detach().float(), median_rms(final)
        gains = [size / median_rms(embedded)]
        for tap, state in zip(sizes["taps"], states, strict=False):
            gains.append(size.new_ones(()) if tap.startswith(CACHE) else size / median_rms(state))
        lm_head, Vd = deepcopy(target.lm_head(vocab)).float(), target.vocab if vocab is None else len(vocab)
        generator, scale = torch.Generator().manual_seed(recipe.schedule.seed), torch.stack(gains).cpu()
        head = cls.new(NewHead(settings, sizes, lm_head, Vd, states, scale, target, generator, start))
        return cls(head, target, vocab, scale)

    @classmethod
    @abstractmethod
    def new(cls, plan: NewHead) -> nn.Module:
        """A head that begins as well as it can without training."""

    def steps(self, tokens: Tokens, features: States, settings: Any, generator: torch.Generator) -> Steps:
        """The states that the head predicts in draft steps j = 0, 1, …, over the tokens t_0 … t_T. Row i of
        each step is to be f_{i+1}; rows 0 … j − 1 of step j do not count. `settings`: the recipe's loss."""
        raise NotImplementedError

    def embed(self, tokens: Int[Tensor, "B T"]) -> Float[Tensor, "B T H"]:
        """What the head reads of tokens."""
        return self._target.embed(tokens).detach().to(next(self.head.parameters()).dtype) * self.gains[0]

    def student(self, states: Float[Tensor, "n H"], j: int, above: Int[Tensor, " n"]) -> Logits:
        """Logits of step j over the draft vocabulary. `above`: the tokens before the predicted ones."""
        return self.lm_head(states)

    def forward(self, batch: Batch, settings: Any, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """The loss summed over counting tokens (to be divided by `batch.counts.sum()` of all processes), and
        the number of tokens for which the first step's likeliest token is the target's."""
        f, H = batch.features.float(), self._target.sizes.hidden_size
        taps = _by_tap(f[:, :-1], self.head.config.taps, H)
        scaled = [gain * tap for gain, tap in zip(self.gains[1:], taps, strict=True)]
        read = torch.cat([f[:, :-1, :0], *scaled], -1)
        if noise := getattr(settings, "noise", 0.0):
            drawn = torch.rand(read.shape, generator=generator, device=read.device) * 2 - 1
            read = read + drawn * noise
        total = agreed = f.new_zeros(())
        T, decay = batch.counts.shape[1], getattr(settings, "decay", 1.0)
        rows = batch.counts.flatten().nonzero()[:, 0]  # once: a GPU is waited for
        labels, above, tokens = (
            x.flatten(0, 1)[rows] for x in (f[:, 1:, -H:], batch.tokens[:, 1:-1], batch.tokens[:, 2:])
        )
        teacher = self._law(labels, tokens, settings.hard)
        for j, predicted in enumerate(self.steps(batch.tokens[:, :-1], read, settings, generator)):
            states = predicted.flatten(0, 1)[rows]
            logits = self.student(states, j, above).float()
            loss = LossOfLaw.apply(logits, teacher, settings.token, settings.acceptance)
            if settings.feature:
                distance = F.smooth_l1_loss(states, labels, reduction="none").sum(-1)
                loss = loss + settings.feature * distance / H
            total = total + decay**j * (loss * (rows % T >= j)).sum()  # none stands j steps behind
            if j == 0:
                agreed = (logits.argmax(-1) == teacher.argmax(-1)).sum()
        return total, agreed

    @torch.no_grad()
    def _law(self, states: Float[Tensor, "n H"], tokens: Int[Tensor, " n"], hard: bool) -> Logits:
        """The labels: the target's law or, if `hard`, the text's token (0 if outside the vocabulary)."""
        if not hard:
            return self.lm_head(states.float()).softmax(-1)
        vocab = torch.arange(self._target.vocab) if self._vocab is None else self._vocab
        return (tokens[:, None] == vocab.to(tokens.device)).float()

    def weights(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """The head's as it is now, `stored` as `dtype`."""
        head: Any = self.drafts.module(self.head.config)
        head.load_state_dict(self.head.state_dict())
        head.scale_inputs(self.gains[0].cpu(), self.gains[1:].cpu())
        return stored(head.state_dict(), dtype)

    def drafter(self, tree: str, dtype: torch.dtype) -> Any:
        """A drafter with the head's `weights` in the target's precision."""
        head: Any = self.drafts.module(self.head.config)
        head.load_state_dict(restored(self.weights(dtype)))
        return self.drafts(head, self._target, self._vocab, tree)


def _by_tap(features: Float[Tensor, "*n F"], taps: Sequence[str], H: int) -> tuple[Tensor, ...]:
    """The features of each tap that is read; the final state comes last and may not be read."""
    read = features if taps[-1:] == (FINAL,) else features[..., : features.shape[-1] - H]
    return read.chunk(len(taps), -1) if taps else ()


def shifted_steps(states: Float[Tensor, "B T N H"]) -> Steps:
    """The steps of a head that predicts N states in one pass: its j-th at row i is step j's of row i + j."""
    T = states.shape[1]
    for j in range(min(states.shape[2], T)):
        yield F.pad(states[:, : T - j, j], (0, 0, j, 0))


def check_size(settings: HeadSettings, sizes: dict[str, Any], target: Target) -> None:
    """Raise ValueError for a head that is larger than its target, before memory is asked for."""
    H, inner = sizes["hidden_size"], sizes["intermediate_size"]
    layers, width = settings.layers_built(H)
    head = layers * width * (4 * width + 3 * inner)
    whole = target.sizes.blocks * H * (4 * H + 3 * target.sizes.intermediate_size)
    whole += target.vocab * target.width
    if head > max(whole, SMALL):
        raise ValueError(
            f"head.depth={layers} and head.intermediate_size={inner} ask for {head / 1e9:.1f} billion "
            f"numbers; the target itself has about {whole / 1e9:.1f}: name smaller sizes"
        )


def median_rms(states: Float[Tensor, "T H"]) -> Float[Tensor, ""]:
    """The median token's rms: a text's first token may be a thousand times as large as the others."""
    return states.pow(2).mean(-1).sqrt().median()


def frequent(examples: Examples, size: int, vocab: int) -> Vocab | None:
    """Ids of the `size` most frequent tokens to learn, sorted, filled up with the lowest ids; None: all."""
    if not 0 < size < vocab:
        return None
    count = _learnt(examples)
    return torch.tensor(sorted(sorted(range(vocab), key=lambda token: -count[token])[:size]))


def coverage(examples: Examples, vocab: Vocab | None) -> float:
    """The share of the tokens to learn that a draft vocabulary holds."""
    count = _learnt(examples)
    return 1.0 if vocab is None else sum(count[token] for token in vocab.tolist()) / count.total()


def _learnt(examples: Examples) -> Counter[int]:
    return Counter(chain.from_iterable(compress(example.tokens, example.loss) for example in examples))
