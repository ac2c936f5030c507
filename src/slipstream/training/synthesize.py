"""Training data that the target writes: answers to given prompts, and prompts from its own chat template."""

import json
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike, fspath
from typing import Any

from rich.text import Text

from slipstream.core.sampling import Sampling
from slipstream.files import (
    STANDARD,
    check_counts,
    check_given,
    check_writable,
    evenly,
    is_whole,
    locked,
    parsed,
    several,
    written_to,
)
from slipstream.provenance import public
from slipstream.results import Result, made
from slipstream.targets.load import AnyTarget, loaded
from slipstream.training.data import check_lines, read_rows
from slipstream.training.generators import Asked, Messages, Prompt, TargetWriter, Writer, wrapped, writer_of
from slipstream.training.prompt_kinds import Question, check_kinds, is_raw, opening_of, synthesize_prompts

ABOUT = {"source": "self"}  # every row begins with this
Rows = list[dict[str, Any]]
Told = Callable[[int, int], None]  # called with the lines in the file and their final number


class Answers(Result):
    """A file of training data, one conversation a line. `discarded`: prompts of this run that left no room
    for an answer."""

    path: str
    lines: int
    discarded: int = 0

    def __rich__(self) -> Text:
        said = f"{self.lines} answers in {self.path}"
        if self.discarded:
            said += f"; prompts that left no room for an answer were discarded: {self.discarded}"
        return Text(said)


@dataclass(frozen=True)
class Writing:
    """A writer and its settings. Batches take the temperatures in turn. Raises ValueError.

    A seed of None is 0 for a target. A server is sent none: vLLM's CPU build fails on seeds where a prompt is
    read in two pieces.
    """

    writer: Writer
    temperatures: Sequence[float]
    max_new_tokens: int
    batch: int
    seed: int | None
    prompt_temperature: float | None = None
    kinds: Sequence[str] = ("any",)

    def __post_init__(self) -> None:
        check_given(temperatures=self.temperatures)
        check_counts(max_new_tokens=self.max_new_tokens, batch=self.batch)
        check_kinds(self.kinds)
        if self.seed is None and isinstance(self.writer, TargetWriter):
            object.__setattr__(self, "seed", 0)
        for temperature in (*self.temperatures, self.prompt_temperature or 0.0):
            Sampling(temperature=temperature, seed=self.seed or 0)
        for name, value in vars(self).items():  # rows record them as JSON, which has no NumPy
            if is_whole(value):
                object.__setattr__(self, name, int(value))

    @property
    def recorded(self) -> dict[str, Any]:
        """The model and the settings, as each row records them."""
        kinds = None if [*self.kinds] == ["any"] else [*self.kinds]  # earlier versions knew no kinds
        recorded = {**self.writer.about, **vars(self), "temperatures": [*self.temperatures], "kinds": kinds}
        return {name: value for name, value in recorded.items() if name != "writer" and value is not None}

    def begin(self, done: int) -> int:
        """The number of the row from which a file of so many goes on: the first of its last batch. A batch is
        answered again as a whole, since what is drawn may depend on its neighbours."""
        return done - done % self.batch

    def rows(self, questions: Iterable[Question], done: int) -> Iterator[dict[str, Any]]:
        """The row of each question, in order, but for those that are there; the first one's number is
        `begin(done)`."""
        start, asked = self.begin(done), deque[tuple[Question, float]]()

        def conversations() -> Iterator[Asked]:
            for number, question in enumerate(questions, start):
                temperature = self.temperatures[number // self.batch % len(self.temperatures)]
                if question.temperature is not None:
                    temperature = question.temperature
                asked.append((question, temperature))
                yield Asked(question.messages, temperature, self.seeded(number))

        answers = self.writer.answer(conversations(), self.max_new_tokens, self.batch)
        for number, answer in enumerate(answers, start):
            question, temperature = asked.popleft()
            if number < done:
                continue
            kind = {} if question.kind is None else {"kind": question.kind}
            said: dict[str, Any] = {"prompt": question.messages, "completion": answer.text}
            if not isinstance(question.messages, str):
                said = {"messages": [*question.messages, {"role": "assistant", "content": answer.text}]}
            row = {**ABOUT, "made": self.recorded, **kind, "temperature": temperature}
            yield {**row, "finished": answer.finished, **said}

    def seeded(self, number: int) -> int | None:
        """The seed of a row; None if there is to be none."""
        return None if self.seed is None else wrapped(self.seed + number)


@public
def regenerate(
    target: AnyTarget,
    source: str | PathLike[str] | Sequence[Prompt],
    out: str | PathLike[str],
    *,
    systems: str | Sequence[str] = (),
    limit: int | None = None,
    writer: str | Writer | None = None,
    temperatures: float | Sequence[float] = (0.0, 0.7, 1.0),
    max_new_tokens: int = 512,
    batch: int = 32,
    seed: int | None = None,
    progress: Told = lambda lines, of: None,
) -> Answers:
    """Let the target answer the first questions of conversations, whose own answers are dropped, and go on
    with raw texts.

    Lines are appended batch by batch. A run continues what an interrupted one has written, and ends with the
    same file as one that was never interrupted. A question that leaves no room for an answer is discarded.

    Args:
        target: a target, or the name of one for `load_target`.
        source: a file in any training shape, or conversations and raw texts. A conversation is cut before its
            first assistant turn. Raw text, of {"text"} and {"prompt"}, is gone on with as it stands.
        out: the file to write or to continue.
        systems: each question is asked once more behind each of these system messages.
        limit: conversations, taken evenly.
        writer: the base URL of an OpenAI-compatible server that writes in the target's place.
        temperatures: used in turn, batch by batch.
        max_new_tokens: tokens of an answer, at most.
        batch: texts that are written at once.
        seed: default: 0, and none is sent to a server.
        progress: called with the lines that the file has, and with their final number.

    Raises:
        ValueError: a file cannot be read or written; `out` holds answers to other questions, by another model
            or under other settings, or another process writes it; or there is no question.
    """
    out = _checked(out, source)
    rows = conversations(source) if isinstance(source, (str, PathLike)) else source
    asked = list[Prompt](filter(None, map(_question, templated(evenly(rows, limit), several(systems)))))
    if not asked:
        raise ValueError(
            f"{len(rows)} conversations hold no question: give rows in which a user asks something"
        )
    writing = Writing(writer_of(writer, target), several(temperatures), max_new_tokens, batch, seed)
    questions, asked = len(asked), _with_room(writing.writer, asked)
    with _appending(out, writing.recorded) as (known, append):
        written = [row["prompt"] if "prompt" in row else _question(row["messages"]) for row in known]
        if written != asked[: len(written)]:
            raise ValueError(f"{out} holds answers to other questions than these: name another file")
        progress(len(written), len(asked))
        fresh = map(Question, asked[writing.begin(len(written)) :] if len(written) < len(asked) else [])
        for number, row in enumerate(writing.rows(fresh, len(written)), len(written) + 1):
            append(row)
            progress(number, len(asked))
    return Answers(**made(), path=out, lines=len(asked), discarded=questions - len(asked))


def conversations(path: str | PathLike[str]) -> list[Prompt]:
    """The conversations and raw texts of a file in any training shape. Raises ValueError for an empty one."""
    found = list(read_rows(fspath(path)))
    if offering := [number for number, row in found if "tools" in row]:
        raise ValueError(
            f"{path}, line {offering[0]}: regenerate offers no tools: leave them out, or train on this answer"
        )
    if not found:
        raise ValueError(f"{path} has no rows: give questions, or raw texts to go on with")
    return [row.get("messages") or row.get("prompt") or row.get("text", []) for _, row in found]


def templated(rows: Sequence[Prompt], systems: Sequence[str]) -> list[Prompt]:
    """Each conversation as it is, and once under each system message instead of its own (BiTA, Table 6). Raw
    text has none."""
    found = list[Prompt]()
    for messages in rows:
        if isinstance(messages, str):
            found.append(messages)
            continue
        bare = [message for message in messages if message["role"] != "system"]
        found += [messages, *([{"role": "system", "content": system}, *bare] for system in systems)]
    return found


@public
def synthesize(
    target: AnyTarget,
    out: str | PathLike[str],
    *,
    prompts: int = 200,
    kinds: str | Sequence[str] = ("any",),
    writer: str | Writer | None = None,
    temperatures: float | Sequence[float] = (0.0, 0.7, 1.0),
    prompt_temperature: float = 0.8,
    max_new_tokens: int = 512,
    batch: int = 32,
    seed: int | None = None,
    progress: Told = lambda lines, of: None,
) -> Answers:
    """Let the target write prompts and answer them, batch by batch. Without a chat template it begins raw
    texts and goes on with them. A run continues an interrupted file, and ends with the same file as one that
    was never interrupted. A prompt that leaves no room for an answer is discarded.

    Args:
        target, out, writer, temperatures, max_new_tokens, batch, seed, progress: as `regenerate` takes them.
        prompts: how many to write, at `prompt_temperature`.
        kinds: any, maths, code, writing, questions, reading, summaries, translation and turns: of each about
            as many. Prompts of the last four are about answers before them.

    Raises:
        ValueError: the target writes no usable prompts; a kind is unknown; the file
            cannot be written, holds something else, or answers by another model or under other settings; or
            another process writes it.
    """
    check_counts(prompts=prompts)
    out, target = _checked(out), loaded(target)
    chosen, kinds = writer_of(writer, target), several(kinds)
    writing = Writing(chosen, several(temperatures), max_new_tokens, batch, seed, prompt_temperature, kinds)
    if not is_raw(target):
        opening_of(target, [])
    with _appending(out, writing.recorded) as (rows, append):
        progress(len(rows), prompts)
        crowded: list[Messages] = []
        own = (prompt_temperature, batch, writing.seed, rows, kinds, crowded)
        for row in writing.rows(synthesize_prompts(target, chosen, prompts, *own), len(rows)):
            append(row)
            progress(len(rows), prompts)
    return Answers(**made(), path=out, lines=len(rows), discarded=len(crowded))


def _question(messages: Prompt) -> Prompt:
    if isinstance(messages, str):
        return messages
    turns = [message["role"] for message in messages]
    return messages[: turns.index("assistant")] if "assistant" in turns else messages


def _with_room(writer: Writer, questions: Sequence[Prompt]) -> list[Prompt]:
    """The questions that leave room for an answer. Raises ValueError if none does, or one cannot be asked."""
    found = list[Prompt]()
    for number, question in enumerate(questions, 1):
        try:
            found += [question] if writer.has_room(question) else []
        except ValueError as error:
            raise ValueError(f"question {number}: {error}") from error
    if not found:
        raise ValueError(f"none of {len(questions)} questions leaves room for an answer: shorten them")
    return found


def _checked(out: str | PathLike[str], source: Any = None) -> str:
    """The output's name. Raises ValueError where no file can be written there, it is the source, or its rows
    would be read as raw text."""
    out = written_to(out)
    if out in STANDARD or (os.path.exists(out) and not os.path.isfile(out)):
        raise ValueError(f"output {out} is no file: name one, which an interrupted run can go on with")
    check_lines(out)
    check_writable(out, reads=[fspath(source)] if isinstance(source, (str, PathLike)) else [])
    return out


@contextmanager
def _appending(
    path: str, recorded: dict[str, Any]
) -> Iterator[tuple[Rows, Callable[[dict[str, Any]], None]]]:
    """The rows that a locked file already holds, and a function that appends one, to the file and to them.
    Raises ValueError: the file holds something else, was made otherwise, is written by another process, or
    cannot be written."""
    with locked(path):
        rows = _written(path)
        for row in rows:
            _check_made(path, row.get("made"), recorded)

        def append(row: dict[str, Any]) -> None:
            try:
                with open(path, "a", encoding="utf-8") as file:
                    file.write(json.dumps(row, ensure_ascii=False) + "\n")
            except OSError as error:
                raise ValueError(
                    f"output {path} cannot be written: {error.strerror}: what is there stays; run it again"
                ) from error
            rows.append(row)

        yield rows, append


def _check_made(path: str, theirs: Any, ours: dict[str, Any]) -> None:
    """Raise ValueError if a row was made by another model or under other writing. A target may have several
    names, so its name is not compared; nor is what earlier versions did not record."""
    if not isinstance(theirs, dict):
        raise ValueError(
            f"{path} does not say how it was made, as earlier versions did not: train on it, and name "
            "another file"
        )
    theirs = {"generation_config": ours.get("generation_config"), **theirs}
    names = [name for name in ours | theirs if name != "target" and ours.get(name) != theirs.get(name)]
    if names:
        was, now = (", ".join(f"{name} {of.get(name, 'none')}" for name in names) for of in (theirs, ours))
        raise ValueError(
            f"{path} was made with {was}, not {now}: go on with what it was made with, or name another file"
        )


def _written(path: str) -> list[dict[str, Any]]:
    """The rows that a file already holds. An incomplete last line is cut off, if `regenerate` or `synthesize`
    wrote it. Raises ValueError."""
    try:
        if not os.path.exists(path):
            return []
        with open(path, "rb+") as file:
            *lines, half = file.read().split(b"\n")
            rows = [parsed(line.decode()) for line in lines]
            begun = json.dumps(ABOUT)[:-1].encode()
            own = all(row.items() >= ABOUT.items() and (row.get("messages") or row["prompt"]) for row in rows)
            turns = (each for row in rows for each in row.get("messages", ()))
            own = own and all({*each} >= {"role", "content"} for each in turns)
            if not own or half[: len(begun)] != begun[: len(half)]:
                raise ValueError("not written by synthesize or regenerate")
            file.truncate(sum(len(line) + 1 for line in lines))
            return rows
    except OSError as error:
        raise ValueError(f"output {path} cannot be written: {error.strerror}: name another file") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} holds something else than answers: name another file") from error
