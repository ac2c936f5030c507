"""Objectives: a head is to say the target's next states, and the laws that the target's LM head reads off them."""

from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from slipstream.core.drafter import CACHE, FINAL, Ends
from slipstream.drafters import load_drafter
from slipstream.drafters.eagle import Eagle, EagleConfig, EagleHead
from slipstream.drafters.eagle3 import Eagle3, Eagle3Config, Eagle3Head
from slipstream.drafters.fasteagle import FastEagle, FastEagleConfig, FastEagleHead
from slipstream.drafters.glide import Glide, GlideConfig, GlideHead, Glimpse, apart
from slipstream.drafters.heads import Head, HeadDrafter, block_taps, borrowed, layer_sizes
from slipstream.drafters.store import restored, stored
from slipstream.train.data import Example
from slipstream.train.recipe import Head as HeadRecipe
from slipstream.train.recipe import Loss, Recipe


@dataclass(frozen=True)
class Batch:
    """B sequences of pairs: row i holds (f_i, t_{i+1}), and is to say f_{i+1}, which predicts t_{i+2}.

    Attributes:
        features: f_0 … f_T, noise not yet added; of several taps, what the LM head reads comes last.
        nexts: t_1 … t_T.
        counts: t_{i+2} is a token to learn.
    """

    features: Float[Tensor, "B T1 F"]
    nexts: Int[Tensor, "B T"]
    counts: Bool[Tensor, "B T"]

    @classmethod
    def collate(cls, examples: Sequence[Example], features: Sequence[Float[Tensor, "_ F"]], device: Any) -> "Batch":
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


@dataclass(frozen=True)
class Given:
    """What an untrained head is made of.

    Attributes:
        recipe: its section on the head.
        sizes: of a layer, and the taps.
        lm_head: the target's, for the draft vocabulary.
        states: some of each recorded tap, the final ones last.
        gains: what embeddings, and the states of each tap that is read, are multiplied by.
        ends: the target's.
    """

    recipe: HeadRecipe
    sizes: dict[str, Any]
    lm_head: Float[Tensor, "Vd H"]
    states: Sequence[Float[Tensor, "T H"]]
    gains: Float[Tensor, " taps1"]
    ends: Ends
    generator: torch.Generator


class Objective(nn.Module):
    """What is trained, and its loss.

    States differ in size from tap to tap, and an embedding is often far smaller (SmolLM2: 0.12 against 1.9). Adam moves
    every weight by about the learning rate, so a head would take thousands of steps to hear which token comes next. It is
    trained on inputs scaled to the size of the final state, and `drafter` folds the scales into its weights.

    Args:
        ends: the target's embedding and LM head, frozen.
        vocab: draft vocabulary, target ids.
        gains: what embeddings, and the states of each tap, are multiplied by in training.
    """

    drafts: ClassVar[type[HeadDrafter]]
    lm_head: Tensor
    lm_bias: Tensor | None
    gains: Float[Tensor, " taps1"]

    def __init__(
        self, head: Head, ends: Ends, vocab: Int[Tensor, " Vd"] | None, gains: Float[Tensor, " taps1"] | None = None
    ) -> None:
        super().__init__()
        taps = len(head.config.taps)
        self.register_buffer("gains", torch.ones(1 + taps) if gains is None else gains.float().cpu())
        self.head: Any = head
        self._ends, self._vocab = ends, vocab  # plain attributes: neither trained nor saved
        lm_head, bias = borrowed(ends, torch.arange(len(ends.head)) if vocab is None else vocab)
        self.register_buffer("lm_head", lm_head.detach().float().clone(), persistent=False)
        self.register_buffer("lm_bias", None if bias is None else bias.detach().float().clone(), persistent=False)

    @classmethod
    def taps(cls, recipe: Recipe, layers: int) -> tuple[str, ...]:
        """What is recorded of a target of so many layers: what the head reads, and last what the LM head reads."""
        read = cls.reads(recipe, layers)
        return read if read[-1:] == (FINAL,) else (*read, FINAL)

    @classmethod
    def reads(cls, recipe: Recipe, layers: int) -> tuple[str, ...]:
        """The taps that the head reads."""
        return tuple(recipe.head.taps or block_taps(layers))

    @classmethod
    def begin(cls, recipe: Recipe, ends: Ends, examples: Sequence[Example], features: Float[Tensor, "T F"]) -> "Objective":
        """An untrained head for this target. Some features show how large they are."""
        vocab = frequent(examples, recipe.head.draft_vocab, len(ends.head))
        sizes = layer_sizes(ends, recipe.head.intermediate_size)
        sizes["taps"] = cls.reads(recipe, ends.config.num_hidden_layers)
        final = features[:, -ends.config.hidden_size :].float()
        states = [*cls._apart(features.float(), sizes["taps"], final.shape[1]), final]
        tokens = torch.tensor([token for example in examples[:64] for token in example.tokens], device=features.device)
        embedded, size = ends.embed(tokens).detach().float(), _size(final)
        gains = [size / _size(embedded)]
        for tap, state in zip(sizes["taps"], states, strict=False):
            gains.append(size.new_ones(()) if tap.startswith(CACHE) else size / _size(state))
        lm_head, _ = borrowed(ends, torch.arange(len(ends.head)) if vocab is None else vocab)
        seeded = torch.Generator().manual_seed(recipe.schedule.seed)
        scale = torch.stack(gains).cpu()
        head = cls.new(Given(recipe.head, sizes, lm_head.detach().float(), states, scale, ends, seeded))
        return cls(head, ends, vocab, scale)

    @staticmethod
    def _apart(features: Float[Tensor, "*n F"], taps: Sequence[str], H: int) -> tuple[Tensor, ...]:
        """What each tap that is read shows; of the final state, which comes last, only if it is read."""
        read = features if taps[-1:] == (FINAL,) else features[..., : features.shape[-1] - H]
        return read.chunk(len(taps), -1) if taps else ()

    @classmethod
    @abstractmethod
    def new(cls, given: Given) -> Head:
        """A head that begins as well as it can without training."""

    @abstractmethod
    def steps(
        self, embedded: Float[Tensor, "B T H"], features: Float[Tensor, "B T F"], settings: Loss, generator: torch.Generator
    ) -> Iterator[Float[Tensor, "B T H"]]:
        """What the head says of the same tokens 1, 2, … draft steps after the target's last state: row i of each is to be
        f_{i+1}; the first j rows of step j (from 0) mean nothing."""

    def embed(self, tokens: Int[Tensor, "B T"]) -> Float[Tensor, "B T H"]:
        """What the head reads of tokens."""
        return self._ends.embed(tokens).detach().float() * self.gains[0]

    def student(self, said: Float[Tensor, "n H"]) -> Float[Tensor, "n Vd"]:
        """Logits over the draft vocabulary."""
        return F.linear(said, self.lm_head, self.lm_bias)

    def forward(self, batch: Batch, settings: Loss, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """The loss summed over counting tokens (to be divided by `batch.counts.sum()` of all processes), and for how many
        of them the likeliest token of the first step is the target's."""
        f, H = batch.features.float(), self._ends.config.hidden_size
        labels, taps = f[:, 1:, -H:], self._apart(f[:, :-1], self.head.config.taps, H)
        embedded = self.embed(batch.nexts)
        read = torch.cat([f[:, :-1, :0], *(gain * tap for gain, tap in zip(self.gains[1:], taps, strict=True))], -1)
        if settings.noise:
            read = read + (torch.rand(read.shape, generator=generator) * 2 - 1).to(read.device) * settings.noise
        total = f.new_zeros(())
        agreed = total
        with torch.no_grad():  # the target's own law, once for all steps
            law = F.linear(labels[batch.counts], self.lm_head, self.lm_bias).softmax(-1)
        for j, said in enumerate(self.steps(embedded, read, settings, generator)):
            counts = batch.counts.clone()
            counts[:, :j] = False  # no row stands j steps behind the first
            mine, teacher = said[counts], law[counts[batch.counts]]
            logits = self.student(mine).float()
            log_q = logits.log_softmax(-1)
            loss = settings.token * -(teacher * log_q).sum()
            if settings.acceptance:
                loss = loss - settings.acceptance * torch.minimum(teacher, log_q.exp()).sum(-1).clamp(min=1e-6).log().sum()
            if settings.feature:
                feature = F.smooth_l1_loss(mine, labels[counts], reduction="sum") / H
                loss = loss + settings.feature * feature
            total = total + settings.decay**j * loss
            if j == 0:
                agreed = (logits.argmax(-1) == teacher.argmax(-1)).sum()
        return total, agreed

    def drafter(self, tree: str, dtype: torch.dtype) -> HeadDrafter:
        """A drafter with a copy of the head as it is now, rounded as `dtype` stores it."""
        head: Any = self.drafts.module(self.head.config)
        head.load_state_dict(self.head.state_dict())
        head.scale_inputs(self.gains[0].cpu(), self.gains[1:].cpu())
        head.load_state_dict(restored(stored(head.state_dict(), dtype)))
        return self.drafts(head, self._ends, self._vocab, tree)


class _Recursion(Objective):
    """Each step reads what the step before said, and the first one the target's states."""

    def steps(
        self, embedded: Float[Tensor, "B T H"], features: Float[Tensor, "B T F"], settings: Loss, generator: torch.Generator
    ) -> Iterator[Float[Tensor, "B T H"]]:
        unrolled, inputs = Unrolled(features.shape[1], features.device), self.head.fuse(features)
        for _ in range(settings.unroll):
            said = self.head(embedded, inputs, unrolled.positions, unrolled.step)
            yield said
            inputs = torch.cat([inputs[:, :1], said[:, :-1]], 1)


@final
class EagleObjective(_Recursion):
    """EAGLE §3.2, and with `unroll` its training through its own predictions."""

    drafts = Eagle

    @classmethod
    def reads(cls, recipe: Recipe, layers: int) -> tuple[str, ...]:
        return (FINAL,)

    @classmethod
    def new(cls, given: Given) -> EagleHead:
        return EagleHead(EagleConfig(**given.sizes, input_norm=given.recipe.input_norm)).start(given.generator)


@final
class Eagle3Objective(_Recursion):
    """EAGLE-3's training-time test: soft cross-entropy over the draft vocabulary, for several of its own steps."""

    drafts = Eagle3

    @classmethod
    def new(cls, given: Given) -> Eagle3Head:
        head = Eagle3Head(Eagle3Config(**given.sizes, draft_vocab_size=len(given.lm_head)))
        read, final = given.states[len(given.sizes["taps"]) - 1], given.states[-1]
        normed = F.rms_norm(read, read.shape[-1:])
        scale = final.pow(2).mean(0).sqrt() / normed.pow(2).mean(0).sqrt().clamp(min=1e-6)
        return head.start(given.generator, given.lm_head, scale)

    def embed(self, tokens: Int[Tensor, "B T"]) -> Float[Tensor, "B T H"]:
        """What the head reads of tokens."""
        return self._ends.embed(tokens).detach().float() * self.gains[0]

    def student(self, said: Float[Tensor, "n H"]) -> Float[Tensor, "n Vd"]:
        return self.head.logits(said)


@final
class FastEagleObjective(Objective):
    """FastEagle §2.3: every layer's state and law, end to end. w_i = 0.9^{N−i} favours the deep, as decay = 1/0.9 does."""

    drafts = FastEagle

    @classmethod
    def new(cls, given: Given) -> FastEagleHead:
        recipe = given.recipe
        about = {**given.sizes, "depth": recipe.depth, "cascade": recipe.cascade}
        if recipe.start is None:
            return FastEagleHead(FastEagleConfig(**about)).start(given.generator)
        eagle: Any = load_drafter(recipe.start, given.ends)
        sizes = {name: size for name, size in given.sizes.items() if name != "taps"}
        alike = isinstance(eagle, Eagle) and all(getattr(eagle.head.config, name) == sizes[name] for name in sizes)
        if not alike or eagle.head.config.bias or given.sizes["taps"][-1] != FINAL:
            raise ValueError(
                f"head.start={recipe.start!r}: a fasteagle head begins as an eagle head without fc.bias, whose layer is as "
                f'wide as its own (head.intermediate_size), and the last of head.taps is "{FINAL}"'
            )
        head = FastEagleHead(FastEagleConfig(**about, input_norm=eagle.head.config.input_norm)).start_as(eagle.head)
        head.scale_inputs(1 / given.gains[0], 1 / given.gains[1:])
        return head

    def steps(
        self, embedded: Float[Tensor, "B T H"], features: Float[Tensor, "B T F"], settings: Loss, generator: torch.Generator
    ) -> Iterator[Float[Tensor, "B T H"]]:
        T = features.shape[1]
        at = torch.arange(T, device=features.device)
        causal = (at <= at[:, None])[None, None]
        attends = [lambda key, value: (key, value, causal)] * self.head.config.depth
        said = self.head(embedded, features, at[None], attends)
        for j in range(min(self.head.config.depth, T)):
            yield F.pad(said[:, : T - j, j], (0, 0, j, 0))  # layer j of row i speaks of the token j rows on


@final
class GlideObjective(Objective):
    """GLIDE §4.1 with soft labels: drafts a block ahead of what they see of the target, in blocks that begin at random."""

    drafts = Glide

    @classmethod
    def reads(cls, recipe: Recipe, layers: int) -> tuple[str, ...]:
        depth = recipe.head.depth
        taps = recipe.head.taps or [f"{CACHE}{max(i, 0)}" for i in range(layers - depth, layers)]
        if len(taps) != depth or not all(tap.startswith(CACHE) for tap in taps):
            raise ValueError(
                f"head.taps={taps}: each of the {depth} layers of glide reads a cache, such as {CACHE}{layers - 1}"
            )
        return tuple(taps) if recipe.head.glimpses else ()

    @classmethod
    def new(cls, given: Given) -> GlideHead:
        recipe, ends, sizes = given.recipe, given.ends, dict(given.sizes)
        about: dict[str, Any] = {"target_size": sizes["hidden_size"], "target_head_dim": sizes["head_dim"]}
        about |= {"target_heads": sizes["num_attention_heads"], "target_theta": sizes["rope_theta"]}
        rope = getattr(ends.config, "rope_parameters", None) or {}
        share = rope.get("partial_rotary_factor") or getattr(ends.config, "partial_rotary_factor", None) or 1.0
        about["target_rotary"] = int(share * sizes["head_dim"]) if rope or hasattr(ends.config, "rope_theta") else 0
        if recipe.hidden_size:
            heads = max(1, recipe.hidden_size // sizes["head_dim"])
            sizes |= {"hidden_size": recipe.hidden_size, "num_attention_heads": heads, "num_key_value_heads": heads}
        if recipe.own_ends:
            about |= {"vocab_size": len(ends.head), "draft_vocab_size": len(given.lm_head)}
        config = GlideConfig(**sizes, depth=recipe.depth, **about)
        return GlideHead(config).start(given.generator, _size(given.states[-1]))

    def embed(self, tokens: Int[Tensor, "B T"]) -> Float[Tensor, "B T H"]:
        own = self.head.embed_tokens
        return super().embed(tokens) if own is None else own(tokens)

    def student(self, said: Float[Tensor, "n H"]) -> Float[Tensor, "n Vd"]:
        return self.head.logits(said) if self.head.own_lm_head else super().student(said)

    def steps(
        self, embedded: Float[Tensor, "B T H"], features: Float[Tensor, "B T F"], settings: Loss, generator: torch.Generator
    ) -> Iterator[Float[Tensor, "B T H"]]:
        config, at = self.head.config, torch.arange(features.shape[1], device=features.device)
        causal = (at <= at[:, None])[None, None]
        first = int(torch.randint(settings.block, (), generator=generator))
        block = (at - first).div(settings.block, rounding_mode="floor") * settings.block + first
        seen = (at <= block.clamp(min=0)[:, None])[None, None]  # row i drafts i − block steps behind the block's first
        glimpses: list[Glimpse | None] = [None] * config.depth
        for i, part in enumerate(features.chunk(len(config.taps), -1) if config.taps else ()):
            glimpses[i] = (*apart(part, config.target_head_dim), seen)
        attends = [lambda key, value: (key, value, causal)] * config.depth
        yield self.head(embedded, at[None] + 1, attends, glimpses)


OBJECTIVES: dict[str, type[Objective]] = {
    cls.drafts.method: cls for cls in (EagleObjective, Eagle3Objective, FastEagleObjective, GlideObjective)
}


def _size(states: Float[Tensor, "T H"]) -> Float[Tensor, ""]:
    """The median token's rms: a text's first token may be a thousand times as large as the others."""
    return states.pow(2).mean(-1).sqrt().median()


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
