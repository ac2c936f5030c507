"""What calls name: models whole and broken, drafters, questions, data, and files that are none."""

import gzip
import json
import os
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from transformers import BertConfig, LlamaForSequenceClassification

import tiny
from slipstream.drafters.store import save_drafter
from slipstream.targets import HFTarget

TEMPLATE = "{% for m in messages %}{{ m.role[0] }}{{ m.content }}{% endfor %}"
TEMPLATE += "{% if add_generation_prompt %}a{% endif %}"
ASKED = {"question_id": "[red]", "category": "[/]", "turns": ["abc [/] abc", "de"]}  # as rich would read it
CHAT = [{"role": "user", "content": "abc abc"}, {"role": "assistant", "content": "de de"}]
ROWS = [
    {"messages": [{**CHAT[0], "content": f"abc {x}"}, {**CHAT[1], "content": f"abcabc{x * 3}"}]}
    for x in "abcdefghij"
]
TEXTS = {
    "data.jsonl": "".join(json.dumps(row) + "\n" for row in ROWS),
    "questions.jsonl": json.dumps(ASKED) + "\n",
    "long.jsonl": "".join(json.dumps(asked) + "\n" for asked in (ASKED, {"turns": ["a" * 200]})),
    "turnless.jsonl": '{"turns": []}',
    "surrogate.jsonl": json.dumps({"messages": [{**CHAT[0], "content": "\ud800"}, CHAT[1]]}),
    "empty.jsonl": "",
    "broken.jsonl": '{"messages": [',
    "deep.jsonl": "[" * 100_000,
    "list.jsonl": "[1, 2]\n",
    "recipe.yaml": "method: eagle\nhead: {tree: chain-3}\n",
    "broken.yaml": "head: [",
    "list.yaml": "- 1",
}  # fmt: skip


class World:
    """A directory of them.

    Attributes:
        names: each by its name; `out` is where calls may write, `cwd` where they are made.
        target: of `model`.
    """

    def __init__(self, home: Path) -> None:
        self.home, self.out, self.cwd = home, home / "out", home / "cwd"
        for each in (self.out, self.cwd, home / "empty", home / "notes"):
            each.mkdir()
        (home / "notes" / "diary.txt").write_text("dear diary\n")
        os.symlink(home / "loop", home / "loop")
        os.mkfifo(home / "pipe")
        for name, text in TEXTS.items():
            (home / name).write_text(text, encoding="utf-8")
            (home / f"{name}.gz").write_bytes(gzip.compress(text.encode()))
            (home / f"bom.{name}").write_text("\ufeff" + text, encoding="utf-8")
        self._models()
        self.names = {path.name.replace(".", "_"): str(path) for path in home.iterdir()}

    def _models(self) -> None:
        model, tokenizer = deepcopy(tiny.reference("llama")), deepcopy(tiny.tokenizer())
        tokenizer.chat_template = TEMPLATE
        padded = tiny.SHORT | {"pad_token_id": 0}
        encoder = BertConfig(
            **padded, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48
        )
        classes = deepcopy(tiny.FAMILIES["llama"])
        classes.pad_token_id = 0
        nan = deepcopy(model)
        nan.model.layers[1].mlp.up_proj.weight.data[0] = torch.nan
        made: dict[str, Any] = {"model": model, "short": model, "nan": nan, "other": tiny.reference("qwen3")}
        made |= {"classifier": LlamaForSequenceClassification(classes), "encoder": tiny.build(encoder)}
        for name, each in made.items():
            each.save_pretrained(self.home / name)
            tokenizer.save_pretrained(self.home / name)
        config = json.loads((self.home / "short" / "config.json").read_text())
        (self.home / "short" / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
        self.target = HFTarget(model, tokenizer, str(self.home / "model"))
        for name, drafter in (
            ("drafter", tiny.eagle(self.target, "chain-3")),
            ("fast", tiny.fasteagle(self.target)),
        ):
            about, tensors = drafter.pack()
            save_drafter(self.home / name, drafter.method, self.target, about, tensors, {}, None)

    def seen(self) -> dict[str, tuple[int, int]]:
        """Size and time of every file that no call may change: outputs and the cache apart."""
        found = {}
        for path in self.home.rglob("*"):
            if path.relative_to(self.home).parts[0] not in ("out", "cache", "loop") and not path.is_dir():
                found[str(path)] = (path.stat().st_size, path.stat().st_mtime_ns)
        return found
