"""Grammar: which texts are allowed. A text, and guesses at its end, lead from state to state.

A grammar is a mask at each node that verification visits, made from the tokens on the way there. Trees lose
the nodes that it forbids, and gain the tokens that it forces, which are certain and cost no draft.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Optional

import torch
from jaxtyping import Bool
from torch import Tensor

from slipstream.core.tree import PAD, Tree

FORCED = 64  # tokens that a grammar adds to a tree, at most
WIDEST = 128  # nodes of a pass in which texts without forced tokens wait for those of others, at most
ROWS = 64  # so many rows cost about as much as a pass itself: what a forced token must be worth


class DeadEnd(ValueError):
    """A grammar that was read, but allows no token behind what it led to."""


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


class GrammarState(ABC):
    """Where a text stands in its grammar. It never changes: a token leads to another state. Every question to
    it may raise `DeadEnd`."""

    @property
    @abstractmethod
    def allowed(self) -> Bool[Tensor, " V"] | None:
        """Which tokens may come next; None: any, as the text has ended."""

    @property
    @abstractmethod
    def forced(self) -> list[int]:
        """The tokens that must come next, one by one, as far as there is no choice."""

    @abstractmethod
    def advance(self, token: int) -> Optional["GrammarState"]:
        """The state behind one more token; None: it may not come."""


class Grammar(ABC):
    """A set of texts, in the tokens of one target."""

    @abstractmethod
    def begin(self) -> GrammarState:
        """The state of a text without tokens."""


class Node(NamedTuple):
    """A node of a tree that is made anew."""

    slot: int  # in the tree before; PAD for a new node
    scored: int  # the slot before whose score it has: a forced token's is that of its parent
    token: int
    parent: int  # its place among the new nodes
    depth: int


def guided(tree: Tree, states: Sequence[GrammarState | None], forces: Sequence[bool]) -> tuple[Tree, bool]:
    """The tree without the nodes that each row's grammar forbids, and, where it `forces`, with the tokens
    that must follow the root; and whether any were added. Rows without a grammar stay. So does a tree of
    sampled children, which were drawn from laws without forbidden tokens: to drop some would not be exact."""
    if tree.law is not None or not any(states):
        return tree, False
    parents = tree.parent_slots().expand_as(tree.tokens).tolist()
    rows = [_allowed_nodes(*row) for row in zip(tree.tokens.tolist(), parents, states, strict=True)]
    must = must_follow(states, tree.tokens[:, 0].tolist())
    must = [tokens if force else [] for tokens, force in zip(must, forces, strict=True)]
    most = _worth([len(nodes) for nodes in rows], [len(tokens) for tokens in must])
    for nodes, tokens in zip(rows, must, strict=True):
        at = 0
        for token in tokens[:most]:
            known = (i for i, node in enumerate(nodes) if i and (node.parent, node.token) == (at, token))
            if (child := next(known, None)) is None:
                child = _add(nodes, PAD, token, at)
            at = child
    return _made_of(rows, tree), any(node.slot == PAD for nodes in rows for node in nodes)


def may_advance(state: GrammarState, token: int, onward: bool = False) -> GrammarState | None:
    """The state behind a guess. None: the guess may not come or, with `onward`, nothing may follow it. A dead
    end is no error yet: plain decoding may never get there, or end before."""
    try:
        after = state.advance(token)
        _ = onward and after and after.allowed
    except DeadEnd:
        return None
    return after


def check_onward(state: GrammarState | None, token: int) -> None:
    """Raise `DeadEnd` where nothing may follow an accepted token."""
    after = state and state.advance(token)
    _ = after and (after.allowed, after.forced)


def must_follow(states: Sequence[GrammarState | None], roots: Sequence[int]) -> list[list[int]]:
    """The tokens that must follow each root."""
    after = [state and state.advance(root) for state, root in zip(states, roots, strict=True)]
    return [[] if state is None else state.forced[:FORCED] for state in after]


def _worth(nodes: Sequence[int], forced: Sequence[int]) -> int:
    """How many forced tokens each text may have, as all rows of a pass are as wide as the widest."""
    best, most_a_row = 0, -1.0
    for most in range(max(forced) + 1):
        rows = len(nodes) * max(n + min(must, most) for n, must in zip(nodes, forced, strict=True))
        tokens_a_row = sum(1 + min(must, most) for must in forced) / (ROWS + rows)
        if tokens_a_row > most_a_row and (not most or all(forced) or rows <= WIDEST):
            best, most_a_row = most, tokens_a_row
    return best


def _add(nodes: list[Node], slot: int, token: int, parent: int) -> int:
    """Append a node. Returns its place."""
    above = nodes[parent]
    nodes.append(Node(slot, above.scored if slot == PAD else slot, token, parent, above.depth + 1))
    return len(nodes) - 1


def _allowed_nodes(tokens: Sequence[int], parents: Sequence[int], state: GrammarState | None) -> list[Node]:
    """What a grammar leaves of one row."""
    nodes = [Node(0, 0, tokens[0], 0, 0)]
    states, places = {0: state and state.advance(tokens[0])}, {0: 0}
    for slot, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        if slot == 0 or token == PAD or parent not in places:
            continue
        before = states[parent]
        states[slot] = before and may_advance(before, token)
        if state is None or states[slot] is not None:
            places[slot] = _add(nodes, slot, token, places[parent])
    return nodes


def _made_of(rows: Sequence[Sequence[Node]], tree: Tree) -> Tree:
    """The tree of these rows, padded to the longest."""
    width, nothing = max(map(len, rows)), Node(PAD, 0, PAD, 0, 0)
    padded = [[*nodes, *[nothing] * (width - len(nodes))] for nodes in rows]
    columns = torch.tensor(padded, device=tree.tokens.device).movedim(2, 0).contiguous()
    slots, scored, tokens, parents, _ = columns
    depth = max(node.depth for nodes in rows for node in nodes)
    is_chain = all(node.parent == max(i - 1, 0) for nodes in rows for i, node in enumerate(nodes))
    probes, scores = tree.probes, tree.scores
    if probes is not None:  # a host that is gone hosts none
        hosts = probes.hosts.expand(len(rows), -1)
        there = (slots[:, None] == hosts[..., None]) & (hosts >= 0)[..., None]
        probes = probes._replace(hosts=there.int().argmax(2).where(there.any(2), PAD))
    scores = None if scores is None else scores.gather(1, scored)
    return Tree(tokens, None if is_chain else parents, depth, None, probes, scores)
