"""The Target: a frozen LLM, as passes over trees and as what drafters share with it."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from threading import RLock
from typing import Any, final

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from slipstream.core.kv_cache import KVCache
from slipstream.core.span import Output
from slipstream.core.tree import Tree, TreeLayout

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


class Rendered(str):
    """Messages as a chat template writes them. Sliced, it is a text like any other.

    Attributes:
        masked: the same with stand-ins where messages begin what would be a special token; "": nowhere.
        signs: from stand-ins to the characters that they replace, as `str.translate` takes it.
    """

    masked: str = ""
    signs: Mapping[int, str] = {}

    def behind(self, start: int) -> "Rendered":
        """The text from `start` on."""
        rest = Rendered(self[start:])
        rest.masked, rest.signs = self.masked[start:], self.signs
        return rest


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
        """The id of each token, as the tokenizer writes it."""

    @property
    @abstractmethod
    def calls_tools(self) -> bool:
        """Whether the chat template takes tools, and has them called as <tool_call>{…}</tool_call>."""

    @abstractmethod
    def encode(self, prompt: str | Messages, tools: Messages = ()) -> list[int]:
        """Token ids of a prompt, through the chat template where there is one, which may be given tools.
        Raises ValueError."""

    @abstractmethod
    def ids(self, text: str, special: bool = False) -> list[int]:
        """Token ids of text as it stands. Special tokens in it are special, except those in the messages of a
        rendered text. `special`: with the tokens that the tokenizer adds to a text."""

    @abstractmethod
    def render(self, messages: Messages, ask: bool, tools: Messages = ()) -> Rendered:
        """Messages by the chat template; `ask`: up to where an answer begins. Raises ValueError where it
        refuses them, or writes neither tools nor calls of them."""

    @abstractmethod
    def decode(self, tokens: Sequence[int], special: bool = False) -> str:
        """Text of token ids, without `special` tokens by default; spaces stay as they were written."""

    @abstractmethod
    def written(self, token: int) -> str:
        """One token as the vocabulary writes it."""

    @abstractmethod
    def bytes_of(self, token: int) -> bytes | None:
        """The UTF-8 that a token stands for, which may be a part of a character; None where the vocabulary
        does not say."""


@final
class LMHead(nn.Module):
    """States to logits, float32 at least: cap · tanh(scale · (W h + b) / cap).

    Cohere and Granite scale their logits, Gemma caps them. W holds some rows of the vocabulary [Vd, H], or a
    quantised head's, as `product` reads them. A module that holds this one neither trains nor saves them.
    """

    weight: Tensor
    bias: Tensor | None

    def __init__(
        self,
        weight: Tensor,
        bias: Float[Tensor, " Vd"] | None,
        scale: float = 1.0,
        cap: float | None = None,
        product: Callable[[Tensor, Tensor, Tensor | None], Tensor] = F.linear,
    ) -> None:
        super().__init__()
        self.scale, self.cap, self.product = scale, cap, product
        self.register_buffer("weight", weight, persistent=False)
        self.register_buffer("bias", bias, persistent=False)

    def forward(self, states: Float[Tensor, "*n H"]) -> Float[Tensor, "*n Vd"]:
        """The logits."""
        logits = self.product(states, self.weight, self.bias)
        logits = logits if self.scale == 1 else logits * self.scale
        logits = self.cap * torch.tanh(logits / self.cap) if self.cap else logits
        return logits if logits.dtype == torch.float64 else logits.float()


class Target(ABC):
    """A frozen LLM: `target(tree, cache) -> Output`.

    Attributes:
        name: what the user called it.
        dtype: of states, and of weights that are not quantised.
        quantize: what its weights are rounded to, "int8" or "int4"; None: nothing.
        vocab: V, the width of the logits.
        width: H, of the final states, which the LM head reads.
        window: its number of positions; a very large number if it names none.
        embed: from tokens [*n] to their embeddings [*n, H].
        compiles: its passes are compiled, where it has no description, and on a GPU those of its drafters.
        captures: its rounds are captured as CUDA graphs.
        text: how it reads and writes text; None where prompts are token ids.
        source: directory or hub id of its weights, or "".
        fingerprint: a hash of the weights as loaded from their source, which a drafter is made for. A
            quantised copy keeps it.
    """

    name: str
    device: torch.device
    dtype: torch.dtype
    quantize: str | None = None
    vocab: int
    width: int
    window: int
    sizes: Sizes
    embed: nn.Module
    compiles: bool
    captures: bool
    text: Text | None
    source: str
    fingerprint: str

    def __copy__(self) -> "Target":
        copied = object.__new__(type(self))
        vars(copied).update(vars(self))
        return copied

    def __reduce__(self) -> Any:
        raise ValueError(f"target {self.name} cannot be pickled: load it in each process, by its name")

    @property
    def lock(self) -> AbstractContextManager[Any]:
        """Its device's `lock`, held for each pass, and by an engine for each step."""
        return lock(self.device)

    @property
    def dtype_name(self) -> str:
        """As `load_target` takes it, such as "float32"."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def precision(self) -> str:
        """Its precision, which its texts depend on, as records state it: "float32", "bfloat16, int8"."""
        return self.dtype_name if self.quantize is None else f"{self.dtype_name}, {self.quantize}"

    @property
    def margin(self) -> float:
        """How close two scores of a near-tie are at most, in logits. It is the precision's, or more where
        Hugging Face's own model differs from itself by more."""
        return MARGINS[self.dtype]

    @property
    def exactness(self) -> str:
        """What holds for this target's texts: "bits", where each row of a pass has the same bits whatever
        rows stand beside it, as the target finds by trying, so that every text is plain decoding's, token for
        token; or "audited", where passes may round differently, which may turn near-ties within `margin`."""
        return "audited"

    @property
    @abstractmethod
    def place(self) -> str:
        """Machine, precision and whether it is compiled. Costs and tuned trees hold for one place."""

    @property
    @abstractmethod
    def generation_config(self) -> Any:
        """Hugging Face's `GenerationConfig`, for settings that the caller does not give."""

    @property
    def manner(self) -> str:
        """A hash of the generation_config: with another one the same weights may answer otherwise."""
        config = self.generation_config.to_json_string(ignore_metadata=True)
        return hashlib.sha256(config.encode()).hexdigest()[:12]

    @property
    @abstractmethod
    def values(self) -> str:
        """A hash of all weights, which even slight tuning changes. It is computed when first used."""

    @property
    def stamp(self) -> str:
        """A hash of weights and generation_config: with another one, answers may differ."""
        return hashlib.sha256(f"{self.fingerprint} {self.values} {self.manner}".encode()).hexdigest()[:16]

    @property
    @abstractmethod
    def described(self) -> dict[str, Any]:
        """The configuration that its config.json holds."""

    @property
    @abstractmethod
    def read_bytes(self) -> int:
        """Bytes that one pass reads: all weights but an embedding that is not also the LM head."""

    @abstractmethod
    def __call__(
        self, tree: Tree, cache: KVCache, taps: Sequence[str] = (), rows: Int[Tensor, "B K"] | None = None
    ) -> Output:
        """One pass over the tree's rows, written to the cache as scratch, with `Drafter.taps` as features.
        `rows` are the nodes whose logits are wanted, default all; K = 0 skips the LM head where it can."""

    @abstractmethod
    def extend(
        self, tokens: Int[Tensor, "B R"], layout: TreeLayout, cache: KVCache, after: int
    ) -> Float[Tensor, "B R V"]:
        """Logits of a draft model's further rows in a round, behind `after` scratch rows of earlier passes.
        The layout holds depths [#B, A] of all A = after + R scratch rows, and what new rows see [B, R, A]."""

    @abstractmethod
    def new_cache(self, batch: int, memory: Tensor | None = None) -> KVCache:
        """An empty cache for `batch` rows; `memory`: see `KVCache`."""

    @abstractmethod
    def lm_head(self, vocab: Int[Tensor, " Vd"] | None = None) -> nn.Module:
        """A module from states to logits over some tokens. For all (default) it shares the weights."""

    @abstractmethod
    def lend_products(self, module: nn.Module) -> None:
        """Let a drafter's linear layers multiply as the target's do, where that is quicker than torch. They
        get weights of 8 bits where the target is quantised."""

    @abstractmethod
    def widths(self, taps: Sequence[str]) -> list[int]:
        """The width of each tap."""

    @abstractmethod
    def features(self, rows: Sequence[Sequence[int]], taps: Sequence[str]) -> Float[Tensor, "B T F"]:
        """The taps at every token of whole texts, from one pass; past a row's end they mean nothing. Raises
        ValueError unless they are finite."""

    @abstractmethod
    def rope(self, block: int) -> tuple[list[float], float]:
        """(frequencies of one block's RoPE, factor of its cos and sin); no frequencies without RoPE."""

    @abstractmethod
    def part(
        self, blocks: Sequence[int], own: bool = False, vocab: Int[Tensor, " Vd"] | None = None
    ) -> "Target":
        """Some of the blocks between the same ends, as a target (Zhang et al. 2023, "Draft & Verify"), with
        logits of `vocab` (default: all); `own`: as copies, which may be changed. Raises ValueError if there
        is no such block, or none is named."""

    @abstractmethod
    def trunk(self) -> dict[str, nn.Module]:
        """The modules between embedding and LM head: its `blocks`, and what else is `between` the ends."""

    @abstractmethod
    def states(
        self,
        embedded: Float[Tensor, "B R H"],
        positions: Int[Tensor, "#B R"],
        visible: Bool[Tensor, "#B R S"],
        columns: Int[Tensor, "#B S"],
        earlier: Sequence[tuple[Tensor, Tensor]] = (),
    ) -> tuple[Float[Tensor, "B R H"], list[tuple[Tensor, Tensor]]]:
        """The final states of rows given as vectors, and their keys and values in each block, with gradients.

        Args:
            visible: which of S columns, `earlier` and then the rows, a row sees. Sliding windows narrow it.
            columns: positions of the columns; negative ones are in every window.
            earlier: keys and values of each block [B, heads, S − R, D].
        """

    @abstractmethod
    def explain_non_finite(self, tokens: Sequence[int]) -> str:
        """The error message for numbers that are not finite after `tokens`. It names the first module that
        returned such numbers."""


_locks: dict[str, AbstractContextManager[Any]] = {}


def lock(device: torch.device) -> AbstractContextManager[Any]:
    """A lock for passes, because modules keep state during one. All targets of a device share it: a draft
    model's passes are a part of its target's round. A thread that holds it may take it again."""
    return _locks.setdefault(str(device), RLock())
