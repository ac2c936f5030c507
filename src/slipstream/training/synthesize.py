"""Training data that the target writes: answers to given prompts, and prompts from its own chat template."""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count, islice
from os import PathLike, fspath
from typing import Any

from rich.text import Text

from slipstream.command import public
from slipstream.core.sampling import Sampling
from slipstream.core.target import Target
from slipstream.files import STANDARD, check_counts, check_writable, evenly, locked, parsed
from slipstream.results import Result, made
from slipstream.targets.load import AnyTarget, loaded
from slipstream.training.data import read_rows
from slipstream.training.writers import Messages, Writer, wrapped, writer_of

HERE = "\u2983slipstream\u2984"  # a user's message whose place in the rendered template is searched
ABOUT = {"source": "self"}  # every row begins with this
PATIENCE = 5  # batches without a usable prompt, after which synthesis stops
PROMPT_TOKENS = (4, 200)  # shorter and longer prompts are discarded
Told = Callable[[int, int], None]  # called with the lines in the file and their final number


class Answers(Result):
    """A file of training data, one conversation a line."""

    path: str
    lines: int

    def __rich__(self) -> Text:
        return Text(f"{self.lines} answers in {self.path}")


@dataclass(frozen=True)
class Writing:
    """A writer and its settings. Batches take the temperatures in turn. Raises ValueError."""

    writer: Writer
    temperatures: Sequence[float]
    max_new_tokens: int
    batch: int
    seed: int
    prompt_temperature: float | None = None

    def __post_init__(self) -> None:
        temperatures = len(self.temperatures)
        check_counts(max_new_tokens=self.max_new_tokens, batch=self.batch, temperatures=temperatures)
        for temperature in (*self.temperatures, self.prompt_temperature or 0.0):
            Sampling(temperature=temperature, seed=self.seed)

    @property
    def recorded(self) -> dict[str, Any]:
        """The model and the settings, as each row records them."""
        recorded = {**self.writer.about, **vars(self), "temperatures": list(self.temperatures)}
        return {name: value for name, value in recorded.items() if name != "writer" and value is not None}


@public
def regenerate(
    target: AnyTarget,
    source: str | PathLike[str] | Sequence[Messages],
    out: str | PathLike[str],
    *,
    systems: Sequence[str] = (),
    limit: int | None = None,
    writer: str | Writer | None = None,
    temperatures: Sequence[float] = (0.0, 0.7, 1.0),
    max_new_tokens: int = 512,
    batch: int = 32,
    seed: int = 0,
    progress: Told = lambda lines, of: None,
) -> Answers:
    """Let the target answer the first questions of conversations, whose own answers are dropped.

    Lines are appended batch by batch. A run continues what an interrupted one has written.

    Args:
        target: a target, or the name of one for `load_target`.
        source: a file in any training shape, or conversations; each is cut before its first assistant turn.
        out: the file to write or to continue.
        systems: each question is asked once more behind each of these system messages.
        limit: conversations, taken evenly.
        writer: the base URL of an OpenAI-compatible server that writes in the target's place.
        temperatures: used in turn, batch by batch.

    Raises:
        ValueError: a file cannot be read or written; `out` holds answers to other questions, by another model
            or under other settings, or another process writes it; or there is no question.
    """
    out = _checked(out, source)
    rows = conversations(source) if isinstance(source, (str, PathLike)) else source
    asked = list(filter(None, map(_question, templated(evenly(rows, limit), systems))))
    if not asked:
        raise ValueError(
            f"{len(rows)} conversations hold no question: give rows in which a user asks something"
        )
    writing = Writing(writer_of(writer, target), temperatures, max_new_tokens, batch, seed)
    writing.writer.check(asked, max_new_tokens)
    with _appending(out, writing) as (known, append):
        written = list(map(_question, known))
        if written != asked[: len(written)]:
            raise ValueError(f"{out} holds answers to other questions than these: name another file")
        progress(len(written), len(asked))
        for start in range(len(written) // batch * batch, len(asked), batch):
            if fresh := asked[max(len(written), start) : start + batch]:
                append(fresh, start)
                progress(min(start + batch, len(asked)), len(asked))
    return Answers(**made(), path=out, lines=len(asked))


def conversations(path: str | PathLike[str]) -> list[Messages]:
    """The conversations of a file in any training shape. Raises ValueError where there are none."""
    rows = [row["messages"] for _, row in read_rows(fspath(path)) if "messages" in row]
    if not rows:
        raise ValueError(f"{path} has no conversations: raw text is trained on as it is")
    return rows


def templated(rows: Sequence[Messages], systems: Sequence[str]) -> list[Messages]:
    """Each conversation as it is, and once under each system message instead of its own (BiTA, Table 6)."""
    conversations = []
    for messages in rows:
        bare = [message for message in messages if message["role"] != "system"]
        conversations += [messages, *([{"role": "system", "content": system}, *bare] for system in systems)]
    return conversations


@public
def synthesize(
    target: AnyTarget,
    out: str | PathLike[str],
    *,
    prompts: int = 200,
    writer: str | Writer | None = None,
    temperatures: Sequence[float] = (0.0, 0.7, 1.0),
    prompt_temperature: float = 0.8,
    max_new_tokens: int = 512,
    batch: int = 32,
    seed: int = 0,
    progress: Told = lambda lines, of: None,
) -> Answers:
    """Let the target write prompts and answer them, batch by batch. A run continues an interrupted file.

    Args:
        target, out, writer, temperatures: as `regenerate` takes them.
        prompts: how many to write, at `prompt_temperature`.

    Raises:
        ValueError: the target has no chat template, or writes no usable prompts; the file cannot be written,
            holds something else, or answers by another model or under other settings; or another process
            writes it.
    """
    check_counts(prompts=prompts)
    out, target = _checked(out), loaded(target)
    chosen = writer_of(writer, target)
    writing = Writing(chosen, temperatures, max_new_tokens, batch, seed, prompt_temperature)
    with _appending(out, writing) as (known, append):
        asked = [_question(messages)[0]["content"] for messages in known]
        done = len(asked)
        progress(done, prompts)
        next_seed = wrapped(seed + done)
        more = synthesize_prompts(target, chosen, prompts, prompt_temperature, batch, next_seed, asked)
        while fresh := [[{"role": "user", "content": text}] for text in islice(more, batch)]:
            append(fresh, done)
            done += len(fresh)
            progress(done, prompts)
    return Answers(**made(), path=out, lines=done)


def synthesize_prompts(
    target: Target,
    writer: Writer,
    n: int,
    temperature: float,
    batch: int,
    seed: int = 0,
    known: Iterable[str] = (),
) -> Iterator[str]:
    """Prompts that the target writes when it continues its chat template from where a user's words begin, `n`
    together with the `known` ones. Too short, too long, unfinished and repeated ones are discarded. Raises
    ValueError: the target has no chat template, or does not write usable prompts."""
    opening = opening_of(target)
    kept = set(known)
    idle = 0
    assert target.text is not None
    for i in count():
        if len(kept) >= n:
            return
        before = len(kept)
        for written in writer.go_on(opening, batch, temperature, PROMPT_TOKENS[1], wrapped(seed + i)):
            length = len(target.text.ids(written.text, special=True))
            if written.finished and length >= PROMPT_TOKENS[0] and written.text not in kept and len(kept) < n:
                kept.add(written.text)
                yield written.text
        idle = idle + 1 if len(kept) == before else 0
        if idle == PATIENCE:
            raise ValueError(
                f"target {target.name} wrote {len(kept)} usable prompts and then none: raise the "
                "temperature, or give prompts of your own to `slipstream regenerate`"
            )


def opening_of(target: Target) -> str:
    """The chat template's text up to the user's words. Raises ValueError if there is no template."""
    if target.text is None or not target.text.has_chat:
        raise ValueError(
            f"target {target.name} has no chat template to write prompts from: use `slipstream regenerate`"
        )
    text = target.text.render([{"role": "user", "content": HERE}], ask=False)
    return text[: text.index(HERE)]


def _question(messages: Messages) -> Messages:
    turns = [message["role"] for message in messages]
    return messages[: turns.index("assistant")] if "assistant" in turns else messages


def _checked(out: str | PathLike[str], source: Any = None) -> str:
    """The output's name. Raises ValueError where no file can be written there, or it is the source."""
    out = fspath(out)
    if out in STANDARD or (os.path.exists(out) and not os.path.isfile(out)):
        raise ValueError(f"output {out} is no file: name one, which an interrupted run can go on with")
    check_writable(out, reads=[fspath(source)] if isinstance(source, (str, PathLike)) else [])
    return out


@contextmanager
def _appending(
    path: str, writing: Writing
) -> Iterator[tuple[list[Messages], Callable[[Sequence[Messages], int], None]]]:
    """The conversations that a locked file already holds, and a function that answers questions and appends
    them; its second argument is the number of the first. Raises ValueError: the file holds something else,
    was made otherwise, is written by another process, or cannot be written."""
    recorded = writing.recorded

    def append(asked: Sequence[Messages], start: int) -> None:
        temperature = writing.temperatures[start // writing.batch % len(writing.temperatures)]
        seed = wrapped(writing.seed + start)
        answers = writing.writer.answer(asked, temperature, writing.max_new_tokens, seed)
        lines = []
        for question, answer in zip(asked, answers, strict=True):
            messages = [*question, {"role": "assistant", "content": answer.text}]
            row = {"made": recorded, "temperature": temperature, "finished": answer.finished}
            lines.append(json.dumps({**ABOUT, **row, "messages": messages}, ensure_ascii=False) + "\n")
        try:
            with open(path, "a", encoding="utf-8") as file:
                file.writelines(lines)
        except OSError as error:
            raise ValueError(
                f"output {path} cannot be written: {error.strerror}: what is there stays; run it again"
            ) from error

    with locked(path):
        rows = _written(path)
        for row in rows:
            _check_made(path, row.get("made"), recorded)
        yield [row["messages"] for row in rows], append


def _check_made(path: str, theirs: Any, ours: dict[str, Any]) -> None:
    """Raise ValueError if a row was made by another model or under other writing. A target may have several
    names, so its name is not compared."""
    if not isinstance(theirs, dict):
        raise ValueError(
            f"{path} does not say how it was made, as earlier versions did not: train on it, and name "
            "another file"
        )
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
            own = all(row.items() >= ABOUT.items() and row["messages"] for row in rows)
            if not own or half[: len(begun)] != begun[: len(half)]:
                raise ValueError("not written by synthesize or regenerate")
            file.truncate(sum(len(line) + 1 for line in lines))
            return rows
    except OSError as error:
        raise ValueError(f"output {path} cannot be written: {error.strerror}: name another file") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} holds something else than answers: name another file") from error
