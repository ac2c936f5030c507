"""Training data that the target writes: answers to given prompts, and prompts from its own chat template."""

import os
from collections.abc import Callable, Sequence
from itertools import takewhile
from os import PathLike, fspath
from typing import Any

from rich.text import Text

from slipstream.files import STANDARD, check_counts, check_writable, evenly, several, written_to
from slipstream.provenance import public
from slipstream.results import Result, made
from slipstream.targets.load import AnyTarget, loaded
from slipstream.training.data import check_lines, read_rows
from slipstream.training.generators import Prompt, TextRequest, TextWriter, Writing, writer_of
from slipstream.training.prompt_kinds import check_kinds, prompt_of, synthesize_prompts
from slipstream.training.resume import answer_file

LineProgress = Callable[[int, int], None]  # called with the lines in the file and their final number


class Answers(Result):
    """A file of training data, one conversation a line. `discarded`: prompts of this run that left no room
    for an answer."""

    path: str
    lines: int
    discarded: int = 0

    def __rich__(self) -> Text:
        others = f"; prompts that left no room for an answer were discarded: {self.discarded}"
        return Text(f"{self.lines} answers in {self.path}{others if self.discarded else ''}")


@public
def regenerate(
    target: AnyTarget,
    source: str | PathLike[str] | Sequence[Prompt],
    out: str | PathLike[str],
    *,
    systems: str | Sequence[str] = (),
    limit: int | None = None,
    writer: str | TextWriter | None = None,
    temperatures: float | Sequence[float] = (0.0, 0.7, 1.0),
    max_new_tokens: int = 512,
    batch: int = 32,
    seed: int | None = None,
    progress: LineProgress = lambda lines, of: None,
) -> Answers:
    """Let the target answer the first questions of conversations, whose own answers are dropped, and go on
    with raw texts. Lines are appended batch by batch. A run continues an interrupted file, and ends with the
    same file as one that was never interrupted. A question that leaves no room for an answer is discarded.

    Args:
        target: a target, or the name of one for `load_target`.
        source: a file in any training shape, or conversations and raw texts. A conversation is cut before its
            first assistant turn. Raw text, of {"text"} and {"prompt"}, is gone on with as it stands.
        out: the file to write or to continue.
        systems: each question is asked once more after each of these system messages.
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
    questions = list[Prompt](filter(None, map(_question, templated(evenly(rows, limit), several(systems)))))
    if not questions:
        fix = "give rows in which a user asks something"
        raise ValueError(f"{len(rows)} conversations hold no question: {fix}")
    writing = Writing(writer_of(writer, target), several(temperatures), max_new_tokens, batch, seed)
    fitting = _with_room(writing.writer, questions)
    with answer_file(out, writing.record) as (written, append):
        answered = list(map(prompt_of, written))
        if answered != fitting[: len(answered)]:
            raise ValueError(f"{out} holds answers to other questions than these: name another file")
        progress(len(written), len(fitting))
        others = fitting[writing.first(len(written)) :] if len(written) < len(fitting) else []
        for row in writing.rows(map(TextRequest, others), len(written)):
            append(row)
            progress(len(written), len(fitting))
    return Answers(**made(), path=out, lines=len(fitting), discarded=len(questions) - len(fitting))


def conversations(path: str | PathLike[str]) -> list[Prompt]:
    """The conversations and raw texts of a file in any training shape. Raises ValueError for an empty one."""
    prompts = list[Prompt]()
    for number, row in read_rows(fspath(path)):
        if "tools" in row:
            fix = "leave them out, or train on this answer"
            raise ValueError(f"{path}, line {number}: regenerate offers no tools: {fix}")
        prompts.append(row.get("messages") or row.get("prompt") or row.get("text", []))
    if not prompts:
        raise ValueError(f"{path} has no rows: give questions, or raw texts to go on with")
    return prompts


def templated(rows: Sequence[Prompt], systems: Sequence[str]) -> list[Prompt]:
    """Each conversation as it is, and once under each system message instead of its own (BiTA, Table 6). Raw
    text has none."""
    prompts = list[Prompt]()
    for messages in rows:
        prompts.append(messages)
        if not isinstance(messages, str):
            bare = [message for message in messages if message["role"] != "system"]
            prompts += [[{"role": "system", "content": system}, *bare] for system in systems]
    return prompts


@public
def synthesize(
    target: AnyTarget,
    out: str | PathLike[str],
    *,
    prompts: int = 200,
    kinds: str | Sequence[str] = ("any",),
    writer: str | TextWriter | None = None,
    temperatures: float | Sequence[float] = (0.0, 0.7, 1.0),
    prompt_temperature: float = 0.8,
    max_new_tokens: int = 512,
    batch: int = 32,
    seed: int | None = None,
    progress: LineProgress = lambda lines, of: None,
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
        ValueError: the target writes no usable prompts; a kind is unknown; the file cannot be written, holds
            something else, or answers by another model or under other settings; or another process writes it.
    """
    check_counts(prompts=prompts)
    out, target = _checked(out), loaded(target)
    check_kinds(kinds := several(kinds))
    writer, temperatures = writer_of(writer, target), several(temperatures)
    writing = Writing(writer, temperatures, max_new_tokens, batch, seed, prompt_temperature, kinds)
    with answer_file(out, writing.record) as (rows, append):
        progress(len(rows), prompts)
        crowded: list[Prompt] = []
        for row in writing.rows(synthesize_prompts(target, writing, prompts, rows, crowded), len(rows)):
            append(row)
            progress(len(rows), prompts)
    return Answers(**made(), path=out, lines=len(rows), discarded=len(crowded))


def _question(prompt: Prompt) -> Prompt:
    """Raw text, or a conversation up to its first answer."""
    if isinstance(prompt, str):
        return prompt
    return list(takewhile(lambda turn: turn["role"] != "assistant", prompt))


def _with_room(writer: TextWriter, questions: Sequence[Prompt]) -> list[Prompt]:
    """The questions that leave room for an answer. Raises ValueError if none does, or one cannot be asked."""
    fitting = list[Prompt]()
    for number, question in enumerate(questions, 1):
        try:
            fitting += [question] if writer.has_room(question) else []
        except ValueError as error:
            raise ValueError(f"question {number}: {error}") from error
    if not fitting:
        raise ValueError(f"none of {len(questions)} questions leaves room for an answer: shorten them")
    return fitting


def _checked(out: str | PathLike[str], source: Any = None) -> str:
    """The output's name. Raises ValueError where no file of rows can be written there."""
    out = written_to(out)
    if out in STANDARD or (os.path.exists(out) and not os.path.isfile(out)):
        raise ValueError(f"output {out} is no file: name one, which an interrupted run can go on with")
    check_lines(out)
    check_writable(out, reads=[fspath(source)] if isinstance(source, (str, PathLike)) else [])
    return out
