"""The Target: a frozen LLM, as passes over trees and as what drafters share with it."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from slipstream.core.cache import KVCache
from slipstream.core.span import Output
from slipstream.core.tree import Layout, Tree

# in logits, by precision: what rounding may turn
MARGINS = {torch.float64: 1e-9, torch.float32: 1e-3, torch.float16: 0.1, torch.bfloat16: 0.5}
Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Sizes:
    """A target's sizes, under Hugging Face's names; `blocks` is the number of its decoder layers."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rope_theta: float
    rms_norm_eps: float
    hidden_act: str
    blocks: int


class Text(ABC):
    """How a target reads and writes text."""

    @property
    @abstractmethod
    def has_chat(self) -> bool:
        """Whether text becomes a user's turn of a chat template."""

    @property
    @abstractmethod
    def eos(self) -> int | None:
        """The token that ends a text, if there is one."""

    @property
    @abstractmethod
    def vocabulary(self) -> dict[str, int]:
        """The id of each token, as the tokenizer writes it. Models with the same one understand each other's
        tokens."""

    @abstractmethod
    def encode(self, prompt: str | Messages) -> list[int]:
        """Token ids of a prompt, through the chat template where there is one. Raises ValueError for messages
        that the template does not take."""

    @abstractmethod
    def ids(self, text: str, special: bool = False) -> list[int]:
        """Token ids of text as it stands; `special`: with the tokens that the tokenizer adds to a text."""

    @abstractmethod
    def render(self, messages: Messages, ask: bool) -> str:
        """Messages as the chat template writes them; `ask`: up to where the assistant's answer begins. Raises
        ValueError for messages that the template refuses."""

    @abstractmethod
    def decode(self, tokens: Sequence[int], special: bool = False) -> str:
        """Text of token ids, without `special` tokens by default, and with spaces as they were written."""

    @abstractmethod
    def written(self, token: int) -> str:
        """One token as the vocabulary writes it."""


@final
class LMHead(nn.Module):
    """States to logits, float32 at least: cap · tanh(scale · (W h + b) / cap).

    Cohere and Granite scale their logits, Gemma caps them. The weights are non-persistent buffers: whoever
    holds this module neither trains nor saves them.

    Args:
        weight: W, of some rows of the vocabulary.
        bias: b, if there is one.
    """

    weight: Tensor
    bias: Tensor | None

    def __init__(
        self,
        weight: Float[Tensor, "Vd H"],
        bias: Float[Tensor, " Vd"] | None,
        scale: float = 1.0,
        cap: float | None = None,
    ) -> None:
        super().__init__()
        self.scale, self.cap = scale, cap
        self.register_buffer("weight", weight, persistent=False)
        self.register_buffer("bias", bias, persistent=False)

    def forward(self, states: Float[Tensor, "*n H"]) -> Float[Tensor, "*n Vd"]:
        """The logits."""
        logits = F.linear(states, self.weight, self.bias)
        logits = logits if self.scale == 1 else logits * self.scale
        logits = self.cap * torch.tanh(logits / self.cap) if self.cap else logits
        return logits if logits.dtype == torch.float64 else logits.float()


class Target(ABC):
    """A frozen LLM: `target(tree, cache) -> Output`.

    Attributes:
        name: what the user called it.
        vocab: V, the width of the logits.
        width: H, of the final states, which the LM head reads.
        window: positions that it has, or a very large number where it names no limit.
        compiles: its passes are compiled graphs, and a drafter's own shall be.
        captures: rounds with it are captured as CUDA graphs.
        text: how it reads and writes text; None where prompts are token ids.
        source: the directory or the hub id that its weights come from, or "".
        fingerprint: what a drafter is made for: a hash of the weights as they were loaded from their source.
            A quantised copy keeps it.
    """

    name: str
    device: torch.device
    dtype: torch.dtype
    vocab: int
    width: int
    window: int
    sizes: Sizes
    compiles: bool
    captures: bool
    text: Text | None
    source: str
    fingerprint: str

    @property
    def dtype_name(self) -> str:
        """As `load_target` takes it: "float32", "bfloat16", …"""
        return str(self.dtype).removeprefix("torch.")

    @property
    def margin(self) -> float:
        """The stated margin of its precision, in logits: a pass over a tree and a pass over one row round
        differently, so that a token whose score is this close to the best is a tie."""
        return MARGINS[self.dtype]

    @property
    @abstractmethod
    def place(self) -> str:
        """Machine, precision and whether it is compiled: what costs, and so tuned trees, depend on."""

    @property
    @abstractmethod
    def generation_config(self) -> Any:
        """Hugging Face's `GenerationConfig`: settings that hold where the caller gives none."""

    @property
    @abstractmethod
    def described(self) -> dict[str, Any]:
        """The configuration that its config.json holds."""

    @property
    @abstractmethod
    def read_bytes(self) -> int:
        """What one pass must read: all weights but the embedding's rows that are not looked up (a tied one is
        the LM head)."""

    @abstractmethod
    def __call__(
        self, tree: Tree, cache: KVCache, taps: Sequence[str] = (), rows: Int[Tensor, "B K"] | None = None
    ) -> Output:
        """One pass over the tree's rows, written to the cache as scratch.

        Args:
            taps: what to return as features, named as in `Drafter.taps`.
            rows: the nodes whose logits are wanted, all by default; K = 0 skips the LM head as far as the
                model allows.
        """

    @abstractmethod
    def extend(
        self, tokens: Int[Tensor, "B R"], layout: Layout, cache: KVCache, after: int
    ) -> Float[Tensor, "B R V"]:
        """Logits of further rows of a round, behind `after` scratch rows of earlier passes: how a model
        drafts.

        Args:
            layout: depths [#B, A] of all A = after + R scratch rows, and the new rows' lines of what they see
                [B, R, A].
        """

    @abstractmethod
    def new_cache(self, batch: int, memory: Tensor | None = None) -> KVCache:
        """An empty cache for `batch` rows; `memory` is what a drafter's probes read."""

    @abstractmethod
    def embed(self, tokens: Int[Tensor, "*n"]) -> Float[Tensor, "*n H"]:
        """The embeddings of tokens."""

    @abstractmethod
    def lm_head(self, vocab: Int[Tensor, " Vd"] | None = None) -> nn.Module:
        """A module from states to logits over some tokens, all by default. Those of all tokens share their
        weights with the model."""

    @abstractmethod
    def widths(self, taps: Sequence[str]) -> list[int]:
        """How wide each tap is."""

    @abstractmethod
    def features(self, rows: Sequence[Sequence[int]], taps: Sequence[str]) -> Float[Tensor, "B T F"]:
        """The taps at every token of whole texts, in one pass; columns past a row's end are meaningless.
        Raises ValueError for numbers that are not finite."""

    @abstractmethod
    def rope(self, block: int) -> tuple[list[float], float]:
        """(frequencies of the rotary positions of one block, factor of their cos and sin); no frequencies
        where it has no rotary positions."""

    @abstractmethod
    def part(
        self, blocks: Sequence[int], own: bool = False, vocab: Int[Tensor, " Vd"] | None = None
    ) -> "Target":
        """Some of the blocks between the same ends, as a target (Zhang et al. 2023, "Draft & Verify").

        Args:
            own: copies of all but the ends, which may be changed; otherwise nothing is copied.
            vocab: the tokens that it has logits of; all by default.

        Raises:
            ValueError: there is no such block, or none is named.
        """

    @abstractmethod
    def trunk(self) -> dict[str, nn.Module]:
        """The modules between embedding and LM head: its `blocks`, and what else is `between` the ends."""

    @abstractmethod
    def states(
        self,
        embedded: Float[Tensor, "B R H"],
        positions: Int[Tensor, "#B R"],
        seen: Bool[Tensor, "#B R S"],
        columns: Int[Tensor, "#B S"],
        behind: Sequence[tuple[Tensor, Tensor]] = (),
    ) -> tuple[Float[Tensor, "B R H"], list[tuple[Tensor, Tensor]]]:
        """The final states of rows given as vectors, and their keys and values in each block. Gradients flow
        through the rows and through what they read.

        Args:
            seen: what each row may see of the S columns, sliding windows apart: those `behind`, and then the
                rows.
            columns: where the columns stand; before everything (negative) is in every window.
            behind: keys and values of each block [B, heads, S − R, D]; none by default.
        """

    @abstractmethod
    def unsound(self, tokens: Sequence[int]) -> str:
        """What is wrong where its numbers behind `tokens` are not finite, and the module where it begins."""
