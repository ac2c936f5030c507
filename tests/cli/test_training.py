"""train, export and import: the way of a new user."""

import json
import shlex


def test_preview_shows_what_is_learnt_and_writes_nothing(run, tiny_options, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data.jsonl").write_text('{"text": "abc"}\n')
    code, out, _ = run(
        "train", "eagle", *tiny_options[:4], "--data", "data.jsonl", "--preview", "--out", "run"
    )
    assert code == 0
    assert "3 of 3 tokens are learnt" in out
    assert not (tmp_path / "run").exists()


def test_train_bench_and_export_one_drafter(run, tiny_options, questions, tmp_path):
    """The way of a new user, from data to another engine's format."""
    (tmp_path / "data.jsonl").write_text(
        "".join(f'{{"text": "abcabcabc{c * 3}"}}\n' for c in "abcdefghijklmnop")
    )
    target, home = tiny_options[:4], str(tmp_path / "run")
    words = [
        "head.tree=chain-3",
        "schedule.evaluate_every=1000",
        "schedule.batch_tokens=64",
        "data.held_out_tokens=8",
    ]
    code, out, _ = run(
        "train", "eagle", *target, "--data", str(tmp_path / "data.jsonl"), "--out", home, *words
    )
    assert (code, "predicted τ" in out) == (0, True)
    model = " ".join(target)
    for words in (f"bench --drafter {home}", f"tune --drafter {home}"):
        assert f"next: slipstream {words} {model}\n" in out
    assert f"next: slipstream export {home} --out {home}-public {model}\n" in out
    assert (tmp_path / "run" / "curve.svg").read_text().startswith("<?xml")
    report = tmp_path / "out.json"
    code, _, _ = run(
        "bench", *tiny_options, "--drafter", home, "--questions", questions, "--json", str(report)
    )
    assert code == 0
    assert [row["identical"] for row in json.loads(report.read_text())["results"]] == [True, True]
    sampled = f"{home}:tree=chain-3,proposal=sampled"
    code, out, _ = run(
        "bench", *tiny_options, "--drafter", sampled, "--questions", questions, "--temperature", "1"
    )
    assert (code, "in law" in out) == (0, True)
    code, out, _ = run("export", home, *target, "--out", str(tmp_path / "public"))
    assert (code, "embed_tokens.weight: a copy" in out) == (0, True)
    serve = json.loads(shlex.split(out.splitlines()[-1])[-1])
    assert out.splitlines()[-1].startswith(f"next: vllm serve {target[1]} --speculative-config ")
    assert serve == {"method": "eagle", "model": str(tmp_path / "public"), "num_speculative_tokens": 3}
    code, out, _ = run("import", str(tmp_path / "public"), *target, "--out", str(tmp_path / "again"))
    assert code == 0
    assert f"next: slipstream bench --drafter {tmp_path / 'again'} {model}\n" in out


def test_data_on_standard_output_is_rows_alone(run, model, tmp_path):
    """The table stood behind them, so that what was piped into a file could not be trained on."""
    (tmp_path / "data.jsonl").write_text('{"text": "abc"}\n{"text": "bcd"}\n')
    code, out, err = run("data", str(tmp_path / "data.jsonl"), "--target", model, "--out", "-")
    assert code == 0
    assert [json.loads(line)["text"] for line in out.splitlines()] == ["abc", "bcd"]
    assert "answer tokens" in err


def test_rows_of_another_target_are_not_learnt_unasked(run, tiny_options, tmp_path):
    """`train` took them without a word: minutes of training for the wrong model."""
    made = {"source": "self", "made": {"target": "other", "fingerprint": "qwen3-0123456789ab"}}
    row = made | {"text": "abcabc"}
    (tmp_path / "data.jsonl").write_text(json.dumps(row) + "\n")
    words = ["train", "eagle", *tiny_options[:4], "--data", str(tmp_path / "data.jsonl"), "--preview"]
    code, _, err = run(*words)
    assert (code, "line 1: target other (qwen3-0123456789ab) wrote it" in err, "--force" in err) == (
        2,
        True,
        True,
    )
    assert run(*words, "--force")[0] == 0


def test_the_hint_after_writing_data_is_for_its_target(run, chatting, tmp_path):
    (tmp_path / "asked.jsonl").write_text('{"instruction": "abc"}\n')
    out = str(tmp_path / "out.jsonl")
    how = ["--out", out, "--batch", "2", "--max-new-tokens", "4"]
    code, told, _ = run("regenerate", str(tmp_path / "asked.jsonl"), *how, *chatting)
    assert (code, told.strip().endswith(f"--out runs/eagle {' '.join(chatting)}")) == (0, True)
    code, _, err = run("train", "eagle", "--out", str(tmp_path / "run"), *chatting)
    assert (code, f"slipstream synthesize --out answers.jsonl {' '.join(chatting)}" in err) == (2, True)
