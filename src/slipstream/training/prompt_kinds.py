"""Prompts that the target writes itself, begun with words that steer their kind."""

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import yaml

from slipstream.core.target import Target
from slipstream.provenance import suggested
from slipstream.training.dedup import loops
from slipstream.training.generators import (
    Messages,
    Prompt,
    TargetWriter,
    TextRequest,
    Writing,
    Written,
    derived,
)
from slipstream.training.resume import Row

PLACE = "\u2983slipstream\u2984"  # a user's message that marks its place in the rendered template
ASK = "regenerate prompts.jsonl --out answers.jsonl"
PATIENCE = 5  # batches' worth of tries without a usable prompt, after which synthesis stops
WORDS = (4, 200)  # the fewest and the most tokens of a prompt that the target writes
FIRST = 32  # tokens that begin a raw text, of a target without a chat template
LONGEST = 1500  # tokens of a prompt, with the text that it is about and earlier turns
TEXT_WORDS = 60  # at least, of an earlier answer that a prompt is about
UNUSED = 0.75  # of an unused prompt is not counted; if all were, a kind that never fits would take all turns
TRIES = 30  # answers that are examined to find a fitting one
FREE, ABOUT, TURNS = yaml.safe_load(Path(__file__).with_name("prompt_openings.yaml").read_text()).values()
KINDS = FREE | ABOUT | TURNS
TEXTS = ("any", "writing", "questions")  # kinds whose answers prompts of `ABOUT` follow


Used = set[tuple[str, ...]]  # conversations, by what their turns say


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
    target: Target, writing: Writing, n: int, rows: Sequence[Row], crowded: list[Prompt]
) -> Iterator[TextRequest]:
    """Prompts that the target writes when it continues its chat template from where a user's words begin, or
    without a template the first words of raw texts; of each kind about as many. Too short, too long,
    unfinished and repeated ones are discarded.

    Prompts come in units of `batch`, each of which is drawn from the seed, the number of its first row and
    the rows before it alone. The unit in which `rows` end comes again as a whole.

    Args:
        n: how many, together with those of `rows`.
        rows: the answered rows. New ones may be appended meanwhile: some kinds of prompts begin with them.
        crowded: takes those that are discarded because they leave no room for an answer.

    Raises:
        ValueError: the target writes no usable prompts; or none of its kinds, without a template.
    """
    raw, kinds = target.text is not None and not target.text.has_chat, writing.kinds
    batch, temperature = writing.batch, writing.prompt_temperature or 0.0
    if raw and (other := [kind for kind in kinds if kind not in FREE]):
        free = ", ".join(FREE)
        raise ValueError(f"{other[0]} needs a chat template, which {target.name} lacks: {free} do not")
    opening_of(target, [])
    limit = min(FIRST, target.window // 2) if raw else WORDS[1]
    done, begin = len(rows), writing.first(len(rows))
    per_kind = Counter(row.get("kind") for row in rows[:begin])
    known = {key for row in rows[:begin] for key in _keys(prompt_of(row))}
    late = {_key(prompt_of(row)) for row in rows[begin:]}  # a server may write others than these now
    for start in range(begin, n if done < n else 0, batch):
        # At most a share of a unit makes up for a kind's lack: one that never fits would take all turns.
        least = max(per_kind.values(), default=0) - batch / len(kinds)
        by_number = sorted(kinds, key=lambda kind: per_kind[kind])
        counts = {kind: max(float(per_kind[kind]), least) for kind in by_number}
        earlier, used, number, end = rows[:start], set(known), start, min(start + batch, n)
        i = tries = 0
        while number < end:
            if tries >= PATIENCE * batch:
                what, own = ("beginnings of texts", "texts") if raw else ("prompts", "prompts")
                fix = f"raise the temperature, or give {own} of your own: {suggested(ASK)}"
                raise ValueError(f"target {target.name} wrote {number} usable {what} and then none: {fix}")
            chance = random.Random(f"{writing.seed} {start} {i}")
            size = min(batch, 2 * (start + batch - number))
            begun, texts = list[Begun](), list[str]()
            for prompt in [_begin(counts, used, earlier, chance) for _ in range(size)]:
                text = opening_of(target, prompt.before) + prompt.text
                if raw or _fits(target, prompt, text):
                    begun.append(prompt)
                    texts.append(text)
                else:
                    counts[prompt.kind] -= UNUSED
            # No two batches share a seed.
            seed = derived(writing.seed, (start << 32) + i * batch)
            i, tries = i + 1, tries + size
            answers = writing.writer.go_on(texts, temperature, limit, seed) if texts else []
            for prompt, answer in zip(begun, answers, strict=True):
                whole = _whole(target, prompt, answer, raw)
                if whole is not None and not TargetWriter(target).has_room(whole):
                    crowded.append(whole)
                    whole = None
                taken = used | late if number >= done else used
                if whole is None or _key(whole) in taken or number == end:
                    counts[prompt.kind] -= UNUSED
                    continue
                used.add(_key(whole))
                known |= _keys(whole)
                per_kind[prompt.kind] += 1
                number, tries = number + 1, 0
                yield TextRequest(whole, prompt.temperature, kind=prompt.kind)


def opening_of(target: Target, before: Messages) -> str:
    """The chat template's text up to the user's next words; without a template, that of the token that begins
    raw texts. Raises ValueError if there is neither, or if the template changes a user's words."""
    text, own = target.text, f"give prompts of your own: {suggested(ASK)}"
    if text is None:
        raise ValueError(f"target {target.name} has no chat template to write prompts from: {own}")
    if not text.has_chat:
        first = text.ids("", special=True) or ([] if text.eos is None else [text.eos])
        if not first:
            raise ValueError(f"{target.name} has no token that begins a text: {suggested(ASK)}")
        return text.decode(first, special=True)
    rendered = text.render([*before, {"role": "user", "content": PLACE}], ask=False)
    opening, place, _ = rendered.partition(PLACE)
    if not place:
        changes = "chat template changes a user's words, so that no prompts can be begun in it"
        raise ValueError(f"target {target.name}'s {changes}: {own}")
    return opening


def _fits(target: Target, begun: Begun, text: str) -> bool:
    """Whether the window has room for words after the text, and no earlier turn writes a special token."""
    assert target.text is not None  # raw text cannot tell a written special token from a real one
    if target.text.render([*begun.before, {"role": "user", "content": begun.text}], ask=False).masked:
        return False
    return len(target.text.ids(text)) <= max(target.window - WORDS[1], target.window // 2)


def _begin(counts: dict[str, float], used: Used, rows: Sequence[Row], chance: random.Random) -> Begun:
    """A prompt of the rarest kind that can be begun. It is counted, and what it continues is `used`."""
    for kind in sorted(counts, key=lambda kind: counts[kind]):
        words, before, text, temperature = chance.choice(KINDS[kind]), [], "", None
        if kind in TURNS:
            if (row := _earlier(rows, chance, kind, used)) is None:
                continue
            before, temperature = row["messages"], row["temperature"]
            used.add(_key(before))
        elif kind in ABOUT:
            about = [_earlier(rows, chance, kind, used) for _ in range(chance.choice([1, 1, 2]))]
            if None in about:
                continue
            texts = [row["messages"][-1]["content"] for row in about if row is not None]
            if kind == "translation":  # of a paragraph
                texts = [next(part for part in texts[0].split("\n") if part.strip())]
            text = "\n\n".join([*texts, ""])
        counts[kind] += 1
        return Begun(kind, before, text + words, words, temperature)
    raise AssertionError("a free kind can always be begun")


def _earlier(rows: Sequence[Row], chance: random.Random, kind: str, used: Used) -> Row | None:
    """A finished answer to go on from, or to write about, if one is found."""
    for row in (chance.choice(rows) for _ in range(TRIES if rows else 0)):
        answer = row["messages"][-1]["content"]
        fits = len(answer.split()) >= TEXT_WORDS and row.get("kind") in TEXTS
        if kind in TURNS:
            fits = len(row["messages"]) < 6 and _key(row["messages"]) not in used
        if fits and answer and row["finished"] and not loops(answer):
            return row
    return None


def _whole(target: Target, begun: Begun, answer: Written, raw: bool) -> Prompt | None:
    """The whole prompt; None if its last words were cut, or are too few or too many."""
    assert target.text is not None
    if raw:
        text = begun.text + answer.text
        return text if len(target.text.ids(text)) >= WORDS[0] else None
    words = target.text.ids((begun.words + answer.text).strip(), special=True)
    prompt = [*begun.before, {"role": "user", "content": (begun.text + answer.text).strip()}]
    if not answer.finished or len(words) < WORDS[0]:
        return None
    long = begun.before or begun.text != begun.words
    return None if long and len(target.text.ids(target.text.render(prompt, ask=True))) > LONGEST else prompt


def prompt_of(row: Row) -> Prompt:
    """What a row answers."""
    return row["prompt"] if "prompt" in row else row["messages"][:-1]


def _keys(prompt: Prompt) -> set[tuple[str, ...]]:
    """Of a prompt, and of the conversation that it goes on from."""
    return {_key(prompt)} if isinstance(prompt, str) else {_key(prompt), _key(prompt[:-1])}


def _key(prompt: Prompt) -> tuple[str, ...]:
    return (prompt,) if isinstance(prompt, str) else tuple(message["content"] for message in prompt)
