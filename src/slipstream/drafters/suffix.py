"""Matches by counts, as in SuffixDecoding (Oliaro et al. 2024) and SAM decoding (Hu et al. 2024): a tree of
what followed earlier occurrences of the text's end, in this text and, where asked, in earlier answers."""

from dataclasses import dataclass, replace
from heapq import heappop, heappush
from math import log
from typing import NamedTuple, final

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from slipstream.core.device import is_host
from slipstream.core.drafter import Drafter, ScratchSlots
from slipstream.core.sampling import Sampler
from slipstream.core.span import Span
from slipstream.core.tree import PAD, Tree, chain
from slipstream.core.tree_spec import DEEPEST, ROWS, TreeSpec
from slipstream.drafters.ngram import TextState, match_lengths

LONGEST = 16  # tokens of a match that count
MATCHES = 8  # in the text, and as many in the memory: the longest, and of equally long ones the latest
POWER, DOUBT = 1.5, 4.0  # a match of n tokens weighs n^POWER; that none of them goes on weighs DOUBT
EARLIER = 0.25  # of the weight, for a match in an earlier answer


class Memory:
    """The last tokens of answers that have left, in a ring of fixed size, and the salt of each. `PAD` stands
    behind each answer."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.ring = torch.full((1, size), PAD, device=device)
        self.salts = torch.zeros_like(self.ring)
        self.written = 0

    def put(self, text: Int[Tensor, " n"], salt: Int[Tensor, ""]) -> None:
        """Remember an answer, in the place of the oldest tokens."""
        size = self.ring.shape[1]
        text = F.pad(text, (0, 1), value=PAD)[-size:]
        at = (self.written + torch.arange(len(text), device=text.device)) % size
        self.ring[0, at], self.salts[0, at] = text, salt
        self.written += len(text)


class Matches(NamedTuple):
    """K continuations of each text, `PAD` behind their ends."""

    tokens: Int[Tensor, "B K D"]
    lengths: Int[Tensor, "B K"]  # how many tokens matched before them
    worth: Float[Tensor, " K"]  # factors of their weights


@dataclass
class SuffixState(TextState):
    asked: Int[Tensor, " B"]  # tokens of the prompt; PAD before the first guess
    salts: Int[Tensor, " B"]
    memory: Memory | None
    found: Matches | None = None  # at this root

    def set_salts(self, salts: Int[Tensor, " B"]) -> None:
        self.salts = salts

    def select(self, order: list[int]) -> None:
        """See `State`. Answers that leave are remembered."""
        for row in sorted(set(range(len(self.root))).difference(order)):
            begin, end = int(self.asked[row]), int(self.length[row])
            if self.memory is not None and begin >= 0:
                text = torch.cat([self.text[row, begin:end], self.root[row : row + 1]])
                self.memory.put(text, self.salts[row])
        super().select(order)


@final
class Suffix(Drafter):
    """Proposes a tree of the most probable nodes among all that followed.

    A match of n tokens weighs n^1.5. It is one token longer for each that its continuation shares with the
    draft. The chance of a token is the weight of the matches that go on with it, over the weight of all that
    came so far and 4 for none of them. A node's score is the logarithm of the chances on its path.

    Args:
        rows: of the target's pass, the root's included.
        depth: tokens drafted in a row, at most.
        remember: thousands of tokens of earlier answers that are matched, too. These answers were drafted by
            this object, and the oldest are forgotten. Texts stay the same, whatever it remembers.

    Raises:
        ValueError: a number that leaves nothing to draft, or beyond what a pass can hold.
    """

    def __init__(self, rows: int = 8, depth: int = 16, remember: int = 0) -> None:
        if not (2 <= rows <= ROWS and 1 <= depth <= DEEPEST and 0 <= remember <= 1024):
            raise ValueError(
                f"suffix got rows={rows}, depth={depth}, remember={remember}; it needs rows from 2 to "
                f"{ROWS:,}, depth from 1 to {DEEPEST} and remember from 0 to 1024"
            )
        self.rows, self.depth, self.remember = rows, min(depth, rows - 1), remember
        self.remembers = remember > 0
        self._memory: Memory | None = None

    def start(self, batch: int, device: torch.device) -> SuffixState:
        if self.remember and (self._memory is None or self._memory.ring.device != device):
            self._memory = Memory(self.remember * 1000, device)
        zeros = torch.zeros(batch, dtype=torch.long, device=device)
        return SuffixState(
            zeros, zeros.new_zeros(batch, 0), zeros.clone(), zeros + PAD, zeros.clone(), self._memory
        )

    def scratch_slots(self, spec: TreeSpec | None = None) -> ScratchSlots:
        rows = self.rows if spec is None else spec.nodes
        return ScratchSlots(rows, rows)

    def update(self, span: Span, state: SuffixState) -> None:
        state.read(span)
        state.found = None

    def propose(self, state: SuffixState, sampler: Sampler, spec: TreeSpec | None = None) -> Tree:
        nodes, depth = (self.rows, self.depth) if spec is None else (spec.nodes, spec.depth)
        state.asked = state.length.where(state.asked < 0, state.asked)
        if len(state.root) == 1 and state.memory is None and is_host(state.root):
            return _grown_by_host(state, nodes - 1, depth)
        if state.found is None:
            state.found = self._matches(state)
        matches = state.found._replace(tokens=state.found.tokens[..., :depth])
        return grown(state.root, matches, nodes - 1)

    def _matches(self, state: SuffixState) -> Matches:
        """The best of the text's own, and of those that it remembers."""
        depth, ends = self.depth, state.ends(LONGEST)
        slots, lengths = match_lengths(state.viewed(), ends)
        slots, lengths = _best(slots, lengths.where(slots < state.length[:, None], 0))
        own = Matches(state.following(slots, depth), lengths, torch.ones(slots.shape[1], device=slots.device))
        if state.memory is None:
            return own
        ring = state.memory.ring
        slots, lengths = match_lengths(ring, ends)
        own_salt = state.memory.salts[0, slots] == state.salts[:, None]
        slots, lengths = _best(slots, lengths.where(own_salt, 0))
        at = slots[..., None] + 1 + torch.arange(depth, device=slots.device)
        tokens = torch.cat([own.tokens, ring[0, at % ring.shape[1]]], 1)
        worth = torch.cat([own.worth, EARLIER + torch.zeros(slots.shape[1], device=slots.device)])
        return Matches(tokens, torch.cat([own.lengths, lengths], 1), worth)


def _best(
    slots: Int[Tensor, " P"], lengths: Int[Tensor, "B P"]
) -> tuple[Int[Tensor, "B K"], Int[Tensor, "B K"]]:
    """The longest matches, and of equally long ones the latest."""
    age = torch.arange(len(slots), device=slots.device)
    best = (lengths * len(slots) + age).topk(min(MATCHES, len(slots)), sorted=True).indices
    return slots[best], lengths.gather(1, best)


def grown(root: Int[Tensor, " B"], matches: Matches, nodes: int) -> Tree:
    """The tree of the `nodes` most probable continuations below the root, which are beginnings of matches.

    Continuation k up to its token d is node d·K + k. Where an earlier one begins alike, it shares that node.
    """
    tokens, (_, K, D) = matches.tokens.transpose(1, 2), matches.tokens.shape
    zero = torch.zeros(len(root), 1, device=root.device)
    bare = replace(chain(root[:, None]), scores=zero)
    if K == 0:
        return bare
    there = (tokens >= 0) & (matches.lengths > 0)[:, None]
    alike = ((tokens[..., None] == tokens[:, :, None]) & there[:, :, None]).cumprod(1)  # the last K: others
    shared, number = alike.argmax(3), torch.arange(D * K, device=root.device).view(D, K)
    scores = _scores(matches, alike).masked_fill(shared != number[0], -torch.inf).flatten(1)
    count = min(nodes, D * K)
    if is_host(scores):
        count = min(count, int((scores > -torch.inf).sum(1).max()))
        if count == 0:
            return bare
    kept = scores.sort(dim=1, descending=True, stable=True).indices[:, :count].sort(dim=1).values
    scores = scores.gather(1, kept)
    nothing = scores == -torch.inf
    above = F.pad(shared + number[:, :1], (0, 0, 1, -1), value=-1).flatten(1).gather(1, kept)
    parents = torch.searchsorted(kept, above, right=True).masked_fill(nothing, 0)  # slots count the root
    tokens = tokens.flatten(1).gather(1, kept).masked_fill(nothing, PAD)
    return Tree(
        torch.cat([root[:, None], tokens], 1),
        F.pad(parents, (1, 0)),
        D,
        scores=torch.cat([zero, scores], 1),
    )


def _grown_by_host(state: TextState, nodes: int, depth: int) -> Tree:
    """`grown` of what one text holds, in lists: so many small tensors take the host five times as long."""
    (root,), (length,) = state.root.tolist(), state.length.tolist()
    line = state.text[0, :length].numpy()
    text = [*line.tolist(), root]
    matches = []
    for slot in (line == root).nonzero()[0].tolist():
        n = 1
        while n < min(LONGEST, slot + 1) and text[slot - n] == text[length - n]:
            n += 1
        matches.append((n, slot))
    matches = sorted(matches, reverse=True)[:MATCHES]

    def following(slot: int, d: int) -> int:
        return text[slot + 1 + d % (length - slot)]

    # Nodes yet to grow: score, number, matches up to the node, their tokens' depth, parent's number.
    open_nodes = [(0.0, -1, matches, 0, -1)] if matches and depth else []
    found: dict[int, tuple[int, int, float]] = {}  # token, parent's number and score, by number
    while open_nodes and len(found) <= nodes:
        score, number, some, d, above = heappop(open_nodes)
        if number >= 0:
            found[number] = following(some[0][1], d - 1), above, -score
        if d == depth:
            continue
        alike: dict[int, list[tuple[int, int]]] = {}
        for match in some:
            alike.setdefault(following(match[1], d), []).append(match)
        came = sum((n + d) ** POWER for n, _ in some) + DOUBT
        for group in alike.values():
            chance = sum((n + d) ** POWER for n, _ in group) / came
            of_group = d * len(matches) + matches.index(group[0])
            heappush(open_nodes, (score - log(chance), of_group, group, d + 1, number))
    kept = sorted(sorted(found, key=lambda number: -found[number][2])[:nodes])
    slots = {-1: 0, **{number: slot for slot, number in enumerate(kept, 1)}}
    device = state.root.device
    tokens = torch.tensor([[root, *(found[number][0] for number in kept)]], device=device)
    parents = torch.tensor([[0, *(slots[found[number][1]] for number in kept)]], device=device)
    scores = torch.tensor([[0.0, *(found[number][2] for number in kept)]], device=device)
    return Tree(tokens, parents, depth, scores=scores) if kept else replace(chain(tokens), scores=scores)


def _scores(matches: Matches, alike: Int[Tensor, "B D K K"]) -> Float[Tensor, "B D K"]:
    """Log probabilities of each continuation up to each of its tokens; `alike` says which others share it."""
    length = matches.lengths[:, None] + torch.arange(alike.shape[1], device=alike.device)[:, None]
    weights = (length.pow(POWER) * matches.worth)[:, :, None]
    came = F.pad(alike, (0, 0, 0, 0, 1, -1), value=1)  # those alike before this token
    return ((alike * weights).sum(3) / ((came * weights).sum(3) + DOUBT)).log().cumsum(1)
