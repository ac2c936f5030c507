"""Training: what is interrupted goes on exactly, what cannot be written loses nothing, and predictions come
true."""

import json
import os
import signal
import subprocess
import sys
import time
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import slipstream
import tiny
from slipstream.decode.answer import mean_accepted_length
from slipstream.decode.generate import generate
from slipstream.decode.predict import record
from slipstream.drafters import load_drafter
from slipstream.drafters.store import save_drafter
from slipstream.interop.public import import_checkpoint
from slipstream.methods import METHODS
from slipstream.targets import HFTarget
from slipstream.training.recipe import Recipe, load_recipe, recipe_class
from slipstream.training.trainer import Trainer, rate

pytestmark = pytest.mark.usefixtures("home")
every_method = pytest.mark.parametrize(
    "method", [method.name for method in METHODS.values() if method.objective]
)
OWN_SIZES = (("head", "depth", 3), ("loss", "unroll", 2))


def recipe(data: str, method: str = "eagle", **schedule) -> Recipe:
    settings = {"batch_tokens": 64, "evaluate_every": 5, "save_every": 4, "epochs": 1.0} | schedule
    kind = recipe_class(method, "")
    depth, unroll = (
        {name: size} if name in kind.section(part).model_fields else {} for part, name, size in OWN_SIZES
    )
    return load_recipe(
        None,
        data={"files": [data], "max_length": 40, "held_out_tokens": 16},
        method=method,
        head={"draft_vocab": 40, "tree": "[[0],[1],[0,0],[1,0]]", **depth},
        schedule=settings,
        loss=unroll,
    )


def train(chat, settings: Recipe, directory, resume: bool = False, show=lambda seen: None):
    trainer = Trainer(chat, settings, str(directory), resume)
    trainer.prepare()
    return trainer.run(show)


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


@every_method
def test_a_run_leaves_a_drafter_that_decodes(chat, data, tmp_path, method):
    progress = train(chat, recipe(data, method, epochs=2.0), tmp_path / "run")
    drafter = load_drafter(str(tmp_path / "run"), chat)
    answer = generate(chat, "abcabc", drafter, max_new_tokens=12, temperature=0.0)
    assert answer.tokens == generate(chat, "abcabc", max_new_tokens=12, temperature=0.0).tokens
    about = json.loads((tmp_path / "run" / "config.json").read_text())
    assert (about["method"], about["target"]["fingerprint"]) == (method, chat.fingerprint)
    assert about["training"]["predicted"]["tau"] == pytest.approx(progress.best, abs=1e-4)
    assert progress.history[0].trained == 0 < progress.history[-1].trained
    assert progress.history[-1].loss > 0


@pytest.mark.parametrize(
    "about",
    [{"hidden_size": 16}, {"hidden_size": 16, "own_ends": True, "published": True}, {"glimpses": False}],
)
def test_a_glide_of_its_own_width_and_ends_decodes(chat, data, tmp_path, about):
    settings = recipe(data, "glide")
    settings = settings.model_copy(update={"head": settings.head.model_copy(update=about)})
    settings = settings.model_copy(update={"loss": settings.loss.model_copy(update={"offset": False})})
    train(chat, settings, tmp_path / "run")
    drafter = load_drafter(str(tmp_path / "run"), chat)
    assert drafter.head.config.hidden_size == about.get("hidden_size", chat.config.hidden_size)
    plain = generate(chat, "abcab", max_new_tokens=16)
    assert generate(chat, "abcab", drafter, max_new_tokens=16).tokens == plain.tokens


@every_method
def test_the_drafter_that_is_kept_is_the_one_that_was_judged(chat, data, tmp_path, method):
    """Weights of 8 bits that are rounded again in the target's precision, which has other steps."""
    bf16 = HFTarget(deepcopy(tiny.reference("llama")).bfloat16(), chat.text.tokenizer, "tiny-bf16")
    settings = recipe(data, method)
    settings = settings.model_copy(update={"head": settings.head.model_copy(update={"storage": "int8"})})
    trainer = Trainer(bf16, settings, str(tmp_path / "run"))
    trainer.prepare()
    judge, best = trainer.objective.judge, [(0.0, {})]

    def noted(drafter, recorded):
        prediction = judge(drafter, recorded)
        if prediction.tau > best[-1][0]:
            best.append((prediction.tau, drafter.pack()[1]))
        return prediction

    trainer.objective.judge = noted
    trainer.run()
    kept = load_drafter(str(tmp_path / "run"), bf16).pack()[1]
    assert kept.keys() == best[-1][1].keys()
    assert not [name for name, weight in best[-1][1].items() if not torch.equal(weight, kept[name])]


@every_method
def test_predicted_tau_is_decoded_tau(chat, data, tmp_path, method):
    """A prediction that drafts with other masks, counts other tokens or walks otherwise than decoding
    does."""
    settings = recipe(data, method)
    trainer = Trainer(chat, settings, str(tmp_path / "run"))
    trainer.prepare()
    trainer.run()
    drafter = trainer.objective.drafter(settings.head.tree, torch.float64)
    predicted = trainer.objective.judge(drafter, trainer.recorded)
    prompts = [e.prompt for e in trainer._held_out]
    answers = generate(chat, prompts, drafter, max_new_tokens=16, temperature=0.0)
    rounds = [r for answer in answers for r in answer.rounds]
    assert predicted.tau == pytest.approx(mean_accepted_length(rounds))
    assert predicted.rounds == len(rounds)
    assert predicted.tau > 1  # something was accepted


def test_a_resumed_run_equals_an_uninterrupted_one(chat, data, tmp_path):
    """Optimizer, schedule, data order, noise or the record of the best that begin anew."""
    settings = recipe(data, epochs=2.0)
    train(chat, settings, tmp_path / "whole")

    killed(chat, settings, tmp_path / "parts", stage=0, step=11)  # three steps after a checkpoint
    train(chat, settings, tmp_path / "parts", resume=True)
    assert same(tmp_path / "whole", tmp_path / "parts")


def test_raw_text_first_and_chat_then_is_judged_by_chat(chat, data, tmp_path):
    """A drafter whose best weights and vocabulary are those for raw text, of which a prompt is one token."""
    raw = tmp_path / "raw.txt"
    raw.write_text("\n\n".join(f"ijklmnop{letter * 9}" for letter in "ijklmnopqr"))
    staged = recipe(data).model_copy(update={"stages": [{"data": {"files": [str(raw)]}}, {}]})
    trainer = Trainer(chat, staged, str(tmp_path / "run"))
    trainer.prepare()
    assert int(trainer.recorded.prompts.min()) > 1
    assert trainer.vocab_coverage == 1
    trainer.run()
    assert [entry.stage for entry in trainer.progress.history][-1] == 1


def test_stages_of_other_data_do_not_learn_what_is_held_out(chat, data, tmp_path):
    """τ of texts that the first stage had learnt, and the best weights by that τ."""
    more = tmp_path / "more.jsonl"
    more.write_text("".join(f"{line}\n" for line in Path(data).read_text().splitlines()[:20]))
    staged = recipe(data).model_copy(update={"stages": [{"data": {"files": [data, str(more)]}}, {}]})
    trainer = Trainer(chat, staged, str(tmp_path / "run"))
    trainer.prepare()
    judged = {example.question for example in trainer._held_out}
    trainer._features(trainer.stages[0])
    assert len(trainer._all) > 40
    assert judged.isdisjoint(example.question for example in trainer._all)


def test_no_row_that_asks_a_held_out_question_is_learnt(chat, tmp_path):
    """The same text once more, a conversation that goes on from it, and texts that a stage cuts."""
    texts = [(a + b, b * 9) for a in "abcdef" for b in "abcdef"]
    rows = [[{"role": "user", "content": q}, {"role": "assistant", "content": a}] for q, a in texts]
    rows += [row + row for row in rows] + rows[::2]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    staged = recipe(str(tmp_path / "a.jsonl")).model_copy(
        update={"stages": [{"data": {"max_length": 9}}, {}]}
    )
    trainer = Trainer(chat, staged, str(tmp_path / "run"))
    trainer.prepare()
    judged = {example.question for example in trainer._held_out}
    for stage in (trainer.stages[1], trainer.stages[0]):
        trainer._features(stage)
        assert len(trainer._all) > 20
        assert judged.isdisjoint(example.question for example in trainer._all)


def test_data_of_one_question_is_refused(chat, tmp_path):
    row = {"messages": [{"role": "user", "content": "abc"}, {"role": "assistant", "content": "defg"}]}
    (tmp_path / "a.jsonl").write_text(f"{json.dumps(row)}\n" * 9)
    with pytest.raises(ValueError, match="ask what held-out ones ask: give others"):
        train(chat, recipe(str(tmp_path / "a.jsonl")), tmp_path / "run")


def test_one_process_trains_in_several_precisions(chat, data, tmp_path):
    for number, precision in enumerate(("no", "bf16", "no")):
        train(chat, recipe(data, epochs=0.2, precision=precision), tmp_path / str(number))


def test_a_whole_recipe_takes_nothing_beside_it(chat, data, tmp_path):
    """Other data and rates were given, and silently not used."""
    with pytest.raises(ValueError, match="a whole recipe is given"):
        slipstream.train(chat, recipe(data), str(tmp_path / "run"), overrides=["optimizer.lr=1e-4"])


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


def test_too_little_data_is_refused(chat, data, tmp_path):
    settings = load_recipe(None, data={"files": [data], "limit": 3})
    with pytest.raises(ValueError, match="3 examples remain"):
        Trainer(chat, settings, str(tmp_path / "run")).prepare()
    with pytest.raises(ValueError, match="no training data: give --data FILE"):
        Trainer(chat, load_recipe(None), str(tmp_path / "run")).prepare()


def test_no_step_waits_for_a_plan_of_its_attention(chat, data, tmp_path):
    """cuDNN plans for every new shape of a batch: five sixths of a step of eagle3 on a GPU went there."""
    planned = torch.backends.cuda.cudnn_sdp_enabled
    before, within = planned(), set[bool]()
    train(chat, recipe(data), tmp_path / "run", show=lambda seen: within.add(planned()))
    assert (before, within, planned()) == (True, {False}, True)


def test_the_rate_warms_up_and_falls_to_its_floor():
    optimizer = load_recipe(None).optimizer
    rates = [rate(optimizer, step, 100) for step in range(100)]
    assert rates[0] < rates[1] < rates[2] <= optimizer.lr
    assert rates[3:] == sorted(rates[3:], reverse=True)
    assert optimizer.floor * optimizer.lr < rates[-1] < 1.05 * optimizer.floor * optimizer.lr


@pytest.mark.parametrize("honest", [True, False])
def test_greedy_answers_of_the_data_are_not_made_again(chat, tmp_path, honest):
    """Time that answering takes; or a prediction along what another model said."""
    questions = ["".join(chr(97 + (7 * i + j) % 26) for j in range(3 + i % 5)) for i in range(16)]
    answers = generate(chat, questions, max_new_tokens=12, temperature=0.0)
    path = tmp_path / "data.jsonl"
    with path.open("w") as file:
        for question, answer in zip(questions, answers if honest else reversed(answers), strict=True):
            messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer.text}]
            about = {"temperature": 0, "finished": answer.finish == "eos"}
            file.write(json.dumps({"messages": messages, **about}) + "\n")
    trainer = Trainer(chat, recipe(str(path)), str(tmp_path / "run"))
    trainer.prepare()
    assert (trainer._known_answers() is not None) == honest
    anew = record(chat, [e.prompt for e in trainer._held_out], 12, ("final",))
    assert anew.greedy_share() == 1.0
    if honest:
        assert trainer.recorded.tokens[:, : anew.tokens.shape[1]].equal(anew.tokens)


def test_a_record_ends_where_an_answer_ends(chat, data):
    """Tokens past the end of an answer that count as accepted."""
    from slipstream.training.data import load_examples

    recorded = record(chat, [e.prompt for e in load_examples([data], chat, 40)[:5]], 16, ("final",))
    assert (recorded.lengths - recorded.prompts <= 16).all()
    assert (recorded.tokens.gather(1, recorded.lengths[:, None] - 1) >= 0).all()
