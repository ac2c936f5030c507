"""Products in tiles in a graph take in what stands around them: one call in the place of several.

Behind weights that have just passed through a processor's caches a call costs some microseconds, for a few
rows as long as its product takes. What a pattern does not name stays as it is.
"""

from collections import defaultdict
from operator import add, getitem, iadd, imul, isub, itruediv, mul, neg, setitem
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

LINEAR, GATED = "slipstream.tiled_linear.default", "slipstream.tiled_gated.default"
# A pattern is (target, arguments…); strings among the arguments are names for anything.
SQUARES = ("mean", ("pow", "rows", 2), -1)
NORM = (mul, "norm", ("to", (mul, "rows", (torch.rsqrt, (add, SQUARES, "eps"))), "dtype"))
GATE, UP = ((LINEAR, "x", name, f"{name} scales", None, 0.0, None) for name in ("gate", "up"))
BETWEEN = (mul, (F.silu, (getitem, GATE, 0)), (getitem, UP, 0))
DOWN = (getitem, (LINEAR, BETWEEN, "down", "down scales", None, 0.0, None), 0)
QKV = (LINEAR, "x", "weights", "scales", "norm", "eps", None)
COS, SIN = (("unsqueeze", name, 1) for name in ("cos", "sin"))
QUERIES, KEYS, VALUES = (("transpose", ("view", (getitem, QKV, i), f"shape {i}"), 1, 2) for i in range(3))
TURNED, FIXED = (
    (
        add,
        (mul, x, COS),
        (mul, (torch.cat, [(neg, (getitem, x, "second half")), (getitem, x, "first half")]), SIN),
    )
    for x in (QUERIES, KEYS)
)
READ = ((getitem, name, "read") for name in ("keys", "values"))
ATTENTION = ("slipstream.attention", TURNED, *READ, "lists", "scale", 0.0, None)
WRITTEN = (setitem, "stored", [(getitem, "rows", "at"), slice(None), "slots"], ("transpose", "new", 1, 2))
NAMES = ("gate", "up", "down"), ("gate scales", "up scales", "down scales")
KEYWORDS: tuple[dict[str, Any], ...] = ({}, {"keepdim": True}, {"inplace": False}, {"dim": -1})


def fuse(graph: fx.Graph) -> None:
    """Rewrite a graph's products in tiles: gated ones with their activation, those of one input as one, each
    with the norm before it and the sum behind it, and a whole layer as one call where that is all it is."""
    calls = [node for node in graph.nodes if node.op.startswith("call")]
    if any(in_place(node) and node.all_input_nodes[0].op != "placeholder" for node in calls):
        return
    for node in list(graph.nodes):
        if found := _match(DOWN, node):
            _gate(graph, node, found)
    for node in _products(graph):
        _take_norm(node)
    _join(_products(graph))
    for node in list(graph.nodes):
        if node.target is add:
            _take_sum(graph, node)
    for node in _products(graph):
        _chain(node)
    for node in _products(graph):
        _layer(graph, node)


def in_place(node: Any) -> bool:
    """Whether a node changes what it reads, so that the order of reads matters."""
    name = str(getattr(node.target, "__name__", node.target))
    return name.endswith("_") or node.target in (iadd, imul, isub, itruediv, setitem)


def _match(pattern: Any, x: Any) -> dict[str, Any]:
    """What the pattern's names stand for; empty if x is something else."""
    found: dict[str, Any] = {}

    def fits(pattern: Any, x: Any) -> bool:
        if isinstance(pattern, str):
            return found.setdefault(pattern, x) == x
        if isinstance(pattern, list):
            return isinstance(x, (tuple, list)) and len(x) == len(pattern) and all(map(fits, pattern, x))
        if not isinstance(pattern, tuple):
            return bool(pattern == x)
        target, *inner = pattern
        return (
            isinstance(x, fx.Node)
            and target in (x.target, str(x.target))
            and len(x.args) == len(inner)
            and x.kwargs in KEYWORDS
            and all(map(fits, inner, x.args))
        )

    return found if fits(pattern, x) else {}


def _products(graph: fx.Graph) -> list[Any]:
    return [node for node in graph.nodes if str(node.target) in (LINEAR, GATED)]


def _replace(old: Any, new: Any) -> None:
    new.meta = dict(old.meta)
    old.replace_all_uses_with(new)
    _erase(old)


def _erase(node: Any) -> None:
    """Erase a node that nobody reads, and then what only it read."""
    if node.users or node.op == "placeholder":
        return
    inputs = node.all_input_nodes
    node.graph.erase_node(node)
    for each in inputs:
        _erase(each)


def _gate(graph: fx.Graph, node: Any, found: dict[str, Any]) -> None:
    weights, scales = ([part for name in names for part in found[name]] for names in NAMES)
    with graph.inserting_before(node):
        op = torch.ops.slipstream.tiled_gated.default
        fused = graph.call_function(op, (found["x"], weights, scales, None, 0.0, None))
    _replace(node, fused)


def _take_norm(node: Any) -> None:
    normed: Any = node.args[0]
    found = _match(NORM, normed)
    cast = _match(("to", "x", torch.float32), found["rows"]) if found else {}
    if cast and node.args[3] is None and _dtype(found["norm"]) == _dtype(cast["x"]) == _dtype(normed):
        node.args = (cast["x"], *node.args[1:3], found["norm"], found["eps"], node.args[5])
        _erase(normed)


def _join(products: list[Any]) -> None:
    """Plain products with one input and one norm become the first of them."""
    together = defaultdict[Any, list[Any]](list)
    for node in products:
        if str(node.target) == LINEAR:
            together[node.args[0], *node.args[3:]].append(node)
    for first, *others in together.values():
        for node in others:
            at = len(first.args[1])
            lists = (mine + its for mine, its in zip(first.args[1:3], node.args[1:3], strict=True))
            first.args = (first.args[0], *lists, *first.args[3:])
            for user in list(node.users):  # it takes one of a list of outputs
                user.args = (first, user.args[1] + at)
            _erase(node)


def _take_sum(graph: fx.Graph, node: Any) -> None:
    """A product that one sum alone reads is written with what is added."""
    for out, more in (node.args, reversed(node.args)):
        product = out.args[0] if _match((getitem, "product", 0), out) else out
        kind = str(getattr(product, "target", ""))
        if kind != GATED and not (kind == LINEAR and len(product.args[1]) == 1):
            continue
        alone = len(out.users) == 1 and len(product.users) == 1 and product.args[5] is None
        if alone and isinstance(more, fx.Node) and _like(out, more):
            with graph.inserting_before(node):
                fused = graph.call_function(product.target, (*product.args[:5], more))
                last = fused if product is out else graph.call_function(getitem, (fused, 0))
            _replace(node, last)
            return


def _chain(node: Any) -> None:
    """A gated product whose input, a product with its sum, is also what is added to it, takes that in."""
    x: Any = node.args[0]
    found = _match((getitem, (LINEAR, "x", "weights", "scales", None, 0.0, "more"), 0), x)
    if found and found["more"] and str(node.target) == GATED and node.args[5] is x and len(x.users) == 1:
        node.args = (found["x"], *_lists(found, node), *node.args[3:5], found["more"])
        _erase(x)


def _lists(found: dict[str, Any], node: Any) -> list[Any]:
    """Weights and scales of a pattern and behind them a product's."""
    return [found[name] + each for name, each in zip(("weights", "scales"), node.args[1:3], strict=True)]


def _layer(graph: fx.Graph, node: Any) -> None:
    """A gated product behind attention, with the layer's rows added to it, takes in all of the layer."""
    found = _match(("contiguous", ("reshape", ATTENTION, "B", "R", -1)), node.args[0])
    if not found or str(node.target) != GATED or node.args[5] is not found["x"]:
        return
    D = found["keys"].meta["example_value"].shape[-1]
    halves = (..., slice(None, D // 2, None)), (..., slice(D // 2, None, None))
    writes = {}
    for name, new in (("keys", FIXED), ("values", VALUES)):
        for user in found[name].users:
            if (how := _match(WRITTEN, user)) and _match(new, how["new"]):
                writes[name] = user, how["slots"]
    whole = found["read"][:2] == (slice(None),) * 2
    if (found["first half"], found["second half"]) != halves or len(writes) != 2 or not whole:
        return
    names = ("norm", "eps", "cos", "sin", "keys", "values")
    read = writes["keys"][1], found["lists"], found["read"][2].stop, found["scale"]
    with graph.inserting_before(node):
        op = torch.ops.slipstream.tiled_layer.default
        given = found["x"], *_lists(found, node), *(found[name] for name in names), *read, *node.args[3:5]
        fused = graph.call_function(op, given)
    _replace(node, fused)
    for user, _ in writes.values():
        inputs = user.all_input_nodes
        graph.erase_node(user)
        for each in inputs:
            _erase(each)


def _like(one: Any, other: Any) -> bool:
    """Whether two tensors have one shape and dtype, whatever their free sizes are."""
    x, y = one.meta["example_value"], other.meta.get("example_value")
    return isinstance(y, torch.Tensor) and x.dtype == y.dtype and str(x.shape) == str(y.shape)


def _dtype(node: Any) -> torch.dtype:
    dtype: torch.dtype = node.meta["example_value"].dtype
    return dtype
