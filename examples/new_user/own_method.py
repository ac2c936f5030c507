"""A drafting method of one's own, from a file that is no part of Slipstream.

slipstream --plugin ./own_method.py generate "Count from 1 to 20." --drafter recent
python own_method.py    # the same, a certificate, and a race beside n-grams
"""

import subprocess
import sys
from dataclasses import dataclass

import torch

from slipstream import Drafter, Method, Sampler, Span, State, Target, Tree, chain, register
from slipstream.core.tree_spec import TreeSpec

ASKED = "Count from 1 to 20."


@dataclass
class RecentState(State):
    """The last tokens of each text, the newest last."""

    recent: torch.Tensor  # [B, depth]


class Recent(Drafter):
    """Guesses that the text goes on as its last `depth` tokens did: right in a list, wrong elsewhere."""

    def __init__(self, target: Target, depth: int = 4) -> None:
        self.depth, self.rows = depth, depth + 1

    def start(self, batch: int, device: torch.device) -> RecentState:
        """Nothing is known yet."""
        zeros = torch.zeros(batch, self.depth, dtype=torch.long, device=device)
        return RecentState(zeros[:, 0].clone(), zeros)

    def update(self, span: Span, state: State) -> None:
        """Remember what the target has read, without padding."""
        assert isinstance(state, RecentState)
        for token, real in zip(span.nexts.T, span.mask.T, strict=True):
            moved = torch.cat([state.recent[:, 1:], token[:, None]], 1)
            state.recent = moved.where(real[:, None], state.recent)
        state.root = span.last(span.nexts)

    def propose(self, state: State, sampler: Sampler, spec: TreeSpec | None = None) -> Tree:
        """The root, and behind it the tokens that came before."""
        assert isinstance(state, RecentState)
        return chain(torch.cat([state.root[:, None], state.recent], 1))


register(Method("recent", "guesses that the last tokens come again", make="own_method:Recent"))

if __name__ == "__main__":
    slipstream = ["slipstream", "--plugin", __file__]
    answer = ["generate", ASKED, "--max-new-tokens", "48", "--drafter"]
    said = [
        subprocess.run([*slipstream, *answer, name], check=True, stdout=subprocess.PIPE, text=True).stdout
        for name in ("vanilla", "recent", "recent:depth=2")
    ]
    print(said[0])
    if len(set(said)) > 1:
        sys.exit("the drafter changed the text")
    short = ["--limit", "2", "--max-new-tokens", "24"]
    subprocess.run([*slipstream, "certify", "--drafter", "recent", "--draws", "8", *short], check=True)
    subprocess.run([*slipstream, "bench", "--drafter", "recent", "--drafter", "ngram", *short], check=True)
