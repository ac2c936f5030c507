"""What training data holds, and the same without what is not worth learning."""

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import compress
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Group

from slipstream.files import Paths, check_writable, replacing, several
from slipstream.provenance import public
from slipstream.results import Figures, Part, Result, flat, made
from slipstream.targets.load import AnyTarget, loaded
from slipstream.training.data import check_lines, encode_row, read_rows
from slipstream.training.dedup import excluded_words, holds, loops, near_copies
from slipstream.training.synthesize import LineProgress

ALL = "all"
SHORT = 50  # words: shorter answers are compared together with their questions
LONG = 2**31  # tokens: no row is cut
FAULTS = ("excluded", "loops", "repeats")  # why rows are dropped


class Holding(Part):
    """Rows of one kind. Shares are of rows; lengths are tokens, at the median, at 95 % and at most."""

    rows: int
    answer_tokens: int  # that are learnt
    prompt: tuple[int, int, int]  # lengths of what is not learnt, the chat template's words included
    answer: tuple[int, int, int]  # lengths of what is learnt
    finished: float
    greedy: float
    several_turns: float
    excluded: int  # rows that share words with a question set
    loops: int  # other rows of which an answer repeats itself
    repeats: int  # other rows that are nearly one before them, or the beginning of another


@dataclass
class CountedRow:
    """A row with its kind, and its tokens. `fault`: why it is dropped."""

    row: dict[str, Any]
    learnt: int
    tokens: int
    fault: str | None = None

    @property
    def texts(self) -> tuple[str, ...]:
        if "messages" in self.row:
            return tuple(turn["content"] for turn in self.row["messages"])
        return tuple(self.row[key] for key in ("prompt", "completion", "text") if key in self.row)

    @property
    def answers(self) -> list[str]:
        raw = self.row.get("completion", self.row.get("text", ""))
        turns = self.row.get("messages", [{"role": "assistant", "content": raw}])
        return [turn["content"] for turn in turns if turn["role"] == "assistant"]

    @property
    def compared(self) -> str:
        """What makes the row a near copy: its answers, and if they are short, its questions, too."""
        answers = "\n".join(self.answers)
        return answers if len(answers.split()) >= SHORT else "\n".join(self.texts)


class Inventory(Result):
    """What files of training data hold, by kind. `kept`: the same of the rows written to `out`."""

    target: str
    files: list[str]
    kinds: dict[str, Holding]
    out: str | None = None
    kept: dict[str, Holding] | None = None

    def __rich__(self) -> Group:
        title = f"{', '.join(self.files)}, in tokens of {self.target}"
        tables = [_table(title, self.kinds, dropping=True)]
        if self.kept is not None:
            tables.append(_table(f"kept, in {self.out}", self.kept, dropping=False))
        return Group(*tables)

    def _rows(self) -> list[dict[str, Any]]:
        return [{"kind": kind} | flat(holding) for kind, holding in self.kinds.items()]


@public
def inventory(
    target: AnyTarget,
    files: Paths,
    exclude: Paths = (),
    out: str | PathLike[str] | None = None,
    progress: LineProgress = lambda rows, of: None,
) -> Inventory:
    """Count what training data holds, by kind: what `synthesize` calls so, else the file's name.

    Args:
        target: whose tokens are counted, or its name for `load_target`.
        exclude: JSONL of questions. Rows that share 13 words in a row with one are dropped.
        out: a file to write the kept rows to.

    Raises:
        ValueError: a file cannot be read or written, `out` is read, too, or named like raw text, or a row is
            none that can be trained on.
    """
    target = loaded(target)
    paths, exclude = [fspath(path) for path in several(files)], several(exclude)
    if out is not None:
        check_lines(out := fspath(out))
        check_writable(out, reads=[*paths, *map(fspath, exclude)])
    words = excluded_words(exclude)
    lines = [(path, number, row) for path in paths for number, row in read_rows(path)]
    if not lines:
        raise ValueError(f"{', '.join(paths)}: no rows: give training data")
    counted = []
    for done, (path, number, row) in enumerate(lines, 1):
        try:
            example = encode_row(row, target, LONG)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
        kind = str(row.get("kind") or Path(path.removesuffix(".gz")).stem)
        counted.append(CountedRow({**row, "kind": kind}, sum(example.loss), len(example.tokens)))
        progress(done, len(lines))
    _judge(counted, words)
    report: dict[str, Any] = {"target": target.name, "files": paths, "kinds": _by_kind(counted)}
    if out is not None:
        if not (good := [row for row in counted if row.fault is None]):
            faults = ", ".join(f"{n} {fault}" for fault, n in Counter(row.fault for row in counted).items())
            raise ValueError(f"{out} would hold no row ({faults}): leave out --out to see which kinds")
        with replacing(out) as file:
            file.writelines(json.dumps(row.row, ensure_ascii=False) + "\n" for row in good)
        report |= {"out": out, "kept": _by_kind(good)}
    return Inventory(**made(), **report)


def _judge(rows: Sequence[CountedRow], words: set[int]) -> None:
    """Set the `fault` of each row that is to be dropped."""
    for row in rows:
        if any(holds(text, words) for text in row.texts):
            row.fault = "excluded"
        elif any(map(loops, row.answers)):
            row.fault = "loops"
    good = [row for row in rows if row.fault is None]
    begun = {row.texts[:end] for row in good for end in range(2, len(row.texts))}
    whole = [row for row in good if row.texts not in begun]  # with which no other row goes on
    copies = compress(whole, near_copies(row.compared for row in whole))
    for row in (*(row for row in good if row.texts in begun), *copies):
        row.fault = "repeats"


def _by_kind(rows: Sequence[CountedRow]) -> dict[str, Holding]:
    """What rows hold, by kind; and all of them, last, where there are several kinds."""
    kinds = defaultdict[str, list[CountedRow]](list)
    for row in rows:
        kinds[row.row["kind"]].append(row)
    by_kind = {kind: _holding(kinds[kind]) for kind in sorted(kinds)}
    total = f"{ALL} kinds" if ALL in by_kind else ALL  # a file may be called all.jsonl
    return by_kind | ({total: _holding(rows)} if len(by_kind) > 1 else {})


def _holding(rows: Sequence[CountedRow]) -> Holding:
    def share(which: Iterable[bool]) -> float:
        return round(sum(which) / len(rows), 4)

    faults = Counter(row.fault for row in rows)
    return Holding(
        rows=len(rows),
        answer_tokens=sum(row.learnt for row in rows),
        prompt=_lengths([row.tokens - row.learnt for row in rows]),
        answer=_lengths([row.learnt for row in rows]),
        finished=share(bool(row.row.get("finished", True)) for row in rows),
        greedy=share(row.row.get("temperature") == 0 for row in rows),
        several_turns=share(len(row.answers) > 1 for row in rows),
        **{fault: faults[fault] for fault in FAULTS},
    )


def _lengths(tokens: Sequence[int]) -> tuple[int, int, int]:
    middle, high = np.percentile(tokens, [50, 95])
    return round(middle), round(high), max(tokens)


def _table(title: str, kinds: dict[str, Holding], dropping: bool) -> Figures:
    faults = FAULTS if dropping else ()
    lengths = ("prompt 50 / 95 / 100 %", "answer 50 / 95 / 100 %")
    table = Figures(title, "kind", "rows", "answer tokens", *lengths, "finished", "greedy", "turns", *faults)
    for number, (kind, holding) in enumerate(kinds.items(), 1):
        spans = (" / ".join(f"{n:>4}" for n in tokens) for tokens in (holding.prompt, holding.answer))
        shares = (f"{share:.0%}" for share in (holding.finished, holding.greedy, holding.several_turns))
        cells = (f"{holding.rows:,}", f"{holding.answer_tokens:,}", *spans, *shares)
        style = "bold" if number == len(kinds) > 1 else ""
        table.add_row(kind, *cells, *(f"{getattr(holding, fault):,}" for fault in faults), style=style)
    return table
