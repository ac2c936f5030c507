"""A drafter's name and options, read once and written back."""

from pathlib import Path

import pytest

from slipstream.spec import Spec


@pytest.mark.parametrize(
    ("text", "name", "options"),
    [
        ("ngram", "ngram", {}),
        ("eagle:tree=chain-5,proposal=noise", "eagle", {"tree": "chain-5", "proposal": "noise"}),
        ("runs/a b:tree=[[0],[1],[0,0]],hosts=4", "runs/a b", {"tree": "[[0],[1],[0,0]]", "hosts": "4"}),
        ("self-speculative:skip=10,11,20-22", "self-speculative", {"skip": "10,11,20-22"}),
        ("hybrid:head=eagle:tree=chain-3,depth=4", "hybrid", {"head": "eagle:tree=chain-3", "depth": "4"}),
        ("draft-model:model=/a,b/c,tree=fig9", "draft-model", {"model": "/a,b/c", "tree": "fig9"}),
        ("x:key=", "x", {"key": ""}),
    ],
)
def test_a_name_is_read_and_written_back(text, name, options):
    """A comma within a value taken for the next option, or one that is lost on the way back."""
    spec = Spec.parse(text)
    assert (spec.name, spec.options, str(spec)) == (name, options, text)
    assert Spec.parse(spec) is spec


def test_options_are_replaced_and_taken_away():
    spec = Spec.parse("eagle:tree=chain-5,proposal=noise")
    assert str(spec.replace(tree="fig9", depth="2")) == "eagle:tree=fig9,proposal=noise,depth=2"
    assert str(spec.replace(tree=None, proposal=None, other=None)) == "eagle"
    assert spec.options == {"tree": "chain-5", "proposal": "noise"}


def test_a_path_and_an_empty_list_of_options_are_names():
    assert Spec.parse(Path("runs/eagle")) == Spec("runs/eagle") == Spec.parse("runs/eagle:")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("", "named by an empty text"),
        ("ngram:depth", "'depth' is no option: write key=value"),
        ("ngram:=3", "'=3' is no option"),
        ("ngram:a b=3", "'a b=3' is no option"),
    ],
)
def test_what_is_no_name_is_refused(given, says):
    with pytest.raises(ValueError, match=says):
        Spec.parse(given)


@pytest.mark.parametrize("given", [None, 3, b"eagle"])
def test_only_names_are_read(given, unchecked):
    with pytest.raises(ValueError, match="give a name or a path"):
        Spec.parse(given)
