"""Drafts that repeat the text, without a pass of a model.

`NGram` is prompt lookup decoding (Saxena 2023; vLLM's `ngram`): what followed the longest earlier match of
the text's end. `Suffix` counts, as SuffixDecoding (Oliaro et al. 2024) and SAM decoding (Hu et al. 2024) do:
a tree of what followed all earlier matches, in this text and, where asked, in earlier answers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from math import log
from typing import Any, NamedTuple, final

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from slipstream.core.device import is_host
from slipstream.core.drafter import Drafter, ScratchSlots, State, appended
from slipstream.core.sampling import Sampler
from slipstream.core.span import Span
from slipstream.core.tree import PAD, Tree, chain
from slipstream.core.tree_spec import DEEPEST, ROWS, TreeSpec

LONGEST = 16  # tokens of a match that count
MATCHES = 8  # in the text, and as many in the memory: the longest, and of equally long ones the latest
POWER, DOUBT = 1.5, 4.0  # a match of n tokens weighs n^POWER; that none of them goes on weighs DOUBT
EARLIER = 0.25  # of the weight, for a match in an earlier answer


@dataclass
class TextState(State):
    by_token = ("text",)
    text: Int[Tensor, "B S"]  # the last slot is written in the place of padding
    length: Int[Tensor, " B"]  # tokens of text; the root comes behind them

    def read(self, span: Span) -> None:
        """Append a span to the text."""
        self.text = appended(self.text, span)
        self.length, self.root = span.start + span.count, span.root

    def ends(self, longest: int) -> Int[Tensor, "B n"]:
        """The last tokens, the root first; before the text's beginning what equals no token."""
        at = self.length[:, None] - torch.arange(1, longest, device=self.text.device)
        tokens = self.text.gather(1, at.clamp(min=0)).masked_fill(at < 0, PAD - 1)
        return torch.cat([self.root[:, None], tokens], 1)

    def best_matches(self, longest: int, count: int) -> tuple[Int[Tensor, "B K"], Int[Tensor, "B K"]]:
        """`best_matches` of at most `longest` tokens, in the text before the root."""
        # Slots that no row has filled are left out where the host may look.
        text = self.text[:, : int(self.length.max())] if is_host(self.length) else self.text
        return best_matches(text, self.ends(longest), count, lambda slots: slots < self.length[:, None])

    def matched(self, sizes: Sequence[int]) -> list[int]:
        """For each text, how many of these sizes, the smallest first, its end has a match of, the root
        included. In NumPy: tensors take many times as long for so little."""
        texts, counts = zip(self.text.numpy(), self.root.tolist(), self.length.tolist(), strict=True), []
        for text, root, length in texts:
            slots, line = (text[:length] == root).nonzero()[0].tolist(), text[:length]
            longest = max((_match_length(line, slot, sizes[-1]) for slot in slots), default=0)
            counts.append(sum(size <= longest for size in sizes))
        return counts

    def following(self, slots: Int[Tensor, "B K"], depth: int) -> Int[Tensor, "B K D"]:
        """What stands behind slots, up to the root. There it starts again: repetitions tend to go on."""
        period = (self.length[:, None] - slots).clamp(min=1)[..., None]
        at = slots[..., None] + 1 + torch.arange(depth, device=slots.device) % period
        full = torch.cat([self.text, self.root[:, None]], 1)
        at = torch.where(at >= self.length[:, None, None], full.shape[1] - 1, at)
        return full.gather(1, at.flatten(1)).view(at.shape)


def best_matches(
    table: Int[Tensor, "#B S"], ends: Int[Tensor, "B n"], count: int, readable: Callable[[Tensor], Tensor]
) -> tuple[Int[Tensor, "B K"], Int[Tensor, "B K"]]:
    """The `count` best matches of the ends of texts, newest token first, in a table: the last slot of each,
    and its length, which is 0 for no match. Best are the longest, and of equally long ones the latest.
    `readable` says which [B, P] of P slots each text may read."""
    slots = torch.arange(table.shape[1], device=table.device)
    if is_host(table):  # where nothing matches
        slots = slots[(table == ends[:, :1]).any(0)]
    at = slots[:, None] - torch.arange(ends.shape[1], device=table.device)
    same = (table[:, at.clamp(min=0)] == ends[:, None]) & (at >= 0)
    lengths = same.cumprod(2).sum(2).where(readable(slots), 0)
    age = torch.arange(len(slots), device=slots.device)
    best = (lengths * len(slots) + age).topk(min(count, len(slots)), sorted=True).indices
    return slots[best], lengths.gather(1, best)


def _match_length(text: Any, slot: int, longest: int) -> int:
    """How many tokens up to a slot are those before the root, which stands there as well; the root counts."""
    n = 1
    while n < min(longest, slot + 1) and text[slot - n] == text[-n]:
        n += 1
    return n


@final
class NGram(Drafter):
    """Proposes a chain of up to `depth` tokens.

    Args:
        depth: tokens drafted per step.
        longest: matches are compared up to this length. Of equally long ones the latest is taken.
        shortest: a match must have at least this length. With 1, drafts are more frequent and worse.

    Raises:
        ValueError: no match can meet the limits.
    """

    def __init__(self, depth: int = 7, longest: int = 4, shortest: int = 2) -> None:
        if depth < 1 or not 1 <= shortest <= longest:
            raise ValueError(
                f"ngram got depth={depth}, longest={longest}, shortest={shortest}; it needs depth >= 1 and 1 "
                "<= shortest <= longest"
            )
        self.depth, self.rows = depth, depth + 1
        self.longest, self.shortest = longest, shortest

    def start(self, batch: int, device: torch.device) -> TextState:
        zeros = torch.zeros(batch, dtype=torch.long, device=device)
        return TextState(zeros, zeros.new_zeros(batch, 0), zeros.clone())

    def update(self, span: Span, state: TextState) -> None:
        state.read(span)

    def propose(self, state: TextState, sampler: Sampler, spec: TreeSpec | None = None) -> Tree:
        slots, lengths = state.best_matches(self.longest, 1)
        matched = (lengths >= self.shortest).any(1)
        if is_host(matched) and not bool(matched.any()):
            return chain(state.root[:, None])
        depth = self.depth if spec is None else min(self.depth, spec.depth)
        draft = state.following(slots, depth)[:, 0].masked_fill(~matched[:, None], PAD)
        return chain(torch.cat([state.root[:, None], draft], 1))


class AnswerMemory:
    """The last tokens of answers that have left, each with its salt, in a ring of fixed size. `PAD` stands
    behind each answer."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.ring = torch.full((1, size), PAD, device=device)
        self.salts = torch.zeros_like(self.ring)
        self.written = 0

    def put(self, text: Int[Tensor, " n"], salt: Int[Tensor, ""]) -> None:
        size = self.ring.shape[1]  # the oldest tokens make place
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
    prompt: Int[Tensor, " B"]  # tokens of the prompt; PAD before the first guess
    salts: Int[Tensor, " B"]
    memory: AnswerMemory | None

    def set_salts(self, salts: Int[Tensor, " B"]) -> None:
        self.salts = salts

    def select(self, order: list[int]) -> None:
        """See `State`. Answers that leave are remembered."""
        for row in sorted(set(range(len(self.root))).difference(order)):
            begin, end = int(self.prompt[row]), int(self.length[row])
            if self.memory is not None and begin >= 0:
                text = torch.cat([self.text[row, begin:end], self.root[row : row + 1]])
                self.memory.put(text, self.salts[row])
        super().select(order)

    def best_continuations(self, depth: int) -> Matches:
        """Behind the best matches in the text, and in those that are remembered."""
        slots, lengths = self.best_matches(LONGEST, MATCHES)
        worth = torch.ones(slots.shape[1], device=slots.device)
        own = Matches(self.following(slots, depth), lengths, worth)
        if self.memory is None:
            return own
        ring, salts = self.memory.ring, self.memory.salts[0]

        def readable(slots: Tensor) -> Tensor:
            return salts[slots] == self.salts[:, None]

        slots, lengths = best_matches(ring, self.ends(LONGEST), MATCHES, readable)
        at = slots[..., None] + 1 + torch.arange(depth, device=slots.device)
        tokens = torch.cat([own.tokens, ring[0, at % ring.shape[1]]], 1)
        worth = torch.cat([own.worth, torch.full((slots.shape[1],), EARLIER, device=slots.device)])
        return Matches(tokens, torch.cat([own.lengths, lengths], 1), worth)


@final
class Suffix(Drafter):
    """Proposes a tree of the most probable nodes among all that followed.

    A match of n tokens weighs n^1.5, and is one token longer for each that its continuation shares with the
    draft. The chance of a token is the weight of the matches that go on with it, over that of all that came
    so far and 4 for none of them. A node's score is the logarithm of the chances on its path.

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
        self._memory: AnswerMemory | None = None

    def start(self, batch: int, device: torch.device) -> SuffixState:
        if self.remember and (self._memory is None or self._memory.ring.device != device):
            self._memory = AnswerMemory(self.remember * 1000, device)
        zeros = torch.zeros(batch, dtype=torch.long, device=device)
        text = zeros.new_zeros(batch, 0)
        return SuffixState(zeros, text, zeros.clone(), zeros + PAD, zeros.clone(), self._memory)

    def scratch_slots(self, spec: TreeSpec | None = None) -> ScratchSlots:
        rows = self.rows if spec is None else spec.nodes
        return ScratchSlots(rows, rows)

    def update(self, span: Span, state: SuffixState) -> None:
        state.read(span)

    def propose(self, state: SuffixState, sampler: Sampler, spec: TreeSpec | None = None) -> Tree:
        nodes, depth = (self.rows, self.depth) if spec is None else (spec.nodes, spec.depth)
        state.prompt = state.length.where(state.prompt < 0, state.prompt)
        if len(state.root) == 1 and state.memory is None and is_host(state.root):
            return _grown_by_host(state, nodes - 1, depth)
        return grown(state.root, state.best_continuations(min(depth, self.depth)), nodes - 1)


def grown(root: Int[Tensor, " B"], matches: Matches, nodes: int) -> Tree:
    """The tree of the `nodes` most probable beginnings of matches below the root. Continuation k up to its
    token d is node d·K + k. Where an earlier one begins alike, it shares that node."""
    tokens, (_, K, D) = matches.tokens.transpose(1, 2), matches.tokens.shape
    zero = torch.zeros(len(root), 1, device=root.device)
    bare = replace(chain(root[:, None]), scores=zero)
    if K == 0:
        return bare
    real = (tokens >= 0) & (matches.lengths > 0)[:, None]
    alike = ((tokens[..., None] == tokens[:, :, None]) & real[:, :, None]).cumprod(1)  # the last K: others
    shared, number = alike.argmax(3), torch.arange(D * K, device=root.device).view(D, K)
    length = matches.lengths[:, None] + torch.arange(D, device=root.device)[:, None]
    weights = (length.pow(POWER) * matches.worth)[:, :, None]
    before = F.pad(alike, (0, 0, 0, 0, 1, -1), value=1)  # those alike before this token
    chances = (alike * weights).sum(3) / ((before * weights).sum(3) + DOUBT)
    scores = chances.log().cumsum(1).masked_fill(shared != number[0], -torch.inf).flatten(1)
    count = min(nodes, D * K)
    if is_host(scores):
        count = min(count, int((scores > -torch.inf).sum(1).max()))
        if count == 0:
            return bare
    chosen = scores.sort(dim=1, descending=True, stable=True).indices[:, :count].sort(dim=1).values
    scores = scores.gather(1, chosen)
    absent = scores == -torch.inf
    above = F.pad(shared + number[:, :1], (0, 0, 1, -1), value=-1).flatten(1).gather(1, chosen)
    parents = torch.searchsorted(chosen, above, right=True).masked_fill(absent, 0)  # slots count the root
    tokens = torch.cat([root[:, None], tokens.flatten(1).gather(1, chosen).masked_fill(absent, PAD)], 1)
    return Tree(tokens, F.pad(parents, (1, 0)), D, scores=torch.cat([zero, scores], 1))


def _grown_by_host(state: TextState, nodes: int, depth: int) -> Tree:
    """`grown` of what one text holds, in lists: so many small tensors take the host five times as long."""
    (root,), (length,) = state.root.tolist(), state.length.tolist()
    line = state.text[0, :length].numpy()
    known = line.tolist()
    matches = [(_match_length(known, slot, LONGEST), slot) for slot in (line == root).nonzero()[0].tolist()]
    matches, text = sorted(matches, reverse=True)[:MATCHES], [*known, root]

    def following(slot: int, d: int) -> int:
        return text[slot + 1 + d % (length - slot)]

    # Nodes to grow: score, number, the matches up to the node, its depth, its parent's number.
    frontier = [(0.0, -1, matches, 0, -1)] if matches and depth else []
    drafted = {-1: (root, -1, 0.0)}  # by number: token, parent's number, score
    while frontier and len(drafted) <= nodes + 1:
        score, number, members, d, above = heappop(frontier)
        if number >= 0:
            drafted[number] = following(members[0][1], d - 1), above, -score
        if d == depth:
            continue
        by_token: dict[int, list[tuple[int, int]]] = {}
        for match in members:
            by_token.setdefault(following(match[1], d), []).append(match)
        total = sum((n + d) ** POWER for n, _ in members) + DOUBT
        for group in by_token.values():
            chance = sum((n + d) ** POWER for n, _ in group) / total
            child = d * len(matches) + matches.index(group[0])
            heappush(frontier, (score - log(chance), child, group, d + 1, number))
    best = sorted(sorted(drafted, key=lambda number: -drafted[number][2])[: nodes + 1])
    places = {number: place for place, number in enumerate(best)}
    lines = [(token, places[above], score) for token, above, score in (drafted[number] for number in best)]
    tokens, parents, scores = (torch.tensor([line]) for line in zip(*lines, strict=True))
    if len(best) == 1:
        return replace(chain(tokens), scores=scores)
    return Tree(tokens, parents, depth, scores=scores)
