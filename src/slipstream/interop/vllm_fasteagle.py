"""FastEagle as a draft model of vLLM's EAGLE-3 proposer. Only vLLM imports this file.

In a round, vLLM 0.32 calls `combine_hidden_states` with the target's states, then the model over all tokens
that were read, and once more for each further token, with the second state that the call before returned.
FastEagle makes all its guesses in the first of these passes. Later calls return its stored states: the second
state holds the number of the row in the first pass.
"""

from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.models.llama_eagle import LlamaDecoderLayer, LlamaModel
from vllm.model_executor.models.llama_eagle3 import Eagle3LlamaForCausalLM
from vllm.model_executor.models.utils import maybe_prefix

BASE, DIGITS = 128, 4  # of a row's number: bfloat16 holds whole numbers up to 256


class Cascade(nn.Module):
    """g = FC(taps); h_1 = L_1(FC[g, e]); h_i = L_i(h_{i−1}), under the names of an exported directory."""

    use_aux_hidden_state, norm_before_fc = True, False  # which the loader of weights asks for
    hf_to_vllm_mapper, load_weights = LlamaModel.hf_to_vllm_mapper, LlamaModel.load_weights

    def __init__(self, vllm_config: VllmConfig, config: Any, depth: int, start: int, prefix: str) -> None:
        super().__init__()
        self.config, self.depth = config, depth  # guesses, and layers that run for them
        H, ids = config.hidden_size, config.eagle_aux_hidden_state_layer_ids

        def named(name: str) -> Any:
            return {"prefix": maybe_prefix(prefix, name)}

        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, H, **named("embed_tokens"))
        plain: Any = {"bias": False, "return_bias": False, "params_dtype": vllm_config.model_config.dtype}
        self.fuse = ReplicatedLinear(len(ids) * H, H, **named("fuse"), **plain)
        self.fc = ReplicatedLinear(2 * H, H, **named("fc"), **plain)
        self.norm, self.reads_final = RMSNorm(H, eps=config.rms_norm_eps), max(ids) == start
        names = [named(f"layers.{start + i}") for i in range(config.num_hidden_layers)]
        layers = [LlamaDecoderLayer(vllm_config, not config.input_norm, config=config, **x) for x in names]
        self.layers = nn.ModuleList(layers)

    def fused(self, taps: Tensor) -> Tensor:
        """The target's states [T, taps·H] as one. The last may be the final one, before its norm."""
        if self.reads_final:
            *others, last = taps.split(self.config.hidden_size, -1)
            taps = torch.cat([*others, self.norm(last.contiguous())], -1)
        return self.fuse(taps)

    def forward(self, input_ids: Tensor, positions: Tensor, fused: Tensor) -> Tensor:
        """The states of the layers that run [T, depth, H]."""
        x = first = self.fc(torch.cat([fused, self.embed_tokens(input_ids)], -1))
        states = []
        for layer in self.layers[: self.depth]:
            added, passed = layer(positions, x if self.config.cascade else first, None)
            x = added + passed
            states.append(x)
        return torch.stack(states, 1)


class VLLMFastEagle(Eagle3LlamaForCausalLM):
    """What vLLM calls."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        nn.Module.__init__(self)
        speculative = vllm_config.speculative_config
        assert speculative is not None
        self.config: Any = speculative.draft_model_config.hf_config
        depth, layers = speculative.num_speculative_tokens, self.config.num_hidden_layers
        if depth > layers:
            raise ValueError(f"num_speculative_tokens is {depth}; this FastEagle head drafts {layers} tokens")
        start = vllm_config.model_config.get_total_num_hidden_layers()
        self.model = Cascade(vllm_config, self.config, depth, start, maybe_prefix(prefix, "model"))
        draft, vocab = self.config.draft_vocab_size, self.config.vocab_size
        self.lm_head = ParallelLMHead(draft, self.config.hidden_size, prefix=maybe_prefix(prefix, "lm_head"))
        self.logits_processor = LogitsProcessor(draft, scale=getattr(self.config, "logit_scale", 1.0))
        ids = nn.Parameter(torch.zeros(draft, dtype=torch.long), requires_grad=False)
        self.draft_id_to_target_id = None if draft == vocab else ids
        self.use_parallel_drafting = False
        self.call = 0  # of this round
        self.states: Any = None  # of the first call

    def combine_hidden_states(self, hidden_states: Tensor) -> Tensor:
        """A round begins."""
        self.call = 0
        return self.model.fused(hidden_states)

    def forward(
        self, input_ids: Tensor, positions: Tensor, hidden_states: Tensor, inputs_embeds: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The states that give this call's tokens, and what the next call gets."""
        call, self.call = self.call, (self.call + 1) % self.model.depth
        if call == 0:
            self.states = self.model(input_ids, positions, hidden_states)
            rows, carried = torch.arange(len(input_ids), device=hidden_states.device), hidden_states.clone()
            for digit in range(DIGITS):
                carried[:, digit] = rows // BASE**digit % BASE
            return self.states[:, 0], carried
        rows = sum(hidden_states[:, digit].long() * BASE**digit for digit in range(DIGITS))
        return self.states[rows.clamp(0, len(self.states) - 1), call], hidden_states
