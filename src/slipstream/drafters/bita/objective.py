"""How BiTA is trained: its recipe and its objective (SAR training, §3.1). Masks behind points of the target's
answers predict the tokens after the next one."""

from typing import Literal, final

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from pydantic import Field
from torch import Tensor, nn

from slipstream.core.drafter import FINAL
from slipstream.core.kv_cache import KVCache
from slipstream.core.target import Target
from slipstream.core.tree import chain
from slipstream.drafters import recipe
from slipstream.drafters.bita.model import Bita, BitaConfig, BitaHead
from slipstream.drafters.objective import Batch, LossOfLaw, NewHead, Objective
from slipstream.drafters.recipe import Depth, HeadSettings, Recipe
from slipstream.drafters.store import stored

DROPOUT = 0.1  # of the prompts, in training
SPREAD = 0.02  # of what is trained, to begin with


class BitaRecipe(Recipe):
    class Head(HeadSettings):
        depth: Depth = 3  # masks, and tokens that they draft
        prompts: int = Field(default=16, ge=0, le=1024)  # keys and values of each layer that the masks read
        deep: bool = True  # prompts are those; false: vectors that enter the target's first layer (Table 3)
        tree: str = "backbone-3x5"

    class Loss(recipe.Loss):
        hard: bool = True
        groups: int = Field(default=64, ge=1, le=4096)  # points of an answer that masks stand behind, at most

    class Optimizer(recipe.Optimizer):
        lr: float = Field(default=3e-2, gt=0, le=1)
        clip: float = Field(default=1.0, gt=0)

    method: Literal["bita"] = "bita"
    head: Head = Head()
    loss: Loss = Loss()
    optimizer: Optimizer = Optimizer()


class TrainedPrompts(nn.Module):
    """What is trained to become a head of this config. `deep`: see `BitaRecipe.Head`."""

    def __init__(self, config: BitaConfig, deep: bool, generator: torch.Generator) -> None:
        super().__init__()
        self.config, self.deep = config, deep or not config.prompts
        every = (config.layers, 2, config.prompts, config.heads, config.head_dim)
        shape = every if self.deep else (config.prompts, config.hidden_size)
        self.masks = nn.Parameter(SPREAD * torch.randn(config.depth, config.hidden_size, generator=generator))
        self.prompts = nn.Parameter(SPREAD * torch.randn(shape, generator=generator))

    def memory(self, target: Target) -> Float[Tensor, "L 2 P heads D"]:
        """Keys and values that the masks read."""
        if self.deep:
            return self.prompts
        P = self.config.prompts
        at = torch.zeros(1, P, dtype=torch.long, device=self.prompts.device)  # where no key is turned
        causal = torch.ones(1, P, P, dtype=torch.bool, device=at.device).tril()
        _, layers = target.states(self.prompts.to(target.dtype)[None], at, causal, at)
        return torch.stack([torch.stack([key[0], value[0]]).transpose(1, 2) for key, value in layers])


@final
class BitaObjective(Objective):
    """Cross-entropy of the masks' tokens, their mean."""

    drafts, reads_features = Bita, False

    @classmethod
    def new(cls, plan: NewHead) -> TrainedPrompts:
        plan.check_cache()
        settings: BitaRecipe.Head = plan.settings
        heads, head_dim = plan.sizes["num_key_value_heads"], plan.sizes["head_dim"]
        sizes = (plan.sizes["hidden_size"], plan.target.sizes.blocks, heads, head_dim)
        config = BitaConfig(*sizes, settings.depth, settings.prompts)
        return TrainedPrompts(config, settings.deep, plan.generator)

    def forward(
        self, batch: Batch, settings: BitaRecipe.Loss, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """As `Objective.forward`: the mean over all groups' masks, times the batch's counting tokens."""
        target, tokens, M = self._target, batch.tokens, self.head.config.depth
        B, S = tokens.shape
        hosts, real = groups(batch.counts, settings.groups, generator)
        # Mask j of host h predicts token ahead + 2, where ahead = h + j.
        ahead = hosts[..., None] + torch.arange(M, device=tokens.device)
        last = batch.counts.shape[1] - 1
        counted = batch.counts.gather(1, ahead.clamp(max=last).flatten(1)).view_as(ahead)
        learnt = real[..., None] & (ahead <= last) & counted
        context = target.new_cache(B)
        f = target(chain(tokens), context, (FINAL,), rows=tokens[:, :0]).features
        states = self._masks(context, hosts, generator)[learnt].float()
        at = (ahead + 1).clamp(max=S - 1)[learnt]  # whose state predicts the token
        row = torch.arange(B, device=tokens.device)[:, None, None].expand_as(ahead)[learnt]
        assert f is not None
        law = self._law(f[row, at].clone(), tokens[row, (at + 1).clamp(max=S - 1)], settings.hard)
        logits = self.lm_head(states)
        share = batch.counts.sum() / learnt.sum().clamp(min=1)  # not NaN in a batch without groups
        first = learnt.nonzero()[:, 2] == 0
        right = (logits.argmax(-1) == law.argmax(-1))[first].sum() / first.sum().clamp(min=1)
        return LossOfLaw.apply(logits, law, 1.0, 0.0).sum() * share, right * batch.counts.sum()

    def _masks(
        self, context: KVCache, hosts: Int[Tensor, "B G"], generator: torch.Generator
    ) -> Float[Tensor, "B G M H"]:
        """Final states of the masks. A mask sees the prompts, the text up to its host, and its group's
        earlier masks."""
        target, config = self._target, self.head.config
        (B, G), M, P = hosts.shape, config.depth, config.prompts
        memory = self.head.memory(target)
        keep = torch.rand(memory.shape, generator=generator, device=memory.device) >= DROPOUT
        memory = (memory * keep / (1 - DROPOUT)).to(target.dtype)
        S, layers = context.view, list[tuple[Tensor, Tensor]]()
        for (k, v), keys, values in zip(memory.transpose(2, 3), *context.stored, strict=True):
            key = torch.cat([k.expand(B, -1, -1, -1), keys[:, :, :S].clone()], 2)
            value = torch.cat([v.expand(B, -1, -1, -1), values[:, :, :S].clone()], 2)
            layers.append((key, value))
        masks = torch.arange(G * M, device=hosts.device)
        group, j = masks // M, masks % M
        positions = hosts[:, group] + 1 + j
        text = torch.arange(S, device=hosts.device)
        prompts = torch.ones(B, G * M, P, dtype=torch.bool, device=hosts.device)
        own = ((group[:, None] == group) & (j[:, None] >= j)).expand(B, -1, -1)
        visible = torch.cat([prompts, text <= hosts[:, group, None], own], 2)
        columns = torch.cat([text.new_full((B, P), -1), text.expand(B, -1), positions], 1)
        rows = self.head.masks.to(target.dtype).repeat(G, 1).expand(B, -1, -1)
        states, _ = target.states(rows, positions.clamp(max=target.window - 1), visible, columns, layers)
        return states.view(B, G, M, -1)

    def weights(self, dtype: torch.dtype) -> dict[str, Tensor]:
        head = BitaHead(self.head.config)
        with torch.no_grad():
            head.masks.copy_(self.head.masks)
            head.memory.copy_(self.head.memory(self._target))
        return stored(head.state_dict(), dtype)


def groups(
    counts: Bool[Tensor, "B T"], most: int, generator: torch.Generator
) -> tuple[Int[Tensor, "B G"], Bool[Tensor, "B G"]]:
    """At most `most` consecutive hosts from a random place, and which of them are real. Host h has read t_h,
    is a prompt's last token or later, and its first mask predicts t_{h+2}."""
    hosting = counts & F.pad(counts, (1, 0))[:, :-1]  # t_{h+1} is the answer's, too
    own = hosting.sum(1)
    G = max(1, min(most, int(own.max())))
    order = hosting.int().argsort(dim=1, descending=True, stable=True)  # hosts first
    share = torch.rand(len(counts), generator=generator, device=counts.device)
    offset = (share * (own - G + 1).clamp(min=1)).long()
    at = offset[:, None] + torch.arange(G, device=counts.device)
    return order.gather(1, at.clamp(max=counts.shape[1] - 1)), at < own[:, None]
