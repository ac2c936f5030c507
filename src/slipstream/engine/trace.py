"""Trace: what every round of an answer drafted and accepted, one JSON line per text and round."""

import json
from collections.abc import Sequence
from os import PathLike
from typing import Any, TypeVar

import torch
from jaxtyping import Float
from pydantic import Field, ValidationError, model_validator
from torch import Tensor

from slipstream.core.sampling import Sampling
from slipstream.core.span import Span
from slipstream.core.target import Target
from slipstream.core.tree import Tree
from slipstream.engine.answer import Answer
from slipstream.engine.session import Seconds, Session
from slipstream.files import parsed, read_text
from slipstream.results import Part, check_schema, heading

SHARES = 10_000  # probabilities are whole numbers of these parts on a page


class Opening(Part):
    """What a text's first line says of its answer.

    Attributes:
        text: the prompt as the target reads it, without a tokenizer its ids.
        first: what the pass of the prompt brought, as text.
        prefill: seconds of the prompt's pass, which texts that joined together share.
    """

    schema_version: int = Field(alias="schema")
    command: str
    hardware: dict[str, str | int | float]
    versions: dict[str, str]
    target: str
    dtype: str
    compiled: bool
    temperature: float
    seed: int
    text: str
    first: str
    prefill: float


class Round(Part):
    """One round of one text: its tree, what was accepted, and the target's own token behind it.

    Attributes:
        row: the text's number, counted from 0 in order of the prompts.
        round: counted from 0; `opening` is there in the first.
        tokens, parents: of the tree's nodes; the root is its own parent, and a token of −1 is no guess.
        texts: of the tokens.
        p: the target's probability of each node behind its parent, at temperature 1 and without cuts.
        q: the drafter's; None where it gives none.
        accepted: the slots of the accepted path, the root first.
        next, next_text, next_p: the target's own token behind the path.
        pieces: of the tokens that stand in the answer, accepted ones and the own one: the text that each made
            certain.
        seconds: of the round: `draft`, `verify` and `host`. Texts of a batch share them.
    """

    row: int
    round: int
    tokens: list[int]
    parents: list[int]
    accepted: list[int]
    next: int
    texts: list[str]
    p: list[float | None]
    q: list[float | None]
    next_text: str
    next_p: float
    pieces: list[str]
    seconds: dict[str, float]
    opening: Opening | None = None

    @model_validator(mode="after")
    def is_a_tree(self) -> "Round":
        nodes = len(self.tokens)
        if not all(len(each) == nodes for each in (self.parents, self.texts, self.p, self.q)):
            raise ValueError("its nodes have not as many parents, texts, p or q")
        if not nodes or any(not 0 <= above <= max(slot - 1, 0) for slot, above in enumerate(self.parents)):
            raise ValueError("a parent does not stand before its child")
        first, *path = self.accepted or [-1]
        inside = first == 0 and all(0 < slot < nodes for slot in path)
        if not inside or [self.parents[slot] for slot in path] != self.accepted[:-1]:
            raise ValueError("the accepted path leaves the tree")
        return self


T = TypeVar("T")
ByText = list[T] | dict[int, T]


class Tracer:
    """Writes a trace.

    Args:
        file: anything with `write`.
        prompts, rows, answers: of the texts, by number. Answers grow while the trace is written.
    """

    def __init__(
        self,
        file: Any,
        target: Target,
        prompts: ByText[list[int]],
        rows: ByText[Sampling],
        answers: ByText[Answer],
    ) -> None:
        self.file, self.target, self.prompts, self.rows, self.answers = file, target, prompts, rows, answers
        self._heading = heading(target)
        self._prefill: dict[int, float] = {}

    def take(self, session: Session, seconds: Seconds, joined: Sequence[int]) -> None:
        """Write the lines of a round, once the answers have taken its tokens. Of a pass over the prompts of
        texts that `joined`, nothing is written before their first round."""
        if joined:
            self._prefill |= dict.fromkeys(joined, seconds.prefill)
        else:
            self._write(session, seconds)

    def _write(self, session: Session, seconds: Seconds) -> None:
        look = Looked(self.target, session)
        for i, text in enumerate(session.texts):
            answer = self.answers[text]
            start = len(answer.tokens) - answer.rounds[-1].kept
            line: dict[str, Any] = {"row": text, "round": len(answer.rounds) - 1}
            line |= look.row(i, self._pieces(answer, start), seconds)
            if len(answer.rounds) == 1:
                line |= {"opening": self._opening(text, start)}
            self.file.write(json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n")

    def _opening(self, row: int, tokens: int) -> dict[str, Any]:
        text, prompt, sampling = self.target.text, self.prompts[row], self.rows[row]
        made = {**self._heading, "temperature": sampling.temperature, "seed": sampling.seed}
        read = text.decode(prompt, special=True) if text is not None else " ".join(map(str, prompt))
        first = "".join(self._pieces(self.answers[row], 0)[:tokens])
        return made | {"text": read, "first": first, "prefill": round(self._prefill[row], 6)}

    def _pieces(self, answer: Answer, start: int) -> list[str]:
        """What each token from `start` on made certain, or the tokens one by one where no text is read."""
        return answer.pieces[start:] or [written(self.target, token) for token in answer.tokens[start:]]


class Looked:
    """What the last pass of a session drafted and accepted, for all rows."""

    def __init__(self, target: Target, session: Session) -> None:
        span = session.span
        assert span is not None and span.tree is not None and span.path is not None
        p, own, q = probabilities(span)
        self.target, self._span, self._p, self._own, self._q = target, span, p, own, q
        self._tokens, self._path = span.tree.tokens.tolist(), span.path.tolist()
        self._parents = span.tree.parent_slots().expand_as(span.tree.tokens).tolist()

    def row(self, i: int, pieces: list[str], seconds: Seconds) -> dict[str, Any]:
        """The fields of a `Round` that speak of the i-th row, whose answer got these pieces."""
        tokens, count, last = self._tokens[i], int(self._span.count[i]), int(self._span.root[i])
        texts = [written(self.target, token) for token in tokens]
        made = {
            "tokens": tokens,
            "parents": self._parents[i],
            "accepted": self._path[i][:count],
            "next": last,
        }
        made |= {"texts": texts, "p": _known(self._p[i], tokens)}
        made |= {"q": [None] * len(tokens) if self._q is None else _known(self._q[i], tokens)}
        made |= {"next_text": written(self.target, last), "next_p": _short(self._own[i]), "pieces": pieces}
        took = {part: round(getattr(seconds, part), 6) for part in ("draft", "verify", "host")}
        return made | {"seconds": took}


def written(target: Target, token: int) -> str:
    """One token as text; empty for no token."""
    if token < 0:
        return ""
    return str(token) if target.text is None else target.text.decode([token], special=True)


def probabilities(
    span: Span,
) -> tuple[Float[Tensor, "B N"], Float[Tensor, " B"], Float[Tensor, "B N"] | None]:
    """The target's probability of each node behind its parent and of its own last token, and the drafter's
    of each node (None: it gives none). A root, and a node that is no guess, has a number without meaning."""
    tree, logits = span.tree, span.logits
    assert tree is not None and logits is not None and span.path is not None
    above = tree.parent_slots().expand_as(tree.tokens)
    tokens = tree.tokens.clamp(min=0)
    mass = logits.logsumexp(-1)
    rows = torch.arange(len(tokens), device=tokens.device)[:, None]
    p = (logits[rows, above, tokens] - mass.gather(1, above)).exp()
    end = span.last(span.path)[:, None]
    own = (logits[rows, end, span.root[:, None]] - mass.gather(1, end)).exp()[:, 0]
    return p, own, _drafted(tree, rows, above, tokens)


def _drafted(tree: Tree, rows: Tensor, above: Tensor, tokens: Tensor) -> Tensor | None:
    if tree.law is not None:
        return tree.law[rows, above, tokens]
    return None if tree.scores is None else (tree.scores - tree.scores.gather(1, above)).exp()


def _known(values: Tensor, tokens: list[int]) -> list[float | None]:
    """Of the nodes that are guesses; a root is none."""
    pairs = enumerate(zip(values.tolist(), tokens, strict=True))
    return [_short(value) if slot and token >= 0 else None for slot, (value, token) in pairs]


def _short(value: float | Tensor) -> float:
    """Four digits of a probability; 0 for NaN, as of a guess behind one that cannot be."""
    return float(f"{min(max(0.0, float(value)), 1.0):.4g}")  # of 0 and NaN, in this order, max takes 0


def read_trace(path: str | PathLike[str], text: str | None = None) -> list[list[Round]]:
    """The rounds of each text in a trace; `text`: what the file holds, if it has been read. Raises ValueError
    for any other file, by the line."""
    rows: dict[int, list[Round]] = {}
    text = read_text(path, "trace") if text is None else text
    lines = ((number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip())
    for number, line in lines:
        try:
            value = parsed(line)
            if isinstance(value, dict) and isinstance(value.get("opening"), dict):
                check_schema(value["opening"].get("schema"))
            made = Round.model_validate(value)
            rounds = rows.setdefault(made.row, [])
            if made.round != len(rounds) or (made.opening is None) != bool(rounds):
                raise ValueError("rounds before it are missing: give the whole trace")
            rounds.append(made)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"])) or "it"
            raise ValueError(f"trace {path} line {number}: {where}: {first['msg']}") from error
        except ValueError as error:
            raise ValueError(f"trace {path} line {number}: {error}") from error
    if not rows:
        raise ValueError(f"trace {path} is empty: its answer took no rounds")
    return [rows[row] for row in sorted(rows)]


def drawn(made: Round, places: dict[str, int]) -> dict[str, Any]:
    """A round as pages draw it. Texts of tokens stand in one list, in which `places` counts."""
    slots = [slot for slot, token in enumerate(made.tokens) if token >= 0]  # of guesses, and of the root
    place = {slot: i for i, slot in enumerate(slots)}
    p, q = ([_share(values[slot]) for slot in slots] for values in (made.p, made.q))
    return {
        "texts": [places.setdefault(made.texts[slot], len(places)) for slot in slots],
        "parents": [place.get(made.parents[slot], 0) for slot in slots],
        "p": p,
        "q": q if any(value is not None for value in q) else None,
        "path": [place[slot] for slot in made.accepted],
        "own": places.setdefault(made.next_text, len(places)),
        "own_p": _share(made.next_p),
        "kind": _kind(made),
        "pieces": made.pieces,
        "ms": [round(1000 * made.seconds[part], 2) for part in ("draft", "verify", "host")],
    }


def _share(value: float | None) -> int | None:
    return None if value is None else round(SHARES * value)


def _kind(made: Round) -> str:
    """What the target's own token is: it corrects a guess, follows guesses that were all right, or stands
    where nothing was guessed."""
    end = made.accepted[-1]
    nodes = enumerate(zip(made.tokens, made.parents, strict=True))
    if any(slot and token >= 0 and above == end for slot, (token, above) in nodes):
        return "corrected"
    return "bonus" if end else "plain"
