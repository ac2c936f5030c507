"""A target whose texts are known: drafts are held along them without a pass of the model."""

from collections.abc import Sequence
from typing import Any, final

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from slipstream.core.cache import KVCache
from slipstream.core.drafter import FINAL
from slipstream.core.sampling import Sampler, Sampling, rows_of
from slipstream.core.span import Output
from slipstream.core.target import Target
from slipstream.core.tree import Layout, Tree
from slipstream.core.verify import child_with


@final
class RecordedTarget(Target):
    """Texts of a target. A pass reads the features of nodes off the record, and in place of logits the token
    that the text goes on with, V = 1; `law` is the law that understands them. A session that admits the
    prompts in order then does what decoding would do. All else is the recorded target's own.

    Args:
        target: whose texts they are. It passes over each of them once.
        texts: prompts and answers, in the order in which a session will admit them.
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
        self.name, self.text, self.source = target.name, target.text, target.source
        self.device, self.dtype, self.fingerprint = target.device, target.dtype, target.fingerprint
        self.vocab, self.width, self.window = target.vocab, target.width, target.window
        self.sizes, self.compiles, self.captures = target.sizes, target.compiles, False
        self.sampling = rows_of(Sampling(), len(texts)) if sampling is None else list(sampling)
        rows = [[*prompt, *answer] for prompt, answer in texts]
        longest = max(map(len, rows)) + 1  # nothing matches past the longest, either
        self.tokens = torch.tensor([row + [-1] * (longest - len(row)) for row in rows], device=self.device)
        self.prompts = torch.tensor([len(prompt) for prompt, _ in texts], device=self.device)
        self.lengths = torch.tensor([len(row) for row in rows], device=self.device)
        features = [target.features([row], taps) for row in rows]
        self._features = torch.cat([F.pad(f, (0, 0, 0, longest - f.shape[1])) for f in features])
        self._widths = target.widths(taps)

    def tapped(self, taps: Sequence[str]) -> Float[Tensor, "B S F"]:
        """The features of some of the taps, in that order; meaningless in the padding."""
        return self._some(self._features, taps)

    def _some(self, features: Float[Tensor, "*n F"], taps: Sequence[str]) -> Float[Tensor, "*n G"]:
        """Some of the taps of what was recorded."""
        every = dict(zip(self.taps, features.split(self._widths, -1), strict=True))
        return torch.cat([features[..., :0], *(every[tap] for tap in taps)], -1)

    def __call__(
        self, tree: Tree, cache: KVCache, taps: Sequence[str] = (), rows: Int[Tensor, "B K"] | None = None
    ) -> Output:
        cache.reserve(tree.rows)
        at = (cache.lengths[:, None] + tree.layout().depths).expand(len(cache.texts), -1)
        at, text = at.clamp(max=self.tokens.shape[1] - 2), cache.texts[:, None]
        wanted = at if rows is None else at.gather(1, rows)
        nexts = self.tokens[text, wanted + 1].float()
        features = self._some(self._features[text, at], taps) if taps else None
        return Output(nexts[..., None], features, 0.0)

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
        return child_with(tree, node, token), token.clamp(min=0)

    @torch.inference_mode()
    def greedy_share(self) -> float:
        """The share of the answers' tokens that are the target's likeliest."""
        right, total, lm_head = 0, 0, self.lm_head()
        texts = zip(self.tokens, self.prompts, self.lengths, self.tapped([FINAL]), strict=True)
        for tokens, start, end, final_states in texts:
            likeliest = lm_head(final_states[start - 1 : end - 1]).argmax(-1)
            right += int((likeliest == tokens[start:end]).sum())
            total += int(end - start)
        return right / total

    def new_cache(self, batch: int, memory: Tensor | None = None) -> KVCache:
        return KVCache(0, batch, self.device)

    @property
    def place(self) -> str:
        return self.target.place

    @property
    def generation_config(self) -> Any:
        return self.target.generation_config

    @property
    def described(self) -> dict[str, Any]:
        return self.target.described

    @property
    def read_bytes(self) -> int:
        return 0

    def extend(
        self, tokens: Int[Tensor, "B R"], layout: Layout, cache: KVCache, after: int
    ) -> Float[Tensor, "B R V"]:
        raise NotImplementedError("a record knows nothing of rows beside its texts")

    def embed(self, tokens: Int[Tensor, "*n"]) -> Float[Tensor, "*n H"]:
        return self.target.embed(tokens)

    def lm_head(self, vocab: Int[Tensor, " Vd"] | None = None) -> nn.Module:
        return self.target.lm_head(vocab)

    def widths(self, taps: Sequence[str]) -> list[int]:
        return self.target.widths(taps)

    def features(self, rows: Sequence[Sequence[int]], taps: Sequence[str]) -> Float[Tensor, "B T F"]:
        return self.target.features(rows, taps)

    def rope(self, block: int) -> tuple[list[float], float]:
        return self.target.rope(block)

    def part(
        self, blocks: Sequence[int], own: bool = False, vocab: Int[Tensor, " Vd"] | None = None
    ) -> Target:
        return self.target.part(blocks, own, vocab)

    def trunk(self) -> dict[str, nn.Module]:
        return self.target.trunk()

    def states(
        self,
        embedded: Float[Tensor, "B R H"],
        positions: Int[Tensor, "#B R"],
        seen: Bool[Tensor, "#B R S"],
        columns: Int[Tensor, "#B S"],
        behind: Sequence[tuple[Tensor, Tensor]] = (),
    ) -> tuple[Float[Tensor, "B R H"], list[tuple[Tensor, Tensor]]]:
        return self.target.states(embedded, positions, seen, columns, behind)

    def unsound(self, tokens: Sequence[int]) -> str:
        return self.target.unsound(tokens)
