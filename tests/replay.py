"""Calls that people make, good and bad, each held against what must never happen: a traceback, a run that
does not end, success on a wrong result, or a file changed that nobody named.

    python tests/replay.py                  every call
    python tests/replay.py --only "bench "  those whose words hold this

A call works and its result is right, or it is refused with one line and exit code 2. Each option of each
command takes each of its good and its bad values once, and then several options take some at random.
`tests/test_replay.py` runs it in CI.
"""

import argparse
import contextlib
import io
import json
import os
import random
import resource
import shlex
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

os.environ["HF_HUB_OFFLINE"] = os.environ["TRANSFORMERS_OFFLINE"] = "1"

import torch
from transformers.utils import logging

import slipstream
import tiny
from slipstream import cli
from slipstream.kernels import ops as kernels
from slipstream.training import generators as writers
from world import World

PATIENCE, MEMORY = 60, 12 * 2**30  # seconds of one call, bytes of all
MIXED = 12  # calls of each command with several options at once
WORKS, REFUSED, EITHER = "works", "is refused", "works or is refused"

# option: values that work: values that are refused
NO_FILE = "'' missing.jsonl {model} {loop} {pipe} /dev/zero " + "a" * 5000
NO_ROWS = f"{{broken_jsonl}} {{broken_jsonl_gz}} {{deep_jsonl}} {{list_jsonl}} {{empty_jsonl}} {NO_FILE}"
NO_PLACE = "'' {model} {notes} {loop} {data_jsonl} /proc/x /dev/null"
NO_OUTPUT = "'' {model} {data_jsonl}/x /proc/x"
COUNT = "1 3 : 0 -1 1.5 x '' nan"
SHARED = {
    "--target": "{model} : '' nothing/here /nowhere {empty} {classifier} {short} {encoder} {nan} {drafter} "
    "{loop} "
    "{data_jsonl}",
    "--dtype": "float64 float32 : '' float8 int8",
    "--device": "cpu : '' gpu meta cuda:99",
    "--seed": "0 9223372036854775807 : -1 1.5 9223372036854775808 x ''",
    "--max-new-tokens": "1 5 : 0 -3 2.5 x ''",
    "--limit": COUNT,
    "--temperature": "0 0.7 2 : -1 nan inf x ''",
    "--json": f"{{out}}/new.json {{out}}/new/deeper.json - : {NO_OUTPUT}",
    "--questions": f"{{questions_jsonl}} {{bom_questions_jsonl}} {{questions_jsonl_gz}} : {NO_ROWS} "
    f"{{turnless_jsonl}} "
    "{data_jsonl}",
    "--drafter": "vanilla ngram ngram:depth=3 suffix suffix:remember=1 lookahead {drafter} "
    "{drafter}:tree=fig9 {fast} hybrid:head={fast} "
    "self-speculative:skip=0 draft-model:model={model} : "
    "'' ngrm ngram:depth=x ngram:=3 ngram:depth ngram:depth=9999 vanilla:x=1 eagle {model} {empty} {loop} "
    "hybrid:head=ngram draft-model self-speculative:skip=9 {drafter}:tree=dynamic-1000x1000x1000 "
    "{drafter}:tree=chain-0 "
    "{drafter}:proposal=all",
}  # fmt: skip
DECODING = ("--target", "--dtype", "--device", "--seed", "--max-new-tokens", "--temperature", "--drafter")
ASKING = (*DECODING, "--limit", "--questions")
MAKING = ("--target", "--dtype", "--device", "--seed", "--max-new-tokens", "--temperature")
HERE = "--target {model} --dtype float64"
RUN = Path(__file__).parents[1] / "benchmarks" / "results" / "bench_auto.json"
ASKED = f"{HERE} --questions {{questions_jsonl}} --max-new-tokens 5 --drafter ngram --temperature 0"
MADE = f"{HERE} --max-new-tokens 5 --batch 2 --out {{out}}/x.jsonl"
TINY = "schedule.evaluate_every=1000 schedule.batch_tokens=64 data.held_out_tokens=8 head.tree=chain-2"
# words that work: shared options, and options (or arguments, by place) of its own
COMMANDS: dict[str, tuple[tuple[str, ...], dict[str | int, str]]] = {
    f"generate 'abc abc' {HERE} --max-new-tokens 6 --drafter ngram": (
        (*DECODING, "--json"),
        {
            1: f"abc '[red] [/]' {'a' * 100} : '' ' ' {'a' * 200}",
            "--top-k": "0 5 : -1 1.5 x",
            "--top-p": "0.5 1 : 0 1.5 -1 nan",
            "--min-p": "0.1 : 1 -0.1 nan",
            "--repetition-penalty": "1.1 : 0 -1 nan inf",
            "--presence-penalty": "0.5 : nan inf x",
            "--frequency-penalty": "0.5 : nan inf x",
            "--stop": "b zz : ''",
            "--regex": "'[a-c]+' : '[a' ''",
            "--choice": "b : ''",
            "--draft-model": ": {model} none ''",  # beside --drafter ngram
            "--law": "coupled multi-round : '' copuled",
            "--trace": f"{{out}}/trace.jsonl : {NO_OUTPUT}",
        },
    ),
    f"bench {ASKED}": (
        (*ASKING, "--json"),
        {
            "--questions": f"{{questions_jsonl}} : {{long_jsonl}} {NO_ROWS} hf: hf:a:b:c:d",
            "--batch": "1 2 : 0 -1 x",
        },
    ),
    f"reproduce bita-table-2 {HERE} --set mt_bench={{questions_jsonl}} --max-new-tokens 5": (
        ("--target", "--dtype", "--device", "--seed", "--max-new-tokens", "--limit", "--json"),
        {
            1: "glide-figure-9 : '' table-1 eagle",
            "--set": ": '' x x= =x mtbench={questions_jsonl} mt_bench=missing.jsonl",
            "--head": ": '' bita bita= x=y",
        },
    ),
    f"certify {ASKED}": ((*ASKING, "--json"), {"--draws": "1 : 0 x"}),
    f"demo {ASKED}": (ASKING, {}),
    f"report {RUN} --out {{out}}/x.html": (
        (),
        {
            1: f"{RUN} : {NO_ROWS} {{data_jsonl}} {{questions_jsonl}}",
            "--out": f"{{out}}/y.html - : {NO_OUTPUT}",
        },
    ),
    f"train eagle {HERE} --data {{data_jsonl}} --out {{out}}/x {TINY}": (
        ("--target", "--dtype", "--device"),
        {
            1: ": '' hydra vanilla ngram",
            -1: ": optimizer.lr=1e300 optimizer.lr=0 optimiser.lr=1 head.taps=[] head.layers=10000 "
            "head.depth=3 x = data=3 "
            "head.tree=dynamic-1000x1000x1000 schedule.epochs=nan data.limit=0 loss.token=x",
            "--data": f"{{data_jsonl_gz}} {{bom_data_jsonl}} : {NO_ROWS} {{surrogate_jsonl}} "
            f"{{questions_jsonl}}",
            "--recipe": "{recipe_yaml} : '' {broken_yaml} {list_yaml} {model} {loop} missing.yaml /dev/zero "
            "{pipe}",
            "--out": f"{{out}}/y {{out}} : {NO_PLACE}",
        },
    ),
    f"export {{drafter}} {HERE} --out {{out}}/x": (
        ("--target",),
        {
            1: "{fast} : '' nothing vanilla eagle ngram {model} {empty} {loop}",
            "--layout": "eagle : '' x eagle3",
            "--out": f"{{out}}/y : {NO_PLACE} {{drafter}}",
        },
    ),
    f"import {{out}} {HERE} --out {{out}}/x": (
        (),
        {1: ": '' nothing {model} {empty} {loop} {drafter} {data_jsonl}"},
    ),
    f"regenerate {{data_jsonl}} --limit 3 {MADE}": (
        (*MAKING, "--limit"),
        {
            1: f"{{data_jsonl_gz}} {{bom_data_jsonl}} : {NO_ROWS} {{surrogate_jsonl}} {{questions_jsonl}}",
            "--batch": "1 : 0 -1 x",
            "--out": f"{{out}}/y.jsonl : {NO_PLACE}",
            "--server": ": '' x http://127.0.0.1:9/v1",
        },
    ),
    f"synthesize --prompts 2 {MADE}": (
        MAKING,
        {
            "--prompts": "1 : 0 -1 x",
            "--kind": "any : poems summaries ''",
            "--prompt-temperature": ": -1 nan x",
            "--batch": ": 0 -1 x",
            "--out": f"{{out}}/y.jsonl : {NO_PLACE}",
        },
    ),
    "data {data_jsonl} --target {model} --out {out}/x.jsonl": (
        ("--json",),
        {
            1: f"{{data_jsonl_gz}} {{bom_data_jsonl}} : {NO_ROWS} {{surrogate_jsonl}} {{questions_jsonl}}",
            "--exclude": f"{{questions_jsonl}} {{data_jsonl_gz}} : {NO_ROWS}",
            "--out": "{out}/y.jsonl : '' {model} {notes} {loop} {data_jsonl} /proc/x",
        },
    ),
    f"tune {HERE} --drafter {{drafter}} --questions {{questions_jsonl}}": (
        ("--target", "--questions"),
        {
            "--drafter": ": ngram vanilla lookahead '' egale {model}",
            "--plot": f": {NO_OUTPUT}",
            "--limit": ": 0 -1 x",
            "--batch": ": 0 -1 x",
            "--context": ": 0 -1 x",
        },
    ),
    "parity {drafter} --target {model} --python /no/python": ((), {}),
}
DEAR = ("tune", "parity", "import")  # not called with words that work


@dataclass(frozen=True)
class Call:
    """One call, and what is expected of it. `run` gives an exit code."""

    name: str
    run: Callable[[], int]
    expected: str


def command_lines(world: World, seed: int) -> Iterator[Call]:
    """Each value of each option once, and then several at random."""
    chance = random.Random(seed)

    def values(text: str) -> tuple[list[str], list[str]]:
        good, bad = (shlex.split(half.format(**world.names)) for half in f" {text} ".split(" : "))
        return good, bad

    for text, (shared, own) in COMMANDS.items():
        base = shlex.split(text.format(**world.names))
        options: dict[str | int, tuple[list[str], list[str]]] = {
            name: values(SHARED[name]) for name in shared
        }
        options |= {name: values(each) for name, each in own.items()}
        if base[0] not in DEAR:
            yield command_line(base, {}, WORKS)
        for option, (good, bad) in options.items():
            yield from (command_line(base, {option: value}, WORKS) for value in good if base[0] not in DEAR)
            yield from (command_line(base, {option: value}, REFUSED) for value in bad)
        for _ in range(MIXED if len(options) > 2 else 0):
            some = {
                option: chance.choice([*options[option][0], *options[option][1]])
                for option in chance.sample(list(options), 3)
            }
            refused = any(value in options[option][1] for option, value in some.items())
            if refused or base[0] not in DEAR:
                yield command_line(base, some, REFUSED if refused else EITHER)


def command_line(base: list[str], picked: Mapping[str | int, str], expected: str) -> Call:
    """A command line with other values: of options, by name, and of arguments, by place."""
    words = list(base)
    for option, value in picked.items():
        if isinstance(option, int):
            words[option] = value
        elif option in words:
            words[words.index(option) + 1] = value
        else:
            words += [option, value]

    def run() -> int:
        with mock.patch.object(sys, "argv", ["slipstream", *words]):
            try:
                cli.main()
            except SystemExit as done:
                return int(done.code or 0)
        return 0

    shown = (f"{word[:40]}…" if len(word) > 80 else word for word in words)
    return Call(shlex.join(shown), run, expected)


def library(world: World) -> Iterator[Call]:
    """Calls from Python."""
    target, ids = world.target, tiny.prompts(9)[0]
    tokenizer = deepcopy(target.text.tokenizer)
    tokenizer.pad_token = tokenizer.eos_token

    def said(prompts: Any, **how: Any) -> Any:
        made = slipstream.generate(target, prompts, **{"max_new_tokens": 6, **how})
        return [each.tokens for each in made] if isinstance(made, list) else made.tokens

    def call(name: str, expected: str, function: Callable[[], Any], wanted: Any = None) -> Call:
        def run() -> int:
            try:
                made = function()
            except ValueError as error:
                print(error, file=sys.stderr)
                return 2
            if made != wanted:
                raise AssertionError(f"{made} in place of {wanted}")
            return 0

        return Call(name, run, expected)

    plain, text = said(ids), tokenizer.decode(ids)
    padded = tokenizer([text, text[:4]], padding=True, return_tensors="pt")
    parts = [{"role": "user", "content": [{"type": "text", "text": "abc"}]}]
    good: dict[str, Callable[[], Any]] = {
        "a tensor": lambda: said(torch.tensor(ids)),
        "an array": lambda: said(torch.tensor(ids).numpy()),
        "a batch": lambda: said([ids, ids[:4]])[0],
        "an encoding": lambda: said(tokenizer(text)),
        "a padded encoding": lambda: said(padded)[0],
        "a padded tensor": lambda: said(padded["input_ids"], attention_mask=padded["attention_mask"])[0],
        "n-gram drafts": lambda: said(ids, drafter="ngram"),
        "a directory's drafts": lambda: said(ids, drafter=world.names["drafter"]),
    }
    for name, function in good.items():
        yield call(f"generate: {name}", WORKS, function, plain)
    yield call(
        "generate: content parts", WORKS, lambda: said(parts), said([{"role": "user", "content": "abc"}])
    )
    prompts: dict[str, Any] = {
        "nothing": [],
        "an empty text": "",
        "an empty row": [[]],
        "bytes": b"abc",
        "a number": 3,
        "None": None,
        "a path": Path("abc"),
        "a set": {1, 2},
        "fractions": [0.5, 1.5],
        "bools": [True, False],
        "a negative id": [-1],
        "an id beyond the vocabulary": [tiny.VOCAB],
        "fractions in a tensor": torch.rand(4),
        "a tensor of three dimensions": torch.zeros(1, 1, 4).long(),
        "texts and numbers": ["abc", 3],
        "a surrogate": "\ud800",
        "a message without content": [{"role": "user"}],
        "a picture": [{"role": "user", "content": [{"type": "image", "url": "x"}]}],
    }
    for name, prompt in prompts.items():
        yield call(f"generate: {name}", REFUSED, lambda prompt=prompt: said(prompt))
    settings: dict[str, list[Any]] = {
        "max_new_tokens": [0, -1, 1.5, "3", float("nan"), True, [1]],
        "seed": ["3", 1.5, float("nan"), 2**64, [1]],
        "temperature": ["hot", -1, float("nan"), float("inf"), [1]],
        "top_k": ["3", 0.5, -1, [1]],
        "top_p": ["x", 0, 2, float("nan")],
        "min_p": ["x", 1, -1],
        "repetition_penalty": ["x", 0, -1, float("inf")],
        "presence_penalty": ["x", float("nan")],
        "frequency_penalty": ["x", float("inf")],
        "stop": [3, b"x", "", [""], [3]],
        "eos_token_ids": ["</s>", [0.5], ["x"], [-1], [tiny.VOCAB]],
        "law": ["x", 3],
        "drafter": ["", "x", 3, None],
        "processors": [[3], [lambda ids, scores: scores[:, :3]], [lambda ids, scores: scores * torch.nan]],
        "streamer": [3],
        "json_schema": [3, "{", {"type": "objekt"}, []],
        "regex": [3, "[a", "", b"a"],
        "grammar": [3, "start: a", "root ::= ("],
        "choice": [3, "yes", [], [""], [3]],
    }
    for name, values in settings.items():
        for value in values:
            shown = repr(value)[:40].split(" at 0x")[0]
            yield call(f"generate: {name}={shown}", REFUSED, lambda n=name, v=value: said(ids, **{n: v}))
    for given in ("smollm2", target.model, None):
        kind = type(given).__name__
        yield call(f"generate: by a {kind}", REFUSED, lambda given=given: slipstream.generate(given, ids))  # type: ignore[misc]
    broken = ("classifier", "short", "encoder", "loop", "empty", "data_jsonl")
    for name in ("", "nothing/here", None, 3, *(world.names[each] for each in broken)):
        yield call(f"load_target: {name!r}", REFUSED, lambda name=name: slipstream.load_target(name))
    for name in ("", "x", "ngram:depth=x", "eagle", None, 3, world.names["model"], world.names["loop"]):
        yield call(
            f"load_drafter: {name!r}", REFUSED, lambda name=name: slipstream.load_drafter(name, target)
        )
    home = Path(world.names["model"])
    yield call(
        "load_target: a path", WORKS, lambda: slipstream.load_target(home, "float64").dtype, torch.float64
    )


class Endless(Exception):
    """A call took longer than anybody's patience."""


def problem(world: World, call: Call) -> str | None:
    """What a call did that must not happen; None if nothing."""
    shutil.rmtree(world.out)
    world.out.mkdir()
    before, shown, told = world.seen(), io.StringIO(), io.StringIO()

    def give_up(*_: Any) -> None:
        raise Endless(f"it does not end within {PATIENCE} s")

    signal.signal(signal.SIGALRM, give_up)
    signal.alarm(PATIENCE)
    try:
        with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(told), contextlib.chdir(world.cwd):
            code = call.run()
        if code == 0:
            check_results(world, call, shown.getvalue())
    except BaseException as error:  # a traceback, or a result that is wrong
        place = traceback.extract_tb(error.__traceback__)[-1]
        return (
            f"{type(error).__name__} in {Path(place.filename).name}, line {place.lineno}: {str(error)[:200]}"
        )
    finally:
        signal.alarm(0)
    estimate = "about "  # of how long it takes, before it is known that it cannot be done
    said = [line for line in told.getvalue().strip().splitlines() if not line.startswith(estimate)]
    if changed := {path for path, _ in world.seen().items() ^ before.items()}:
        return f"changes {', '.join(sorted(changed))}"
    if "Traceback" in told.getvalue() or code not in (0, 2):
        return f"exit code {code}: {said[-1:]}"
    if code == 2 and len(said) != 1:
        return f"is refused in {len(said)} lines: {said[:3]}"
    if (call.expected == WORKS and code) or (call.expected == REFUSED and not code):
        return f"{call.expected} (expected), and does not: {said[-1:]}"
    return None


def check_results(world: World, call: Call, shown: str) -> None:
    """What was printed and written means what success says. Raises AssertionError."""
    verb = call.name.split()[0]
    if verb in ("generate", "demo", "bench", "certify", "tune"):
        assert shown.strip(), "nothing is shown"
    assert "NOT" not in shown, "not certified, exit code 0"
    for path in world.out.rglob("*.json"):
        report = json.loads(path.read_text())
        assert all(row.get("identical") is not False for row in report.get("results", [])), "other texts"
    for path in world.out.rglob("*.jsonl"):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        assert rows, f"{path.name} is empty"
    if verb in ("train", "import"):
        for path in world.out.rglob("model.safetensors"):
            slipstream.load_drafter(str(path.parent), world.target)


def replay(only: str, seed: int, within: float, show: Callable[[str], None]) -> tuple[int, list[str]]:
    """Calls whose words hold `only`, in an order of chance, until the seconds are over: how many there were,
    and what went wrong."""
    kernels.load()  # not compiled in the calls' own cache
    wrong, count, end = [], 0, time.perf_counter() + within
    with tempfile.TemporaryDirectory() as home, mock.patch.dict(os.environ, XDG_CACHE_HOME=f"{home}/cache"):
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        world = World(Path(home))
        calls = [call for call in (*command_lines(world, seed), *library(world)) if only in call.name]
        random.Random(seed).shuffle(calls)
        for call in calls:
            if (began := time.perf_counter()) > end:
                break
            count += 1
            if found := problem(world, call):
                wrong.append(f"{call.name}\n    {found}".replace(home, "~"))
                show(wrong[-1])
            if (took := time.perf_counter() - began) > PATIENCE / 6:
                show(f"{took:.0f} s: {call.name}".replace(home, "~"))
    return count, wrong


def main() -> None:
    """Replay, and print what went wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="calls whose words hold this")
    parser.add_argument("--seed", type=int, default=0, help="of what is taken at random")
    parser.add_argument(
        "--within", type=float, default=3600.0, metavar="SECONDS", help="stop after this long"
    )
    given, began = parser.parse_args(), time.perf_counter()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))  # whoever reads /dev/zero to its end is told so
    torch.set_num_threads(1)
    writers.STARTING = 0  # no server is waited for
    count, wrong = replay(given.only, given.seed, given.within, lambda text: print(text, flush=True))
    print(f"{count} calls in {time.perf_counter() - began:.0f} s, {len(wrong)} wrong")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
