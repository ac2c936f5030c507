"""Prompts that the target writes itself, begun with words that steer their kind."""

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any, NamedTuple

from slipstream.core.target import Target
from slipstream.provenance import suggested
from slipstream.training.dedup import loops
from slipstream.training.generators import Messages, Prompt, Writer, Written, has_room, wrapped

HERE = "\u2983slipstream\u2984"  # a user's message whose place in the rendered template is searched
ASK = "regenerate prompts.jsonl --out answers.jsonl"
PATIENCE = 5  # batches' worth of tries without a usable prompt, after which synthesis stops
WORDS = (4, 200)  # tokens of what the target writes of a prompt: shorter and longer ones are discarded
FIRST = 32  # tokens of a raw text that a target without a chat template begins and goes on with
LONGEST = 1500  # tokens of a prompt, with the text that it is about and earlier turns
TEXT_WORDS = 60  # at least, of an earlier answer that a prompt is about
UNUSED = 0.75  # of a prompt that is not used is not counted; of all, a kind that never fits took all turns
TRIES = 30  # answers that are looked at to find one
FREE = {  # kinds whose prompts need nothing before them, and words that begin them
    "any": [""],
    "maths": [
        *("A train", "If a", "A shop sells", "Solve", "What is the sum of", "Calculate", "A farmer has"),
        *("How many", "Find the value of", "Prove that", "A rectangle has", "Tom has"),
    ],
    "code": [
        *("Write a Python function", "Write a program", "What does this code do?\n\n", "Write an SQL query"),
        *("Fix the bug in this code:\n\n", "Write a JavaScript function", "Implement", "Write a C++ program"),
        *("Explain this code:\n\n", "How do I use Python to", "Write a shell script", "Write a class"),
    ],
    "writing": [
        *("Write a story about", "Write a letter", "Write an email", "Write a poem", "Write an essay on"),
        *("Imagine", "Write a dialogue between", "Write a product description", "Write a speech"),
        *("Continue this story:", "Write an article about", "Write a review of"),
    ],
    "questions": [
        *("What is", "Why do", "Explain", "How does", "Who was", "What are the differences between"),
        *("Make a table of", "Give me some tips", "List", "What happens if", "When did", "Compare"),
    ],
}
ABOUT = {  # kinds whose prompts follow a text that the target wrote before
    "reading": ["According to the text,", "Based on the text above,", "What does the author", "In the text,"],
    "summaries": ["Summarize", "Write a short summary", "What are the main points", "Give the text a title"],
    "translation": ["Translate this into", "Translate the text above into", "How do you say this in"],
}
TURNS = {
    "turns": ["", "Can you", "What about", "Now", "Why", "Please", "Could you", "How"]
}  # follow an answer
KINDS = FREE | ABOUT | TURNS
TEXTS = ("any", "writing", "questions")  # kinds whose answers prompts of `ABOUT` follow


class Question(NamedTuple):
    """A conversation to answer, or raw text to go on with. A temperature of None is the next in turn."""

    messages: Prompt
    kind: str | None = None
    temperature: float | None = None


class Begun(NamedTuple):
    """A prompt whose first words are there: earlier turns, and the text of the last."""

    kind: str
    before: Messages
    text: str
    words: str  # with which the user's own words begin, at the end of `text`
    temperature: float | None


def check_kinds(kinds: Sequence[str]) -> None:
    """Raise ValueError for an unknown kind, and where none begins without an earlier answer, or writes the
    texts that another is about."""
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        raise ValueError(f"unknown kind {unknown[0]!r}. Available: {', '.join(KINDS)}")
    if not any(kind in FREE for kind in kinds):
        raise ValueError(f"{', '.join(kinds) or 'no kind'}: add one that needs no text: {', '.join(FREE)}")
    if (about := [kind for kind in kinds if kind in ABOUT]) and not any(kind in TEXTS for kind in kinds):
        raise ValueError(f"prompts of kind {about[0]} are about answers of others: add {', '.join(TEXTS)}")


def synthesize_prompts(
    target: Target,
    writer: Writer,
    n: int,
    temperature: float,
    batch: int,
    seed: int | None,
    rows: Sequence[dict[str, Any]],
    kinds: Sequence[str] = ("any",),
    crowded: list[Messages] | None = None,
) -> Iterator[Question]:
    """Prompts that the target writes when it continues its chat template from where a user's words begin.
    Too short, too long, unfinished and repeated ones are discarded.

    Prompts come in units of `batch`, each of which is drawn from the seed, the number of its first row and
    the rows before it alone. The unit in which `rows` end comes again as a whole.

    Args:
        n: how many, together with those of `rows`.
        rows: the answered rows. New ones may be appended meanwhile: some kinds of prompts begin with them.
        kinds: of which about equally many prompts are written.
        crowded: takes those that are discarded because they leave no room for an answer.

    Raises:
        ValueError: the target has no chat template, or does not write usable prompts.
    """
    if is_raw(target):
        yield from _raw_texts(target, writer, n, temperature, batch, seed, rows, kinds)
        return
    opening_of(target, [])
    done, crowded = len(rows), [] if crowded is None else crowded
    begin = done - done % batch
    known = Counter(row.get("kind") for row in rows[:begin])
    kept = {key for row in rows[:begin] for key in _keys(row["messages"][:-1])}
    late = {_key(row["messages"][:-1]) for row in rows[begin:]}  # a server may write others than these now
    for start in range(begin, n if done < n else 0, batch):
        # At most a share of a unit makes up for a kind's lack: one that never fits took all turns.
        least = max(known.values(), default=0) - batch / len(kinds)
        counts = {
            kind: max(float(known[kind]), least) for kind in sorted(kinds, key=lambda kind: known[kind])
        }
        earlier, used, tries = rows[:start], set(kept), 0
        made = start
        for i in count():
            if made == min(start + batch, n):
                break
            if tries >= PATIENCE * batch:
                raise ValueError(
                    f"target {target.name} wrote {made} usable prompts and then none: raise the "
                    f"temperature, or give prompts of your own: {suggested(ASK)}"
                )
            chance = random.Random(f"{seed} {start} {i}")
            begun, texts = list[Begun](), list[str]()
            size = min(batch, 2 * (start + batch - made))
            for each in [_begin(counts, used, earlier, chance) for _ in range(size)]:
                text = opening_of(target, each.before) + each.text
                if _fits(target, each, text):
                    begun.append(each)
                    texts.append(text)
                else:
                    counts[each.kind] -= UNUSED
            tries += size
            # No two share a seed.
            first = None if seed is None else wrapped(seed + (start << 32) + i * batch)
            answers = writer.go_on(texts, temperature, WORDS[1], first) if texts else []
            for each, written in zip(begun, answers, strict=True):
                prompt = _prompt(target, each, written)
                if prompt is not None and not has_room(target, prompt):
                    crowded.append(prompt)
                    prompt = None
                taken = used | late if made >= done else used
                if prompt is None or _key(prompt) in taken or made == min(start + batch, n):
                    counts[each.kind] -= UNUSED
                    continue
                tries = 0
                used.add(_key(prompt))
                kept.update(_keys(prompt))
                known[each.kind] += 1
                made += 1
                yield Question(prompt, each.kind, each.temperature)


def is_raw(target: Target) -> bool:
    """Whether a target reads text without a chat template, and so writes raw texts."""
    return target.text is not None and not target.text.has_chat


def _raw_texts(
    target: Target,
    writer: Writer,
    n: int,
    temperature: float,
    batch: int,
    seed: int | None,
    rows: Sequence[dict[str, Any]],
    kinds: Sequence[str],
) -> Iterator[Question]:
    """The first words of raw texts, as the target writes them behind its first token and the words of a kind.
    Raises ValueError as `synthesize_prompts` does, and for kinds that follow an answer."""
    words = target.text
    assert words is not None
    if other := [kind for kind in kinds if kind not in FREE]:
        raise ValueError(
            f"{other[0]} needs a chat template, which {target.name} lacks: {', '.join(FREE)} do not"
        )
    first = words.ids("", special=True) or ([] if words.eos is None else [words.eos])
    if not first:
        raise ValueError(f"{target.name} has no token that begins a text: {suggested(ASK)}")
    opening, begin = words.decode(first, special=True), len(rows) - len(rows) % batch
    used = {row["prompt"] for row in rows[:begin]}
    for start in range(begin, n if len(rows) < n else 0, batch):
        made, end = start, min(start + batch, n)
        for i in range(PATIENCE):
            chance = random.Random(f"{seed} {start} {i}")
            begun = [
                (kinds[j % len(kinds)], chance.choice(FREE[kinds[j % len(kinds)]])) for j in range(made, end)
            ]
            drawn = None if seed is None else wrapped(seed + (start << 32) + i * batch)  # no two share a seed
            texts = [opening + said for _, said in begun]
            made_now = (
                writer.go_on(texts, temperature, min(FIRST, target.window // 2), drawn) if texts else []
            )
            for (kind, said), written in zip(begun, made_now, strict=True):
                text = said + written.text
                if text not in used and len(words.ids(text)) >= WORDS[0]:
                    used.add(text)
                    made += 1
                    yield Question(text, kind)
        if made < end:
            raise ValueError(
                f"target {target.name} wrote {made} usable beginnings of texts and then none: raise the "
                f"temperature, or give texts of your own: {suggested(ASK)}"
            )


def opening_of(target: Target, before: Messages) -> str:
    """The chat template's text up to the user's next words. Raises ValueError if there is no template, or if
    it does not render a user's words as they are."""
    if target.text is None or not target.text.has_chat:
        raise ValueError(
            f"target {target.name} has no chat template to write prompts from: "
            f"give prompts of your own: {suggested(ASK)}"
        )
    text = target.text.render([*before, {"role": "user", "content": HERE}], ask=False)
    opening, here, _ = text.partition(HERE)
    if not here:
        raise ValueError(
            f"target {target.name}'s chat template changes a user's words, so that no prompts can be begun "
            f"in it: give prompts of your own: {suggested(ASK)}"
        )
    return opening


def _fits(target: Target, begun: Begun, text: str) -> bool:
    """Whether the window has room behind a text, for the longest words, or half of a small window; and no
    earlier turn writes a special token, which the text, as it is gone on with, could not tell from one."""
    assert target.text is not None
    if target.text.render([*begun.before, {"role": "user", "content": begun.text}], ask=False).masked:
        return False
    return len(target.text.ids(text)) <= max(target.window - WORDS[1], target.window // 2)


def _begin(
    counts: dict[str, float],
    kept: set[tuple[str, ...]],
    rows: Sequence[dict[str, Any]],
    chance: random.Random,
) -> Begun:
    """A prompt of the rarest kind that can be begun, which is counted. An answer that a conversation goes on
    from is put into `kept`."""
    for kind in sorted(counts, key=lambda kind: counts[kind]):
        words, before, text = chance.choice(KINDS[kind]), [], ""
        temperature = None
        if kind in TURNS:
            if (row := _earlier(rows, chance, kind, kept)) is None:
                continue
            before, temperature = row["messages"], row["temperature"]
            kept.add(_key(before))
        elif kind in ABOUT:
            texts = [_earlier(rows, chance, kind, kept) for _ in range(chance.choice([1, 1, 2]))]
            if None in texts:
                continue
            text = _joined([row["messages"][-1]["content"] for row in texts if row is not None], kind)
        counts[kind] += 1
        return Begun(kind, before, text + words, words, temperature)
    raise AssertionError("a free kind can always be begun")


def _joined(texts: Sequence[str], kind: str) -> str:
    """The text that a prompt is about: a paragraph to translate, or one or two whole texts."""
    if kind == "translation":
        texts = [next(part for part in texts[0].split("\n") if part.strip())]
    return "\n\n".join([*texts, ""])


def _earlier(
    rows: Sequence[dict[str, Any]], chance: random.Random, kind: str, kept: set[tuple[str, ...]]
) -> dict[str, Any] | None:
    """A finished answer to go on from, or to write about; None if none is found."""
    for row in (chance.choice(rows) for _ in range(TRIES if rows else 0)):
        answer, about = row["messages"][-1]["content"], row.get("kind") in TEXTS
        fits = len(answer.split()) >= TEXT_WORDS and about
        if kind in TURNS:
            fits = len(row["messages"]) < 6 and _key(row["messages"]) not in kept
        if fits and answer and row["finished"] and not loops(answer):
            return row
    return None


def _prompt(target: Target, begun: Begun, written: Written) -> Messages | None:
    """The whole conversation; None if its last words were cut, or are too few or too many."""
    assert target.text is not None
    words = target.text.ids((begun.words + written.text).strip(), special=True)
    prompt = [*begun.before, {"role": "user", "content": (begun.text + written.text).strip()}]
    if not written.finished or len(words) < WORDS[0]:
        return None
    long = begun.before or begun.text != begun.words
    return None if long and len(target.text.ids(target.text.render(prompt, ask=True))) > LONGEST else prompt


def _keys(prompt: Messages) -> tuple[tuple[str, ...], ...]:
    """Of a prompt, and of the conversation that it goes on from."""
    return _key(prompt), _key(prompt[:-1])


def _key(messages: Messages) -> tuple[str, ...]:
    return tuple(message["content"] for message in messages)
