"""Recipes: unknown keys and impossible values are refused with what to do."""

import pytest

from slipstream.training.methods import OBJECTIVES
from slipstream.training.recipe import PUBLISHED, READ_BY, Recipe, load_recipe


def test_files_overrides_and_arguments_are_laid_over_each_other(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text("optimizer:\n  lr: 0.01\n  clip: 2.0\nloss: {unroll: 2}\n")
    recipe = load_recipe(str(path), ["optimizer.lr=3e-4", "head.tree=chain-3"], data={"files": ["a"]})
    assert (recipe.optimizer.lr, recipe.optimizer.clip, recipe.loss.unroll) == (3e-4, 2.0, 2)
    assert (recipe.head.tree, recipe.data.files) == ("chain-3", ["a"])


def test_stages_override_sections():
    recipe = load_recipe(
        None, loss={"token": 0.5}, stages=[{"loss": {"unroll": 1}}, {"schedule": {"epochs": 2}}]
    )
    first, second = recipe.staged()
    assert (first.loss.unroll, first.loss.token, second.loss.unroll, second.schedule.epochs) == (1, 0.5, 1, 2)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("optimiser: {}", "unknown key optimiser, did you mean 'optimizer'"),
        ("optimizer: {learning_rate: 1}", r"unknown key optimizer.learning_rate \(known: lr"),
        ("optimizer: {betaz: 1}", "did you mean 'betas'"),
        ("optimizer: {lr: -1}", "optimizer.lr is -1: Input should be greater than 0"),
        ("loss: {unroll: 99}", "loss.unroll is 99"),
        ("optimizer: {lr: 1e300}", "optimizer.lr is '1e300'"),
        ("optimizer: {betas: [2, 3]}", "optimizer.betas.0 is 2"),
        ("schedule: {epochs: 1.0e+308}", "schedule.epochs is 1e"),
        ("head: {taps: []}", r"head.taps is \[\]"),
        ("a: " + "[" * 3000, "nested too deeply"),
        ("a: 2020-99-99", r"r.yaml is no YAML: month"),
        ("\ufeffoptimiser: {}", "did you mean 'optimizer'"),
        ("method: hydra", "method is 'hydra'"),
        ("head: {tree: fig8}", "Unknown tree: 'fig8'"),
        ("- 1", "is a list: write sections"),
        ("a: [", "is no YAML"),
    ],
)
def test_a_mistake_is_named(tmp_path, text, says):
    path = tmp_path / "r.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=says):
        load_recipe(str(path))


def test_bad_overrides_are_named():
    with pytest.raises(ValueError, match=r"write section\.key=value"):
        load_recipe(None, ["lr=1"])
    with pytest.raises(ValueError, match=r"recipe missing\.yaml cannot be read"):
        load_recipe("missing.yaml")


def test_what_a_method_does_not_read_is_refused():
    with pytest.raises(
        ValueError,
        match=r"head\.taps=\['final'\] is read by eagle3, fasteagle, glide, not by eagle: leave it out",
    ):
        load_recipe(None, ["head.taps=[final]"], method="eagle")
    with pytest.raises(ValueError, match=r"loss\.unroll=3 is read by"):
        load_recipe(None, method="fasteagle", stages=[{}, {"loss": {"unroll": 3}}])
    for method, reads in PUBLISHED.items():
        assert load_recipe(None, method=method).loss.token == reads["loss"].get("token", 0.1)


def test_only_known_settings_and_methods_are_said_to_be_read():
    for section, names in READ_BY.items():
        assert names.keys() <= type(getattr(Recipe(), section)).model_fields.keys()
        assert {method for methods in names.values() for method in methods} <= OBJECTIVES.keys()
