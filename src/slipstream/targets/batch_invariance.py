"""What a target finds out about itself: is our attention right for it, and do its rows round alike?"""

from typing import Any

import torch

from slipstream.core.target import Target
from slipstream.core.tree import Tree, chain

READ = 16  # tokens before the rows
ROWS = (1, 2, 3, 5, 8, 13, 21, 34, 64)  # of the passes that are compared
AGREE = 0.3  # of the spread of the logits: wrong attention is off by as much as they are


def _text(target: Target, length: int) -> torch.Tensor:
    """Tokens from all over the vocabulary."""
    return (torch.arange(length, device=target.device) * 7919 + 1)[None] % target.vocab


@torch.inference_mode()
def agrees(target: Target, plain: Any) -> bool:
    """Whether the target says of a few tokens what Hugging Face's own model says, up to rounding."""
    text = _text(target, 4)
    theirs = plain(text, use_cache=False).logits.float()
    try:
        mine = target(chain(text), target.new_cache(1)).logits
    except torch.OutOfMemoryError:
        raise
    except Exception:  # layers that compute with the mask, as Doge's; a GPU that Triton does not compile for
        return False
    return bool((mine - theirs).pow(2).mean().sqrt() <= AGREE * theirs.std())


@torch.inference_mode()
def own_noise(target: Target, plain: Any) -> float:
    """By how much Hugging Face's own model differs from itself, in logits: a text in one pass, in a batch,
    and token by token behind its cache. Where rounding routes a token to other experts, it is far more."""
    text = _text(target, READ)
    whole = plain(text, use_cache=False).logits[0].float()
    batch = plain(text.expand(3, -1), use_cache=False).logits[0].float()
    cache, steps = None, []
    for i in range(READ):
        out = plain(text[:, i : i + 1], past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        steps.append(out.logits[0].float())
    return max(float((other - whole).abs().max()) for other in (batch, torch.cat(steps)))


@torch.inference_mode()
def rounds_alike(target: Target) -> bool:
    """Whether each row's logits are the same bits in passes of 1 to 64 rows, and in a tree as in a chain."""
    text = _text(target, READ + ROWS[-1])
    read, rest = text[:, :READ], text[:, READ:]

    def logits(tree: Tree) -> torch.Tensor:
        cache = target.new_cache(1)
        target(chain(read), cache, rows=read[:, :0])
        cache.keep(None, torch.tensor([READ], device=text.device))
        return target(tree, cache).logits[0]

    whole = logits(chain(rest))
    if not all(torch.equal(logits(chain(rest[:, :rows])), whole[:rows]) for rows in ROWS):
        return False
    # Nodes 0, 2, 4, … are the same chain, and each has a sibling.
    nodes = torch.arange(16, device=text.device)
    parents = ((nodes - 1) // 2 * 2).clamp(min=0)[None]
    tokens = torch.where(nodes % 2 == 0, rest[:, nodes // 2], rest[:, nodes + 16])
    return torch.equal(logits(Tree(tokens, parents, depth=8))[::2], whole[:8])
