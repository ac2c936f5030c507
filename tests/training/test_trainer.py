"""Training: what is learnt of the data, what is kept, and predictions that come true."""

import json
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from transformers import DeepseekV3Config

import slipstream
import tiny
from runs import recipe, train
from slipstream.drafters import load_drafter
from slipstream.engine.generate import generate
from slipstream.engine.replay import record
from slipstream.engine.request import mean_accepted_length
from slipstream.methods import METHODS
from slipstream.targets import HFTarget
from slipstream.training.data import load_examples
from slipstream.training.recipe import load_recipe
from slipstream.training.trainer import Trainer, rate

pytestmark = pytest.mark.usefixtures("home")
every_method = pytest.mark.parametrize(
    "method", [method.name for method in METHODS.values() if method.objective]
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


@every_method
def test_training_learns(chat, data, tmp_path, method, monkeypatch):
    """Steps that change nothing, go uphill, or take another rate than the schedule's, passed every test."""
    losses, rates, step = list[float](), list[float](), Trainer._step
    begun, after = dict[str, torch.Tensor](), dict[str, torch.Tensor]()

    def watched(self, model, optimizer, batch, recipe, steps):
        if not begun:
            begun.update({name: p.detach().clone() for name, p in model.named_parameters()})
        made = step(self, model, optimizer, batch, recipe, steps)
        rates.append(optimizer.param_groups[0]["lr"] - rate(recipe.optimizer, self.progress.step, steps))
        after.update({name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad})
        return made

    monkeypatch.setattr(Trainer, "_step", watched)
    train(
        chat, recipe(data, method, epochs=4.0), tmp_path / "run", show=lambda seen: losses.append(seen.loss)
    )
    quarter = len(losses) // 4
    assert after
    assert not any(torch.equal(p, begun[name]) for name, p in after.items())
    assert rates == [0.0] * len(losses)
    if method != "draft-model":  # the target's own block, which has learnt already
        assert sum(losses[-quarter:]) < sum(losses[:quarter])


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
    judge, best = trainer.judge, [(0.0, {})]

    def noted(drafter):
        prediction = judge(drafter)
        if prediction.tau > best[-1][0]:
            best.append((prediction.tau, drafter.pack()[1]))
        return prediction

    trainer.judge = noted
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
    predicted = trainer.judge(drafter)
    prompts = [e.prompt for e in trainer._held_out]
    answers = generate(chat, prompts, drafter, max_new_tokens=16, temperature=0.0)
    rounds = [r for answer in answers for r in answer.rounds]
    assert predicted.tau == pytest.approx(mean_accepted_length(rounds))
    assert predicted.rounds == len(rounds)
    assert predicted.tau > 1  # something was accepted


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


TEXTS = [(a + b, b * 9) for a in "abcdef" for b in "abcdef"]
CONVERSATIONS = [[{"role": "user", "content": q}, {"role": "assistant", "content": a}] for q, a in TEXTS]


def stages_of_two_lengths(chat, rows, home):
    """A trainer on these rows, once for each stage, of which the first cuts them."""
    (home / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    staged = recipe(str(home / "a.jsonl")).model_copy(update={"stages": [{"data": {"max_length": 9}}, {}]})
    trainer = Trainer(chat, staged, str(home / "run"))
    trainer.prepare()
    for stage in (trainer.stages[1], trainer.stages[0]):
        judged = {example.question for example in trainer._held_out}
        trainer._features(stage)
        assert judged.isdisjoint(example.question for example in trainer._all)
        yield trainer


def test_no_row_that_asks_a_held_out_question_is_learnt(chat, tmp_path):
    """The same text once more, a conversation that goes on from it, and texts that a stage cuts."""
    rows = [*CONVERSATIONS, *(row + row for row in CONVERSATIONS)]
    rows += rows[::2]
    for trainer in stages_of_two_lengths(chat, [{"messages": row} for row in rows], tmp_path):
        assert len(trainer._all) > 20


def test_a_held_out_question_is_not_learnt_behind_a_system_message(chat, tmp_path):
    """`regenerate --system` asks each question twice; and raw text, which an earlier stage cuts."""
    rows = [{"messages": row} for row in CONVERSATIONS]
    rows += [{"messages": [{"role": "system", "content": "be kind"}, *row]} for row in CONVERSATIONS]
    rows += [{"text": " ".join(q + a)} for q, a in TEXTS]
    for trainer in stages_of_two_lengths(chat, rows, tmp_path):
        left = {tuple(example.tokens) for example in trainer._all if all(example.loss)}
        cut = {tuple(example.tokens[:9]) for example in trainer._held_out if all(example.loss)}
        assert left.isdisjoint(cut)
    examples = load_examples([str(tmp_path / "a.jsonl")], chat, 64)
    assert examples[0].question == examples[len(CONVERSATIONS)].question


def test_data_of_one_question_is_refused(chat, tmp_path):
    row = {"messages": [{"role": "user", "content": "abc"}, {"role": "assistant", "content": "defg"}]}
    (tmp_path / "a.jsonl").write_text(f"{json.dumps(row)}\n" * 9)
    with pytest.raises(ValueError, match="ask what held-out ones ask: give others"):
        train(chat, recipe(str(tmp_path / "a.jsonl")), tmp_path / "run")


@pytest.mark.parametrize("method", ["bita", "glide"])
def test_heads_that_read_the_cache_refuse_a_latent_one(data, chat, tmp_path, method):
    """DeepSeek's holds keys and values of other sizes than its configuration says: a traceback."""
    sizes = tiny.GROUPED | {"num_key_value_heads": 4, "kv_lora_rank": 8, "q_lora_rank": 8}
    sizes |= {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "first_k_dense_replace": 9}
    target = HFTarget(tiny.build(DeepseekV3Config(**sizes)), chat.text.tokenizer, "latent")
    with pytest.raises(ValueError, match="train eagle, eagle3, fasteagle or medusa"):
        train(target, recipe(data, method), tmp_path / "run")


def test_one_process_trains_in_several_precisions(chat, data, tmp_path):
    for number, precision in enumerate(("no", "bf16", "no")):
        train(chat, recipe(data, epochs=0.2, precision=precision), tmp_path / str(number))


def test_a_whole_recipe_takes_nothing_beside_it(chat, data, tmp_path):
    """Other data and rates were given, and silently not used."""
    with pytest.raises(ValueError, match="a whole recipe is given"):
        slipstream.train(chat, recipe(data), str(tmp_path / "run"), overrides=["optimizer.lr=1e-4"])


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
