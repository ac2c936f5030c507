"""Grammar: which texts may be said. A walk through it goes along with a text, and with guesses at its end.

A grammar is a mask at each node that verification walks to, made from the tokens on the way there. Trees lose
the nodes that it forbids, and gain the tokens that it forces, which are certain and cost no draft.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Optional

import torch
from jaxtyping import Bool
from torch import Tensor

from slipstream.core.tree import PAD, Tree

FORCED = 64  # tokens that a grammar adds to a tree, at most
WIDEST = 128  # nodes of a pass in which texts without such tokens wait for those of others, at most
ROWS = 64  # of a pass that cost as much as the pass itself, about: what a forced token must be worth


class DeadEnd(ValueError):
    """A grammar that was read, and cannot go on behind what it led to."""


@dataclass(frozen=True)
class GrammarLimits:
    """What reading a grammar may take, in a process of its own. Beyond it the grammar is refused.

    Attributes:
        seconds: of processor time.
        memory: in MiB.
    """

    seconds: float = 2.0
    memory: int = 256

    def __post_init__(self) -> None:
        for name in ("seconds", "memory"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 2**31:
                raise ValueError(f"{name} of GrammarLimits is {value!r}: give a number above 0")


class Walk(ABC):
    """Where a text stands in its grammar. It never changes: a token leads to another walk. Whatever it is
    asked, it may raise `DeadEnd`."""

    @property
    @abstractmethod
    def allowed(self) -> Bool[Tensor, " V"] | None:
        """Which tokens may come next; None: any, as the text has ended."""

    @property
    @abstractmethod
    def forced(self) -> list[int]:
        """The tokens that must come next, one by one, as far as there is no choice."""

    @abstractmethod
    def behind(self, token: int) -> Optional["Walk"]:
        """The walk with one more token; None: it may not come."""


class Grammar(ABC):
    """A set of texts, in the tokens of one target."""

    @abstractmethod
    def begin(self) -> Walk:
        """The walk of a text without tokens."""


@dataclass
class Nodes:
    """A row of a tree that is made anew: its nodes, each behind its parent."""

    slots: list[int]  # in the tree before; PAD for a new node
    scored: list[int]  # the node before whose score it has: a forced token's is that of its parent
    tokens: list[int]
    parents: list[int]
    depths: list[int]

    def add(self, slot: int, token: int, parent: int) -> int:
        """Append a node. Returns its slot here."""
        self.slots.append(slot)
        self.scored.append(self.scored[parent] if slot == PAD else slot)
        self.tokens.append(token)
        self.parents.append(parent)
        self.depths.append(self.depths[parent] + 1)
        return len(self.slots) - 1

    def child(self, parent: int, token: int) -> int | None:
        """The slot of the parent's child with this token, if there is one."""
        pairs = enumerate(zip(self.parents, self.tokens, strict=True))
        return next((i for i, pair in pairs if i and pair == (parent, token)), None)


def guided(tree: Tree, walks: Sequence[Walk | None], forces: Sequence[bool]) -> tuple[Tree, bool]:
    """The tree without the nodes that each row's grammar forbids, and, where it `forces`, with the tokens
    that must follow the root; and whether there are such. Rows without a grammar stay. So does a tree of
    sampled children, which were drawn from laws without forbidden tokens: to drop some would not be exact."""
    if tree.law is not None or all(walk is None for walk in walks):
        return tree, False
    parents = tree.parent_slots().expand_as(tree.tokens).tolist()
    lines = zip(tree.tokens.tolist(), parents, walks, strict=True)
    rows = [_kept(*line) for line in lines]
    must = must_follow(walks, tree.tokens[:, 0].tolist())
    must = [tokens if wanted else [] for tokens, wanted in zip(must, forces, strict=True)]
    most = _worth([len(row.slots) for row in rows], [len(tokens) for tokens in must])
    for row, tokens in zip(rows, must, strict=True):
        at = 0
        for token in tokens[:most]:
            known = row.child(at, token)
            at = row.add(PAD, token, at) if known is None else known
    return _made(tree, rows), any(PAD in row.slots for row in rows)


def onward(walk: Walk, token: int) -> Walk | None:
    """The walk behind a guess; None: the guess may not come. Plain decoding may never get there, or end
    before, so that a dead end is no error yet."""
    try:
        return walk.behind(token)
    except DeadEnd:
        return None


def leads_on(walk: Walk, token: int) -> Walk | None:
    """The same, and None too where nothing may follow the guess."""
    step = onward(walk, token)
    try:
        _ = step and step.allowed
    except DeadEnd:
        return None
    return step


def check_onward(walk: Walk | None, token: int) -> None:
    """Raise `DeadEnd` where nothing may follow a token that was said."""
    step = walk and walk.behind(token)
    _ = step and (step.allowed, step.forced)


def must_follow(walks: Sequence[Walk | None], roots: Sequence[int]) -> list[list[int]]:
    """The tokens that must follow each root."""
    steps = [None if walk is None else walk.behind(root) for walk, root in zip(walks, roots, strict=True)]
    return [[] if step is None else step.forced[:FORCED] for step in steps]


def _worth(kept: Sequence[int], forced: Sequence[int]) -> int:
    """How many forced tokens each text may have: all rows of a pass are as wide as the widest, so that those
    of one text cost rows of all others."""

    def nodes(most: int) -> int:
        return len(kept) * max(n + min(must, most) for n, must in zip(kept, forced, strict=True))

    def tokens_by_cost(most: int) -> float:
        return sum(1 + min(must, most) for must in forced) / (ROWS + nodes(most))

    short = (most for most in range(max(forced) + 1) if not most or all(forced) or nodes(most) <= WIDEST)
    return max(short, key=tokens_by_cost)


def _kept(tokens: Sequence[int], above: Sequence[int], walk: Walk | None) -> Nodes:
    """What a grammar leaves of one row."""
    nodes = Nodes([0], [0], [tokens[0]], [0], [0])
    root = None if walk is None else walk.behind(tokens[0])
    walks, places = {0: root}, {0: 0}
    for slot in range(1, len(tokens)):
        if tokens[slot] == PAD or above[slot] not in places:
            continue
        if walk is not None:
            before = walks[above[slot]]
            walks[slot] = None if before is None else onward(before, tokens[slot])
            if walks[slot] is None:
                continue
        places[slot] = nodes.add(slot, tokens[slot], places[above[slot]])
    return nodes


def _made(tree: Tree, rows: Sequence[Nodes]) -> Tree:
    """The tree of these rows, padded to the longest."""
    width = max(len(row.slots) for row in rows)
    device = tree.tokens.device

    def padded(lines: Sequence[Sequence[int]], value: int) -> Tensor:
        filled = [[*line, *[value] * (width - len(line))] for line in lines]
        return torch.tensor(filled, dtype=torch.long, device=device)

    tokens, slots = padded([row.tokens for row in rows], PAD), padded([row.slots for row in rows], PAD)
    chained = all(row.parents == [0, *range(len(row.parents) - 1)] for row in rows)
    parents = None if chained else padded([row.parents for row in rows], 0)
    depth = max(max(row.depths) for row in rows)
    probes, scores = tree.probes, tree.scores
    if probes is not None:  # a host that is gone hosts none
        hosts = probes.hosts.expand(len(rows), -1)
        here = (slots[:, None] == hosts[..., None]) & (hosts >= 0)[..., None]
        probes = probes._replace(hosts=here.int().argmax(2).where(here.any(2), PAD))
    if scores is not None:
        scores = scores.gather(1, padded([row.scored for row in rows], 0))
    return replace(tree, tokens=tokens, parents=parents, depth=depth, probes=probes, scores=scores)
