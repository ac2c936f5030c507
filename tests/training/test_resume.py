"""What is interrupted goes on exactly, and what cannot be written loses nothing."""

import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import load_file

import slipstream
import tiny
from runs import recipe, train
from slipstream.drafters import load_drafter
from slipstream.drafters.recipe import Recipe
from slipstream.drafters.store import save_drafter
from slipstream.interop.public import import_checkpoint
from slipstream.targets import HFTarget
from slipstream.training.recipe import load_recipe
from slipstream.training.trainer import Trainer

pytestmark = pytest.mark.usefixtures("home")


class Killed(Exception):
    """What ends a run without a word to it."""


def killed(chat, settings: Recipe, directory, stage: int, step: int) -> None:
    """A run that ends right after a step."""

    def stop(seen):
        if (seen.stage, seen.step) == (stage, step):
            raise Killed

    with pytest.raises(Killed):
        train(chat, settings, directory, show=stop)


def files(directory) -> tuple[dict, list]:
    return load_file(directory / "model.safetensors"), (directory / "log.jsonl").read_text().splitlines()


def same(a, b) -> bool:
    mine, theirs = (
        torch.load(a / "state.pt", weights_only=True),
        torch.load(b / "state.pt", weights_only=True),
    )
    weights = all(
        torch.equal(mine["objective"][name], theirs["objective"][name]) for name in mine["objective"]
    )
    drafters, logs = zip(files(a), files(b), strict=True)
    return (
        weights
        and logs[0] == logs[1]
        and all(torch.equal(drafters[0][n], drafters[1][n]) for n in drafters[0])
    )


def test_a_resumed_run_equals_an_uninterrupted_one(chat, data, tmp_path):
    """Optimizer, schedule, data order, noise or the record of the best that begin anew."""
    settings = recipe(data, epochs=2.0)
    train(chat, settings, tmp_path / "whole")

    killed(chat, settings, tmp_path / "parts", stage=0, step=11)  # three steps after a checkpoint
    train(chat, settings, tmp_path / "parts", resume=True)
    assert same(tmp_path / "whole", tmp_path / "parts")


def test_stages_go_on_from_each_other_and_resume(chat, data, tmp_path):
    staged = recipe(data).model_copy(
        update={"stages": [{}, {"loss": {"unroll": 1}, "optimizer": {"lr": 1e-4}}]}
    )
    steps = []
    whole = Trainer(chat, staged, str(tmp_path / "whole"))
    whole.prepare()
    whole.run(lambda seen: steps.append((seen.stage, seen.of)))
    assert {stage for stage, _ in steps} == {0, 1}
    assert not whole.accelerator._optimizers  # of each stage two numbers a weight

    killed(chat, staged, tmp_path / "parts", stage=1, step=2)
    train(chat, staged, tmp_path / "parts", resume=True)
    assert same(tmp_path / "whole", tmp_path / "parts")


def test_ctrl_c_leaves_a_checkpoint_at_the_step_it_came(chat, data, tmp_path):
    settings = recipe(data, epochs=2.0)
    train(chat, settings, tmp_path / "whole")

    def interrupt(seen):
        if seen.step == 6:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train(chat, settings, tmp_path / "parts", show=interrupt)
    kept = torch.load(tmp_path / "parts" / "state.pt", weights_only=True)["progress"]["step"]
    assert kept in (6, 7)
    train(chat, settings, tmp_path / "parts", resume=True)
    assert same(tmp_path / "whole", tmp_path / "parts")


def test_ctrl_c_in_the_last_evaluation_of_a_stage_ends_the_run_there(chat, data, tmp_path, monkeypatch):
    """The next stage's features were read first."""
    staged = recipe(data, evaluate_every=1000)
    staged = staged.model_copy(update={"stages": [{}, {"loss": {"unroll": 1}}]})
    trainer, evaluate = Trainer(chat, staged, str(tmp_path / "parts")), Trainer._evaluate

    def interrupted(self, loss=None):
        if loss is not None and self.progress.stage == 0:  # behind its last step
            os.kill(os.getpid(), signal.SIGINT)
        evaluate(self, loss)

    monkeypatch.setattr(Trainer, "_evaluate", interrupted)
    trainer.prepare()
    with pytest.raises(KeyboardInterrupt):
        trainer.run()
    assert trainer.progress.stage == 0
    assert trainer.checkpoint == f"step {trainer.progress.step} of stage 1"
    monkeypatch.setattr(Trainer, "_evaluate", evaluate)
    train(chat, staged, tmp_path / "parts", resume=True)
    train(chat, staged, tmp_path / "whole")
    assert same(tmp_path / "whole", tmp_path / "parts")


def test_sigterm_leaves_a_checkpoint_and_ends_the_process_as_ever(chat, data, tmp_path):
    """A preempted machine's run, begun anew. Whoever waits for the signal (the command line, for 143) hears
    of it."""
    heard, before = [], signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))

    def terminate(seen):
        if seen.step == 6:
            os.kill(os.getpid(), signal.SIGTERM)

    try:
        with pytest.raises(KeyboardInterrupt):
            train(chat, recipe(data), tmp_path / "run", show=terminate)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert heard == [signal.SIGTERM]
    assert torch.load(tmp_path / "run" / "state.pt", weights_only=True)["progress"]["step"] in (6, 7)


@pytest.mark.parametrize("where", ["loss", "weights"])
def test_what_diverges_stops_and_leaves_what_was_good(chat, data, tmp_path, monkeypatch, where):
    """NaN for hours, saved over the last good checkpoint."""
    trainer = Trainer(chat, recipe(data), str(tmp_path / "run"))
    trainer.prepare()

    def spoil(seen):
        if seen.step == 6:
            weight = next(trainer.objective.parameters())
            with torch.no_grad():
                weight.fill_(float("nan"))

    if where == "weights":  # with gradients that are none
        monkeypatch.setattr(trainer, "_step", lambda *_: (1.0, 0.5, 9, False))
    with pytest.raises(
        ValueError, match=r"diverged at step \d+ of stage 1.*stay in .*lower optimizer\.lr"
    ) as stopped:
        trainer.run(spoil)
    assert ("a weight is" in str(stopped.value)) == (where == "weights")
    state = torch.load(tmp_path / "run" / "state.pt", weights_only=True)
    assert state["progress"]["step"] == 4
    assert all(bool(weight.isfinite().all()) for weight in state["objective"].values())
    load_drafter(str(tmp_path / "run"), chat)


def test_one_run_trains_in_a_directory(chat, data, tmp_path):
    """Two runs on one --out; or an import in the midst of one."""
    run = tmp_path / "run"
    trainer = Trainer(chat, recipe(data), str(run))
    trainer.prepare()
    for other in (
        lambda: Trainer(chat, recipe(data), str(run)),
        lambda: Trainer(chat, recipe(data), str(run), force=True),
        lambda: import_checkpoint(chat, str(tmp_path / "public"), str(run), force=True),
    ):
        with pytest.raises(ValueError, match=f"is being written by process {os.getpid()} on"):
            other()
    trainer.run()
    with pytest.raises(ValueError, match="what `slipstream train` wrote"):
        import_checkpoint(chat, str(tmp_path / "public"), str(run))
    assert not (run / ".lock").exists()


def test_a_directory_of_something_else_is_trained_into_by_force_only(chat, data, tmp_path):
    """--out at a model's directory: its weights were replaced."""
    chat.model.save_pretrained(tmp_path / "model")
    before = (tmp_path / "model" / "config.json").read_bytes()
    with pytest.raises(ValueError, match="holds other files"):
        Trainer(chat, recipe(data), str(tmp_path / "model"))
    with pytest.raises(ValueError, match="that is no name"):
        Trainer(chat, recipe(data), "")
    target = HFTarget(type(chat.model).from_pretrained(tmp_path / "model"), chat.text.tokenizer)
    with pytest.raises(ValueError, match="is read by this command"):
        Trainer(target, recipe(data), str(tmp_path / "model"), force=True)
    assert (tmp_path / "model" / "config.json").read_bytes() == before
    drafter = tiny.eagle(chat, "chain-2")
    save_drafter(tmp_path / "run", "eagle", chat, *drafter.pack(), {})  # a run without its checkpoint
    with pytest.raises(ValueError, match="holds a drafter: begin anew with --force"):
        Trainer(chat, recipe(data), str(tmp_path / "run"))
    Trainer(chat, recipe(data), str(tmp_path / "run"), force=True)


def test_kill_9_loses_no_more_than_the_steps_since_the_last_checkpoint(chat, data, tmp_path):
    chat.model.save_pretrained(tmp_path / "target")
    chat.text.tokenizer.save_pretrained(tmp_path / "target")
    words = ["train", "eagle", "--target", str(tmp_path / "target"), "--dtype", "float64", "--data", data]
    words += [
        "--out",
        str(tmp_path / "run"),
        "schedule.batch_tokens=64",
        "schedule.save_every=1",
        "schedule.epochs=200",
    ]
    words += [
        "data.max_length=40",
        "data.held_out_tokens=16",
        "head.draft_vocab=40",
        "schedule.evaluate_every=1000",
    ]
    one = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "slipstream", *words], stderr=subprocess.DEVNULL, env=one
    )
    state, patience = tmp_path / "run" / "state.pt", time.monotonic() + 120
    while not state.exists() and time.monotonic() < patience:
        time.sleep(0.05)
    time.sleep(0.3)
    process.kill()
    process.wait()
    before = torch.load(state, weights_only=True)["progress"]
    assert before["step"] > 0
    settings = load_recipe(str(tmp_path / "run" / "recipe.yaml"))

    class Enough(Exception):
        pass

    first = []

    def stop(seen):
        first.append(seen.step)
        raise Enough

    with pytest.raises(Enough):
        train(chat, settings, tmp_path / "run", resume=True, show=stop)
    assert first == [before["step"] + 1]


def test_a_full_disk_keeps_the_last_checkpoint(chat, data, tmp_path, monkeypatch):
    settings = recipe(data)
    saved, real = [], torch.save

    def save(state, path):
        saved.append(path)
        if len(saved) == 2:
            path.write(b"half")
            raise RuntimeError(
                "[enforce fail at inline_container.cc:664] . unexpected pos 64 vs 0: No space left on device"
            )
        real(state, path)

    monkeypatch.setattr(torch, "save", save)
    with pytest.raises(ValueError, match=r"state\.pt cannot be written.*the last one stays"):
        train(chat, settings, tmp_path / "run")
    assert torch.load(tmp_path / "run" / "state.pt", weights_only=True)["progress"]["step"] == 4
    assert not [path for path in (tmp_path / "run").iterdir() if path.name.startswith(".")]


def test_a_picture_that_cannot_be_drawn_hides_no_error(chat, data, tmp_path, monkeypatch):
    """On a full disk neither the checkpoint nor the curve can be written, and the curve was all that was
    told."""

    def full(*_):
        raise RuntimeError("No space left on device")

    monkeypatch.setattr(torch, "save", full)
    (tmp_path / "run" / "curve.svg").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"state\.pt cannot be written.*the last one stays"):
        slipstream.train(chat, recipe(data), str(tmp_path / "run"), force=True)


def test_directories_and_checkpoints_that_do_not_fit_are_refused(chat, data, tmp_path):
    settings = recipe(data)
    train(chat, settings, tmp_path / "run")
    with pytest.raises(ValueError, match="holds a training run: go on with --resume"):
        Trainer(chat, settings, str(tmp_path / "run"))
    with pytest.raises(ValueError, match="holds no checkpoint to resume"):
        Trainer(chat, settings, str(tmp_path / "other"), resume=True)
    with pytest.raises(ValueError, match=r"another recipe \(schedule differ\)"):
        Trainer(chat, recipe(data, epochs=3.0), str(tmp_path / "run"), resume=True)
    older = torch.load(tmp_path / "run" / "state.pt")
    older["recipe"]["head"] |= {"prompts": 16}  # when all methods shared their settings
    del older["recipe"]["head"]["storage"]  # before there was such a setting
    torch.save(older, tmp_path / "run" / "state.pt")
    Trainer(chat, settings, str(tmp_path / "run"), resume=True)
    with pytest.raises(ValueError, match="cannot be written"):
        Trainer(chat, settings, "/proc/run")
    (tmp_path / "run" / "state.pt").write_bytes(b"half")
    with pytest.raises(ValueError, match=r"checkpoint .*state\.pt cannot be read"):
        Trainer(chat, settings, str(tmp_path / "run"), resume=True)
