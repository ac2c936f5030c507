"""The worked examples of docs/adding_a_drafter.md, as they stand there: a drafter, a method, a layout."""

import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import slipstream
import tiny
from slipstream.interop.public import export, import_checkpoint
from slipstream.methods import METHODS

PAGE = Path(__file__).parents[2] / "docs" / "adding_a_drafter.md"
BLOCKS = [block.split("```")[0] for block in PAGE.read_text("utf-8").split("```python\n")[1:]]
MODULES = {block.splitlines()[0].removeprefix("# ").removesuffix(".py"): block for block in BLOCKS}


@pytest.fixture(autouse=True)
def page(tmp_path, monkeypatch):
    """The page's modules can be imported; afterwards the table of methods is what it was."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(tmp_path)
    for name, code in MODULES.items():
        (tmp_path / f"{name}.py").write_text(code)
    before = dict(METHODS)
    yield
    METHODS.clear()
    METHODS.update(before)
    for name in MODULES:
        sys.modules.pop(name, None)


@pytest.fixture
def trained(chat, data, tmp_path) -> str:
    """A directory that the page's method was trained into."""
    import_module("linear")
    small = ["schedule.batch_tokens=64", "schedule.evaluate_every=1000", "data.held_out_tokens=8"]
    small += ["head.draft_vocab=40", "head.tree=chain-2", "head.depth=2"]
    made = slipstream.train(chat, "linear", tmp_path / "run", data=[data], overrides=small)
    assert made.history[-1].loss is not None
    return str(tmp_path / "run")


def same(chat, drafter: str, temperature: float) -> bool:
    """Whether drafting changes no token."""
    asked = {"max_new_tokens": 24, "temperature": temperature}
    plain = slipstream.generate(chat, "abcabcabc", **asked)
    made = slipstream.generate(chat, "abcabcabc", drafter, **asked)
    return made.tokens == plain.tokens


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_drafter_is_added_by_one_entry(chat, temperature):
    import_module("successor")
    assert same(chat, "successor:depth=3", temperature)
    with pytest.raises(ValueError, match=r"has no option 'dept'\. Available: depth"):
        slipstream.generate(chat, "abc", "successor:dept=3")


def test_a_method_is_added_by_one_entry(chat, trained):
    assert same(chat, trained, 0.0)
    assert same(chat, f"{trained}:tree=best-first-2x4,proposal=noise", 1.0)
    with pytest.raises(ValueError, match=r"head\.layers=2 is read by medusa, not by linear: leave it out"):
        slipstream.train(chat, "linear", "x", overrides=["head.layers=2"])


def test_a_layout_is_added_by_one_entry(chat, trained, tmp_path):
    import_module("linear_layout")
    public, again = tmp_path / "public", tmp_path / "again"
    export(chat, trained, str(public))
    assert set(load_file(public / "model.safetensors")) == {"0", "1"}
    import_checkpoint(chat, str(public), str(again))
    mine, theirs = (load_file(Path(home) / "model.safetensors") for home in (trained, again))
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name].float(), theirs[name].float()) for name in mine)
    assert same(chat, str(again), 0.0)


def test_the_command_line_takes_a_file_as_a_plugin(run, tmp_path, monkeypatch):
    """Train, export, import and answer with the page's method; help lists it; without --plugin it is none."""
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each != str(tmp_path)])
    tiny.reference("llama").save_pretrained(tmp_path / "model")
    tiny.tokenizer().save_pretrained(tmp_path / "model")
    target = ("--target", str(tmp_path / "model"), "--dtype", "float32")
    (tmp_path / "text.jsonl").write_text(
        "".join(f'{{"text": "{c}bcabcabc{c * 3}"}}\n' for c in "abcdefghijk")
    )
    small = ["schedule.batch_tokens=64", "schedule.evaluate_every=1000", "data.held_out_tokens=8"]
    small += ["head.tree=chain-2", "head.depth=2"]
    trained, public, again = (str(tmp_path / name) for name in ("trained", "public", "again"))
    train = ["train", "linear", "--data", str(tmp_path / "text.jsonl"), "--out", trained, *target, *small]
    code, _, err = run(*train)
    assert (code, "method is 'linear'" in err) == (2, True)
    layout = ("--plugin", str(tmp_path / "linear_layout.py"))
    for words in (
        train,
        ["export", trained, "--out", public, *target],
        ["import", public, "--out", again, *target],
        ["generate", "abcabc", "--max-new-tokens", "4", "--drafter", again, *target],
    ):
        code, _, err = run(*layout, *words)
        assert code == 0, err
    code, out, _ = run("--plugin", str(tmp_path / "successor.py"), "generate", "--help")
    assert "drafts what last followed each token" in out
    assert run("--plugin", "no_such", "doctor")[::2] == (
        2,
        "slipstream: plugin 'no_such' cannot be imported: there is none: name an installed module, or a "
        "file, such as ./no_such.py\n",
    )
