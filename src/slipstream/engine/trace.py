"""Trace: what every step of an answer drafted and accepted, one JSON line per request and step."""

import json
from collections.abc import Sequence
from dataclasses import replace
from os import PathLike
from typing import Any

import torch
from jaxtyping import Float, Int
from pydantic import Field, ValidationError, model_validator
from torch import Tensor

from slipstream.core.span import Span
from slipstream.core.target import Target
from slipstream.core.tree import Tree
from slipstream.engine.engine import Engine, Seconds
from slipstream.engine.request import Request
from slipstream.files import parsed, read_text
from slipstream.results import Part, check_schema, heading

PARTS = ("draft", "verify", "host")  # of a step's seconds
SHARES = 10_000  # probabilities are whole numbers of these parts on a page


class Opening(Part):
    """What a request's first line says of it."""

    schema_version: int = Field(alias="schema")
    command: str
    hardware: dict[str, str | int | float]
    versions: dict[str, str]
    target: str
    dtype: str
    compiled: bool
    temperature: float
    seed: int
    text: str  # the prompt as the target reads it, without a tokenizer its ids
    first: str  # what the pass of the prompt brought, as text
    prefill: float  # seconds of the prompt's pass, which requests that joined together share


class TracedStep(Part):
    """One step of one request: its tree, what was accepted, and the target's own token behind it."""

    row: int  # the request's number, counted from 0 in order of the prompts
    round: int  # the step's, counted from 0
    tokens: list[int]  # of the tree's nodes; −1 is no guess
    parents: list[int]  # of the nodes; the root is its own
    accepted: list[int]  # the slots of the accepted path, the root first
    next: int  # the target's own token behind the path
    texts: list[str]  # of the tokens
    p: list[float | None]  # the target's probability of each behind its parent, at temperature 1 without cuts
    q: list[float | None]  # the drafter's; None where it gives none
    next_text: str
    next_p: float
    pieces: list[str]  # what each token that stands in the answer, accepted ones and the own, made certain
    seconds: dict[str, float]  # by `PARTS`; requests of a batch share them
    opening: Opening | None = None  # in the first step

    @model_validator(mode="after")
    def is_a_tree(self) -> "TracedStep":
        nodes = len(self.tokens)
        if {len(self.parents), len(self.texts), len(self.p), len(self.q)} != {nodes}:
            raise ValueError("its nodes have not as many parents, texts, p or q")
        if not nodes or any(not 0 <= above <= max(slot - 1, 0) for slot, above in enumerate(self.parents)):
            raise ValueError("a parent does not stand before its child")
        first, *path = self.accepted or [-1]
        inside = first == 0 and all(0 < slot < nodes for slot in path)
        if not inside or [self.parents[slot] for slot in path] != self.accepted[:-1]:
            raise ValueError("the accepted path leaves the tree")
        return self


class Tracer:
    """Writes a trace of an engine's requests to anything with `write`."""

    def __init__(self, file: Any, engine: Engine) -> None:
        self.file, self.engine, self.target = file, engine, engine.target
        self._heading = heading(engine.target)
        self._before = replace(engine.seconds)
        self._prefill: dict[int, float] = {}

    def take(self, requests: Sequence[Request]) -> None:
        """Write what the engine's last pass brought these requests; a prompt's pass, with its first step."""
        seconds, self._before = self.engine.seconds - self._before, replace(self.engine.seconds)
        if not requests[0].steps:
            self._prefill |= dict.fromkeys((request.number for request in requests), seconds.prefill)
            return
        trees = PassTrees(self.target, self.engine.span)
        for row, request in enumerate(requests):
            pieces = request.pieces or [written(self.target, token) for token in request.tokens]
            start, steps = len(request.tokens) - len(request.fresh), len(request.steps)
            line: dict[str, Any] = {"row": request.number, "round": steps - 1}
            line |= trees.row(row, pieces[start:], seconds)
            if steps == 1:
                line |= {"opening": self._opening(request, "".join(pieces[:start]))}
            self.file.write(json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n")

    def _opening(self, request: Request, first: str) -> dict[str, Any]:
        text, prompt = self.target.text, request.prompt
        return {
            **self._heading,
            "temperature": request.sampling.temperature,
            "seed": request.sampling.seed,
            "text": text.decode(prompt, special=True) if text is not None else " ".join(map(str, prompt)),
            "first": first,
            "prefill": round(self._prefill[request.number], 6),
        }


class PassTrees:
    """What a pass drafted and accepted, in all rows."""

    def __init__(self, target: Target, span: Span | None) -> None:
        assert span is not None and span.tree is not None and span.path is not None
        self.target, self._span = target, span
        self._p, self._own, self._q = _probabilities(span, span.tree, span.path)
        self._tokens, self._path = span.tree.tokens.tolist(), span.path.tolist()
        self._parents = span.tree.parent_slots().expand_as(span.tree.tokens).tolist()

    def row(self, i: int, pieces: list[str], seconds: Seconds) -> dict[str, Any]:
        """The fields of a `TracedStep` that speak of the i-th row, whose text got these pieces."""
        tokens, own = self._tokens[i], int(self._span.root[i])
        return {
            "tokens": tokens,
            "parents": self._parents[i],
            "accepted": self._path[i][: int(self._span.count[i])],
            "next": own,
            "texts": [written(self.target, token) for token in tokens],
            "p": _of_guesses(self._p[i], tokens),
            "q": [None] * len(tokens) if self._q is None else _of_guesses(self._q[i], tokens),
            "next_text": written(self.target, own),
            "next_p": _short(float(self._own[i])),
            "pieces": pieces,
            "seconds": {part: round(getattr(seconds, part), 6) for part in PARTS},
        }


def written(target: Target, token: int) -> str:
    """One token as text; empty for no token."""
    if token < 0:
        return ""
    return str(token) if target.text is None else target.text.decode([token], special=True)


def _probabilities(
    span: Span, tree: Tree, path: Int[Tensor, "B T"]
) -> tuple[Float[Tensor, "B N"], Float[Tensor, " B"], Float[Tensor, "B N"] | None]:
    """The target's probability of each node behind its parent and of its own last token, and the drafter's
    of each node (None: it gives none). A root, and a node that is no guess, has a number without meaning."""
    assert span.logits is not None
    above, tokens = tree.parent_slots().expand_as(tree.tokens), tree.tokens.clamp(min=0)
    mass, rows = span.logits.logsumexp(-1), torch.arange(len(tokens), device=tokens.device)[:, None]
    p = (span.logits[rows, above, tokens] - mass.gather(1, above)).exp()
    end = span.last(path)[:, None]
    own = (span.logits[rows, end, span.root[:, None]] - mass.gather(1, end)).exp()[:, 0]
    if tree.law is not None:
        return p, own, tree.law[rows, above, tokens]
    return p, own, None if tree.scores is None else (tree.scores - tree.scores.gather(1, above)).exp()


def _of_guesses(values: Tensor, tokens: list[int]) -> list[float | None]:
    pairs = enumerate(zip(values.tolist(), tokens, strict=True))
    return [_short(value) if slot and token >= 0 else None for slot, (value, token) in pairs]


def _short(value: float) -> float:
    """Four digits of a probability; 0 for NaN, as of a guess behind one that cannot be."""
    return float(f"{min(max(0.0, value), 1.0):.4g}")  # of 0 and NaN, in this order, max takes 0


def read_trace(path: str | PathLike[str], text: str | None = None) -> list[list[TracedStep]]:
    """The steps of each request in a trace; `text`: what the file holds, if it has been read. Raises
    ValueError for any other file, by the line."""
    rows: dict[int, list[TracedStep]] = {}
    text = read_text(path, "trace") if text is None else text
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            value = parsed(line)
            if isinstance(value, dict) and isinstance(value.get("opening"), dict):
                check_schema(value["opening"].get("schema"))
            step = TracedStep.model_validate(value)
            steps = rows.setdefault(step.row, [])
            if step.round != len(steps) or (step.opening is None) != bool(steps):
                raise ValueError("rounds before it are missing: give the whole trace")
            steps.append(step)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"])) or "it"
            raise ValueError(f"trace {path} line {number}: {where}: {first['msg']}") from error
        except ValueError as error:
            raise ValueError(f"trace {path} line {number}: {error}") from error
    if not rows:
        raise ValueError(f"trace {path} is empty: its answer took no rounds")
    return [rows[row] for row in sorted(rows)]


def drawn(step: TracedStep, places: dict[str, int]) -> dict[str, Any]:
    """A step as pages draw it. Texts of tokens stand in one list, in which `places` counts."""
    slots = [slot for slot, token in enumerate(step.tokens) if token >= 0]  # of guesses, and of the root
    place = {slot: i for i, slot in enumerate(slots)}
    p, q = ([_share(values[slot]) for slot in slots] for values in (step.p, step.q))
    return {
        "texts": [places.setdefault(step.texts[slot], len(places)) for slot in slots],
        "parents": [place.get(step.parents[slot], 0) for slot in slots],
        "p": p,
        "q": q if any(value is not None for value in q) else None,
        "path": [place[slot] for slot in step.accepted],
        "own": places.setdefault(step.next_text, len(places)),
        "own_p": _share(step.next_p),
        "kind": _kind(step),
        "pieces": step.pieces,
        "ms": [round(1000 * step.seconds[part], 2) for part in PARTS],
    }


def _share(value: float | None) -> int | None:
    return None if value is None else round(SHARES * value)


def _kind(step: TracedStep) -> str:
    """Whether the target's own token corrects a guess, follows right ones, or stands where none was made."""
    end = step.accepted[-1]
    nodes = enumerate(zip(step.tokens, step.parents, strict=True))
    if any(slot and token >= 0 and above == end for slot, (token, above) in nodes):
        return "corrected"
    return "bonus" if end else "plain"
