"""Recipes: unknown keys and impossible values are refused with what to do."""

import json
import shlex
from pathlib import Path
from string import Template

import pytest
import yaml

from slipstream.methods import METHODS
from slipstream.training.recipe import ONCE, load_recipe, recipe_class, stored_recipe
from slipstream.training.run import recipe_of

RECIPES = Path(__file__).parents[2] / "recipes"
TRAINED = [method.name for method in METHODS.values() if method.recipe]
# what runs wrote when all methods shared their settings: this one of medusa, with a size that it never read
OLD = """# of a run of slipstream train
method: medusa
data:
  files: [answers.jsonl]
  max_length: 384
  limit: null
  greedy: true
  held_out: 32
  held_out_tokens: 96
features: {disk_gib: 8.0}
head: {draft_vocab: 4096, intermediate_size: 768, input_norm: false, taps: null, depth: 4, layers: 1,
  cascade: true, start: null, hidden_size: null, glimpses: true, own_ends: false, published: false,
  blocks: null, prompts: 16, deep: true, tree: best-first-3x8, storage: int8}
loss: {feature: 0.0, token: 0.7, acceptance: 0.0, hard: true, noise: 0.0, unroll: 1, groups: 64, block: 5,
  offset: true, decay: 0.9}
optimizer:
  lr: 0.001
  betas: [0.9, 0.95]
  weight_decay: 0.0
  clip: 0.5
  warmup: 0.03
  floor: 0.05
schedule: {epochs: 0.55, batch_tokens: 2048, evaluate_every: 100, save_every: 100, precision: 'no', seed: 0}
stages:
- loss: {token: 1.0, unroll: 1}
"""


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
        ("features: {disk_gib: 1.0e+300}", r"features.disk_gib is 1e\+300: .*less than or equal to 1048576"),
        (f"schedule: {{seed: {2**63}}}", f"schedule.seed is {2**63}: .*less than {2**63}"),
        ("method: eagle3\nhead: {taps: []}", r"head.taps is \[\]"),
        ("a: " + "[" * 3000, "nested too deeply"),
        ("a: 2020-99-99", r"r.yaml is no YAML: month"),
        ("\ufeffoptimiser: {}", "did you mean 'optimizer'"),
        ("method: hydra", r"method is 'hydra'\. Available: eagle, eagle3"),
        ("method: [1]", r"method is \[1\]"),
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


def test_no_is_a_precision_and_not_false():
    assert load_recipe(None, ["schedule.precision=no"]).schedule.precision == "no"
    with pytest.raises(ValueError, match=r"schedule\.precision is True"):
        load_recipe(None, ["schedule.precision=yes"])


@pytest.mark.parametrize("name", ["recipe.yaml", "log.jsonl"])
def test_a_run_does_not_write_over_what_it_reads(tmp_path, name):
    """`--force` replaced a recipe that was written by hand, or the data."""
    mine = tmp_path / name
    mine.write_text("method: eagle  # by hand\n")
    how = {"recipe": str(mine)} if name == "recipe.yaml" else {"data": str(mine)}
    with pytest.raises(ValueError, match="is read by this run, which would write over it"):
        recipe_of("eagle", str(tmp_path), **how)
    assert recipe_of("eagle", str(tmp_path / "other"), **how).method == "eagle"


def test_bad_overrides_are_named():
    for override in ("lr=1", "method.name=eagle"):
        with pytest.raises(ValueError, match=r"write section\.key=value"):
            load_recipe(None, [override])
    with pytest.raises(ValueError, match=r"recipe missing\.yaml cannot be read"):
        load_recipe("missing.yaml")


@pytest.mark.parametrize(
    ("method", "override", "says"),
    [
        (
            "eagle",
            "head.taps=[final]",
            r"head\.taps=\['final'\] is read by eagle3, fasteagle, glide, not by eagle: leave it out",
        ),
        (
            "bita",
            "loss.feature=0",
            "is read by eagle, eagle3, fasteagle, medusa, glide, draft-model, not by bita",
        ),
        ("bita", "loss.token=1", "not by bita"),
        ("bita", "loss.acceptance=0", "not by bita"),
        ("bita", "loss.noise=0.1", "not by bita"),
        ("bita", "loss.decay=0.8", "read by eagle, eagle3, fasteagle, medusa, not by bita"),
        ("draft-model", "loss.noise=0", "not by draft-model"),
        ("draft-model", "loss.decay=0.8", "not by draft-model"),
        (
            "draft-model",
            "head.intermediate_size=8",
            "read by eagle, eagle3, fasteagle, glide, not by draft-model",
        ),
        ("glide", "loss.decay=0.8", "not by glide"),
        ("medusa", "head.intermediate_size=8", "not by medusa"),
        ("bita", "head.dept=3", r"unknown key head\.dept, did you mean 'depth'\? \(known: draft_vocab"),
    ],
)
def test_what_a_method_does_not_read_is_refused(method, override, says):
    """`train bita loss.feature=…` and noise for a draft model were ignored without a word."""
    with pytest.raises(ValueError, match=says):
        load_recipe(None, [override], method=method)


def test_overrides_hold_in_every_stage(tmp_path):
    """A recipe with stages took `schedule.epochs=0.1` and trained forty times as long."""
    path = tmp_path / "recipe.yaml"
    stages = [{"schedule": {"epochs": 2}, "optimizer": {"lr": 1e-4}}, {"data": {"files": ["b"]}}]
    path.write_text(json.dumps({"schedule": {"epochs": 1}, "stages": stages}))
    made = load_recipe(str(path), ["schedule.epochs=0.5"], data={"files": ["a"]}).staged()
    assert [stage.schedule.epochs for stage in made] == [0.5, 0.5]
    assert [stage.data.files for stage in made] == [["a"], ["a"]]
    assert made[0].optimizer.lr == 1e-4


def test_stages_are_refused_alike():
    with pytest.raises(ValueError, match=r"loss\.unroll=3 is read by eagle, eagle3, not by fasteagle"):
        load_recipe(None, method="fasteagle", stages=[{}, {"loss": {"unroll": 3}}])


@pytest.mark.parametrize(
    ("stages", "says"),
    [
        ([{}, {"schedule": {"precision": "bf16"}}], "a stage has schedule.precision=bf16, and the run no"),
        (["loss", 5], r"stages\.0"),
    ],
)
def test_what_stages_cannot_have_is_refused(stages, says, tmp_path):
    """A precision was ignored, and a stage that is no mapping became one of all defaults."""
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps({"stages": stages}))
    with pytest.raises(ValueError, match=says):
        load_recipe(str(path), method="eagle")


def test_old_recipes_load(tmp_path):
    """A run that cannot be resumed, because its recipe has what its method no longer takes."""
    path = tmp_path / "recipe.yaml"
    path.write_text(OLD)
    recipe = load_recipe(str(path), method="medusa")
    assert (recipe.head.depth, recipe.head.tree, recipe.head.storage) == (4, "best-first-3x8", "int8")
    assert (recipe.loss.token, recipe.loss.decay, recipe.loss.hard) == (0.7, 0.9, True)
    assert [stage.loss.token for stage in recipe.staged()] == [1.0]
    assert recipe == stored_recipe(yaml.safe_load(OLD), "checkpoint")
    path.write_text(yaml.safe_dump(recipe.model_dump(mode="json")))
    assert load_recipe(str(path)) == recipe
    assert "groups" not in path.read_text()


@pytest.mark.parametrize("method", TRAINED)
def test_other_methods_settings_are_dropped_at_their_old_defaults_only(method, tmp_path):
    path, kind = tmp_path / "recipe.yaml", recipe_class(method, "")
    for section, names in ONCE.items():
        for name in names.keys() - kind.section(section).model_fields.keys():
            for value in names[name]:
                path.write_text(yaml.safe_dump({"method": method, section: {name: value}}))
                assert load_recipe(str(path)) == kind()
            path.write_text(yaml.safe_dump({"method": method, section: {name: 12}}))
            with pytest.raises(ValueError, match=f"{section}.{name}=12 is read by"):
                load_recipe(str(path))


def test_every_setting_of_old_is_still_one_of_some_method():
    """A name in the table of old settings that is misspelt."""
    for section, names in ONCE.items():
        known = {
            name for method in TRAINED for name in recipe_class(method, "").section(section).model_fields
        }
        assert names.keys() <= known


def test_the_defaults_are_those_that_the_methods_had():
    """Each method's defaults, which stood in a table beside the shared settings."""
    loss = {method: recipe_class(method, "")().loss.model_dump() for method in TRAINED}
    assert all(loss[m]["feature"] == 1.0 and loss[m]["token"] == 0.1 for m in ("eagle", "fasteagle"))
    laws = ("eagle3", "medusa", "glide", "draft-model")
    assert all(loss[m]["feature"] == 0.0 and loss[m]["token"] == 1.0 for m in laws)
    assert [m for m in TRAINED if loss[m]["hard"]] == ["medusa", "bita"]
    assert (loss["eagle"]["noise"], loss["eagle"]["unroll"], loss["eagle3"]["unroll"]) == (0.1, 1, 7)
    bita = recipe_class("bita", "")()
    assert (bita.optimizer.lr, bita.optimizer.clip, bita.head.depth) == (3e-2, 1.0, 3)
    assert load_recipe(None, ["optimizer.lr=0.01"], method="bita").optimizer.clip == 1.0


@pytest.mark.parametrize("blocks", [1, 2, 4, 6, 30])
def test_a_state_is_read_once_however_few_blocks_there_are(blocks):
    """Its file was written twice at a time, and held other tokens' states."""
    taps = recipe_class("eagle3", "")(method="eagle3").head.reads(blocks)
    assert len({*taps}) == len(taps)
    assert len(taps) == (3 if blocks == 30 else min(blocks, 2))


def test_the_final_state_is_read_last():
    """Labels are last. Read before others, it was written to its file twice at a time."""
    with pytest.raises(ValueError, match="final comes last"):
        load_recipe(None, ["head.taps=[final, input of block 1]"], method="eagle3").head.reads(30)


def test_a_glide_of_another_width_cannot_be_held_against_states():
    with pytest.raises(ValueError, match=r"set loss.feature=0"):
        recipe_class("glide", "")(
            method="glide", head={"own_ends": True, "hidden_size": 16}, loss={"feature": 0.5}
        )


def test_fasteagle_weighs_deep_layers_more():
    """FastEagle §2.3: w_i = 0.9^{N−i}. The reverse was the default, on one seed."""
    recipe = recipe_class("fasteagle", "")()
    N = recipe.head.depth
    weights = [recipe.loss.decay**j / recipe.loss.decay ** (N - 1) for j in range(N)]
    assert weights == pytest.approx([0.9 ** (N - i) for i in range(1, N + 1)])


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.stem)
def test_the_commands_above_our_own_recipes_are_accepted(path):
    """A recipe whose commands name a setting that the method does not read."""
    variables: dict[str, str] = {}
    trained = 0
    for line in path.read_text().splitlines():
        line = Template(line.removeprefix("#   ")).safe_substitute(variables)
        name, equals, value = line.partition("=")
        if equals and name.isupper():
            variables[name] = value.strip('"')
        if line.startswith("slipstream train "):
            _, _, method, *words = shlex.split(line)
            overrides = [word for word in words if "." in word.partition("=")[0] and "=" in word]
            load_recipe(str(path), overrides, method=method)
            trained += 1
    assert trained
