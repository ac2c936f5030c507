"""The command line as a whole: help, signals, closed outputs, and one clear line for every mistake."""

import io
import json
import os
import signal
import subprocess
import sys
from copy import deepcopy

import pytest

import tiny
from slipstream.engine.engine import Engine
from slipstream.measure.bench import Runner

COMMANDS = ("demo", "generate", "bench", "certify")


MAKING = ("tune", "train", "synthesize", "regenerate", "data", "import", "export", "parity")


ALL = (*COMMANDS, *MAKING, "cache", "doctor", "reproduce", "report", "serve", "chat")


@pytest.mark.parametrize("command", ALL)
def test_help_is_read_at_80_columns(run, command, monkeypatch):
    """The list of drafters stood in a column of 23, and a range of 19 digits beside it."""
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = run(command, "--help")
    assert code == 0
    assert f"slipstream {command}" in out
    rows = [line[1:-1] for line in out.splitlines() if line.startswith("│")]
    assert max(map(len, rows)) == 78
    texts = [max((len(part) for part in row.split("   ")), default=0) for row in rows]
    assert max(texts) >= 30  # of an explanation's lines
    if command in COMMANDS:
        assert "self-speculative:skip=10-14\n" in "\n".join(line.rstrip() for line in out.splitlines()) + "\n"


def test_a_closed_input_is_an_empty_prompt(run, tiny_options, monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    code, _, err = run("generate", "-", *tiny_options)
    sys.stdin.close()
    assert (code, "prompt is empty" in err, len(err.strip().splitlines())) == (2, True, 1)


@pytest.mark.parametrize(
    ("words", "code", "lines"),
    [("cache >&-", 0, 0), ("cache no 2>&-", 2, 0), ("--help >/dev/full", 2, 1), ("<&- >&- 2>&-", 2, 0)],
)
def test_closed_and_full_outputs_are_no_traceback(words, code, lines):
    command = ["sh", "-c", f"{sys.executable} -m slipstream {words}"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ)
    assert done.returncode == code, done.stderr
    assert len(done.stderr.splitlines()) == lines, done.stderr


MISTAKES = {
    "unknown command": (["generat"], "Did you mean 'generate'"),
    "unknown option": (["bench", "--limt", "3"], "--limit"),
    "not a number": (["bench", "--limit", "x"], "--limit"),
    "unknown drafter": (["generate", "abc", "--drafter", "ngrm"], "Did you mean 'ngram'"),
    "unknown drafter in bench": (["bench", "--drafter", "ngrm"], "Did you mean 'ngram'"),
    "unknown drafter in certify": (
        ["certify", "--drafter", "egale"],
        "Available: auto, vanilla, ngram, suffix, lookahead",
    ),
    "a draft model for another drafter": (
        ["generate", "abc", "--drafter", "ngram", "--draft-model", "smollm2"],
        "--draft-model is for --drafter auto without a head, and --drafter is 'ngram'",
    ),
    "a draft model beside a head": (
        ["bench", "--drafter", "auto:head=eagle", "--draft-model", "smollm2"],
        "give --drafter draft-model:model=smollm2",
    ),
    "empty prompt": (["generate", " "], "prompt is empty"),
    "a prompt that is no text": (["generate", "abc\udcff"], "no Unicode text"),
    "a stop string that is no text": (
        ["generate", "abc", "--stop", "\udcff"],
        "a stop string is no Unicode text",
    ),
    "an empty stop string": (["generate", "abc", "--stop", ""], "a stop string is empty"),
    "temperature below all": (["generate", "abc", "--temperature", "1e-320"], "temperature is 1e-320"),
    "prompt longer than the window": (["generate", "a" * 200], "window of 128"),
    "no tokens wanted": (
        ["generate", "abc", "--max-new-tokens", "0"],
        "Invalid value for '--max-new-tokens'",
    ),
    "no tokens wanted in bench": (
        ["bench", "--max-new-tokens", "-1"],
        "Invalid value for '--max-new-tokens'",
    ),
    "negative temperature": (["generate", "abc", "--temperature", "-1"], "temperature is -1"),
    "negative temperature in certify": (
        ["certify", "--temperature", "-1"],
        "Invalid value for '--temperature'",
    ),
    "top_p of zero": (["generate", "abc", "--temperature", "1", "--top-p", "0"], "top_p is 0"),
    "top_p above one": (["generate", "abc", "--temperature", "1", "--top-p", "1.5"], "top_p is 1.5"),
    "limit of zero": (["bench", "--limit", "0"], "Invalid value for '--limit'"),
    "limit of zero in regenerate": (
        ["regenerate", "x", "--out", "y", "--limit", "0"],
        "Invalid value for '--limit'",
    ),
    "no prompts wanted": (["synthesize", "--out", "y", "--prompts", "0"], "Invalid value for '--prompts'"),
    "no batch": (["synthesize", "--out", "y", "--batch", "0"], "Invalid value for '--batch'"),
    "more at once than memory holds": (
        ["synthesize", "--out", "y", "--batch", "1000000000"],
        "Invalid value for '--batch'",
    ),
    "no draft tokens": (["parity", "eagle", "--draft-tokens", "0"], "Invalid value for '--draft-tokens'"),
    "no prompts to tune on": (["tune", "--limit", "0"], "Invalid value for '--limit'"),
    "more tokens than any window": (
        ["generate", "abc", "--max-new-tokens", str(10**12)],
        "Invalid value for '--max-new-tokens'",
    ),
    "a seed of 65 bits": (["bench", "--seed", str(2**64)], "it must be below 2^63"),
    "a negative age": (["cache", "--older-than", "-1"], "Invalid value for '--older-than'"),
    "no action on the cache": (["cache", "clear"], "slipstream cache clean"),
    "a drafter without a name": (["generate", "abc", "--drafter", ""], "a drafter is named by an empty text"),
    "a dtype without a name": (["generate", "abc", "--dtype", ""], "Unknown dtype: ''"),
    "a tree nobody can mean": (
        ["generate", "abc", "--drafter", "self-speculative:skip=0,tree=dynamic-1000x1000x1000"],
        "999,000 rows",
    ),
    "passes nobody can mean": (
        ["generate", "abc", "--drafter", "lookahead:window=1000,ngram=1000"],
        "over 1,003,996 rows",
    ),
    "a depth nobody can mean": (["generate", "abc", "--drafter", "ngram:depth=9999"], "up to 1024"),
    "blocks that nobody named": (
        ["generate", "abc", "--drafter", "self-speculative"],
        "tune --drafter self-speculative",
    ),
    "layers nobody can mean": (
        ["train", "medusa", "--out", "x", "head.layers=10000"],
        "head.layers is 10000",
    ),
    "a drafter without trees to tune": (["tune", "--drafter", "ngram"], "compare options by bench"),
    "a hybrid to tune": (
        ["tune", "--drafter", "hybrid:head=self-speculative:skip=0"],
        "of hybrid tune the head",
    ),
    "no such question file": (["bench", "--questions", "missing.jsonl"], "missing.jsonl cannot be read"),
    "unknown dtype": (["generate", "abc", "--dtype", "fp33"], "Unknown dtype"),
    "unknown device": (["generate", "abc", "--device", "gpu"], "missing device"),
    "unknown law": (["generate", "abc", "--law", "copuled"], "Available: coupled, multi-round"),
    "unwritable output": (["generate", "abc", "--json", "/proc/out.json"], "cannot be written"),
    "unwritable output of bench": (["bench", "--json", "/proc/out.json"], "cannot be written"),
    "an option that is none": (["generate", "abc", "--drafter", "ngram:dpth=3"], "no option 'dpth'"),
    "no weights for this target": (
        ["generate", "abc", "--drafter", "eagle"],
        "no eagle weights ship for this target",
    ),
    "an unknown method": (["train", "hydra", "--out", "x"], "method is 'hydra'"),
    "an unknown section": (["train", "eagle", "--out", "x", "optimiser.lr=1"], "did you mean 'optimizer'"),
    "no data": (["train", "eagle", "--out", "x"], "no training data"),
    "no place": (["train", "eagle", "--data", "x.jsonl"], "give --out DIR"),
    "missing data": (["train", "eagle", "--data", "x.jsonl", "--out", "x"], "x.jsonl cannot be read"),
    "unwritable drafter": (["train", "eagle", "--data", "x.jsonl", "--out", "/proc/x"], "cannot be written"),
    "nothing to resume": (["train", "eagle", "--resume", "--out", "x"], "x/recipe.yaml cannot be read"),
    "no address": (["serve", "--host", ""], "--host is empty: name an address"),
    "no server": (["regenerate", "x.jsonl", "--out", "y.jsonl"], "x.jsonl cannot be read"),
    "no template": (
        ["synthesize", "--kind", "any", "--kind", "turns", "--out", "y.jsonl"],
        "turns needs a chat template",
    ),
    "no checkpoint": (["import", "nowhere", "--out", "x"], "nowhere has no config.json"),
    "no drafter": (["export", "nowhere", "--out", "x"], "Unknown drafter: 'nowhere'"),
    "no vLLM": (["parity", "eagle", "--python", "/no/python"], "run `make vllm`"),
    "unwritable trace": (["generate", "abc", "--trace", "/proc/trace.jsonl"], "cannot be written"),
    "an output without a name": (["generate", "abc", "--json", ""], "its name is empty"),
    "an output over what is read": (
        ["bench", "--questions", "here.jsonl", "--json", "here.jsonl"],
        "is read by this command",
    ),
    "two outputs in one file": (["generate", "abc", "--json", "x", "--trace", "./x"], "are the same file"),
    "a drafter in no directory": (["train", "eagle", "--data", "here.jsonl", "--out", ""], "an empty text"),
    "an import in no directory": (["import", "nowhere", "--out", ""], "an empty text"),
    "a drafter in the current directory": (
        ["train", "eagle", "--data", "here.jsonl", "--out", "."],
        "holds other files",
    ),
    "data that is a device": (
        ["train", "eagle", "--data", "/dev/zero", "--out", "x"],
        "it is no regular file",
    ),
    "questions in a loop": (["certify", "--questions", "loop"], "Too many levels"),
    "a drafter in a loop": (["generate", "abc", "--drafter", "loop"], "Unknown drafter"),
    "a drafter of too long a name": (["generate", "abc", "--drafter", "a" * 5000], "Unknown drafter"),
    "questions that are a directory": (["tune", "--questions", "."], "it is a directory"),
    "nothing to regenerate": (["regenerate", "here.jsonl", "--limit", "0", "--out", "y"], "not '0'"),
    "a file regenerated onto itself": (
        ["regenerate", "here.jsonl", "--out", "./here.jsonl"],
        "is read by this command",
    ),
    "answers on standard output": (["regenerate", "here.jsonl", "--out", "-"], "is no file"),
    "a rate that diverges": (
        ["train", "eagle", "--data", "here.jsonl", "--out", "x", "optimizer.lr=1e300"],
        "less than or",
    ),
    "a question of any length": (
        ["bench", "--questions", "long.jsonl"],
        "long.jsonl:2: the prompt has 200 tokens",
    ),
    "a question of any length, certified": (
        ["certify", "--questions", "long.jsonl"],
        "question long.jsonl:2",
    ),
    "a question of any length, shown": (["demo", "--questions", "long.jsonl"], "question long.jsonl:2"),
}


@pytest.mark.parametrize(("words", "says"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_one_clear_line(run, model, words, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here.jsonl").write_text('{"turns": ["a"], "messages": [{"role": "user", "content": "a"}]}\n')
    (tmp_path / "long.jsonl").write_text("".join(f'{{"turns": ["{"a" * n}"]}}\n' for n in (1, 200)))
    (tmp_path / "loop").symlink_to("loop")
    known = ["--target", model, *([] if "--dtype" in words else ["--dtype", "float64"])]
    code, _, err = run(*words, *(known if words[0] in COMMANDS + MAKING else []))
    assert code == 2
    assert len(err.strip().splitlines()) == 1, err
    assert says in err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("bench --limt 3", "slipstream bench has no option --limt: did you mean --limit"),
        (
            "generate x --max-tokens 3",
            "slipstream generate has no option --max-tokens: did you mean --max-",
        ),
        ("cache clean --feature", "slipstream cache has no option --feature: did you mean --features or"),
        (
            "bench --plugin x",
            "it stands before the command: slipstream --plugin … bench … (see slip",
        ),
        ("bench --zzzz", "slipstream bench has no option --zzzz (see slipstream bench --help)"),
        ("--zzzz bench", "slipstream has no option --zzzz (see slipstream --help)"),
        ("report", "(see slipstream report --help)"),
        ("bench --limit x", "(see slipstream bench --help)"),
    ],
)
def test_a_wrong_option_names_its_command(run, words, says):
    """It was said to be in the help of all commands."""
    code, _, err = run(*words.split())
    assert (code, err.count("\n")) == (2, 1)
    assert says in err


@pytest.mark.parametrize("command", ["", "bench", "cache"])
def test_h_is_help(run, command):
    code, out, _ = run(*command.split(), "-h")
    assert (code, "Usage: slipstream" in out) == (0, True)


@pytest.mark.parametrize(
    "command", [["generate", "abc"], ["bench"], ["certify"], ["demo"]], ids=lambda words: words[0]
)
def test_a_template_or_a_config_that_refuses_is_one_clear_line(run, questions, tmp_path, command):
    """A template's exception, or beam search asked for by the model, as a traceback or in the baseline
    alone."""
    tokenizer = deepcopy(tiny.tokenizer())
    tokenizer.chat_template = "{{ raise_exception('Only French is spoken here') }}"
    tiny.reference("llama").save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    words = [*command, "--target", str(tmp_path), "--dtype", "float64", "--max-new-tokens", "4"]
    words += ["--questions", questions] if len(command) == 1 else []
    code, _, err = run(*words)
    assert (code, len(err.strip().splitlines())) == (2, 1)
    assert "does not take these messages: Only French is spoken here" in err
    tiny.tokenizer().save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "generation_config.json").write_text('{"num_beams": 4}')
    code, _, err = run(*words)
    assert (code, len(err.strip().splitlines())) == (2, 1)
    assert "sets num_beams to 4 (beam search)" in err


def test_an_unknown_target_offers_the_nearest(run):
    code, _, err = run("generate", "abc", "--target", "smolm2")
    assert code == 2
    assert len(err.strip().splitlines()) == 1
    assert "Did you mean 'smollm2'" in err


def test_sigterm_is_one_line_and_143(tiny_options, questions):
    """A real process, in the midst of its work: what was done is printed."""
    with open(questions, "a") as file:
        file.writelines('{"turns": ["abc"]}\n' for _ in range(500))
    start = """if True:
        import sys, slipstream.cli as cli, slipstream.measure.bench as run
        ask, asked = run.Runner.ask, []
        def told(*args):
            asked.append(1)
            if len(asked) == 8:
                print("eight", file=sys.stderr, flush=True)
            return ask(*args)
        run.Runner.ask = told
        cli.main()"""
    words = ["bench", *tiny_options, "--questions", questions]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, "-c", start, *words], **pipes)
    try:
        assert process.stderr.readline() == "eight\n"
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 143, err
    assert "Traceback" not in err
    assert err.strip().endswith("slipstream: stopped")
    assert "vanilla" in out


@pytest.mark.parametrize(("command", "number"), [("bench", signal.SIGINT), ("certify", signal.SIGTERM)])
def test_what_stops_a_run_loses_nothing(run, tiny_options, questions, tmp_path, monkeypatch, command, number):
    """The figures until then are printed, on a terminal that shows no τ either, and written."""
    step, times = Engine.step, []

    def stopping(self, *args, **named):
        times.append(1)
        if len(times) == 60:
            signal.raise_signal(number)
        return step(self, *args, **named)

    monkeypatch.setattr(Engine, "step", stopping)
    with open(questions, "a") as file:
        file.writelines('{"turns": ["abc"]}\n' for _ in range(20))
    kept, screen = tmp_path / "out.json", io.TextIOWrapper(io.BytesIO(), "ascii")
    monkeypatch.setattr(sys, "stdout", screen)
    before = signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # tests in the background inherit an ignored one
    try:
        how = ("--drafter", "ngram", "--questions", questions, "--json", str(kept))
        code, _, err = run(command, *tiny_options, *how)
    finally:
        signal.signal(signal.SIGINT, before)
    assert code == 128 + number, err
    assert "stopped early" in err
    assert err.strip().endswith("slipstream: stopped")
    screen.flush()
    assert b"ngram" in screen.buffer.getvalue()
    report = json.loads(kept.read_text())
    assert report["stopped"] == "Interrupted"
    assert not report.get("certified")


def test_what_nobody_foresaw_is_one_line_too(run, tiny_options, questions, tmp_path, monkeypatch):
    """After the figures of the turns before it; the traceback is in a file, to be reported."""
    ask, asks = Runner.ask, []

    def failing(self, method, *others):
        asks.append(method)
        if len(asks) > 8:
            raise RuntimeError("no room for a tensor\nC++ stack")
        return ask(self, method, *others)

    monkeypatch.setattr(Runner, "ask", failing)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    code, out, err = run("bench", *tiny_options, "--questions", questions)
    assert (code, "vanilla" in out) == (1, True)
    assert "RuntimeError: no room for a tensor" in err
    assert "Traceback" in next(tmp_path.glob("slipstream-*.txt")).read_text()
