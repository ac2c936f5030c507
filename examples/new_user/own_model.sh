#!/usr/bin/env bash
# A model of one's own, without a chat template: its data, seven heads, a tree, a certificate, an export.
# The model is made on the spot, so small that each head learns in seconds; another's directory would do.
set -euo pipefail

python - <<'PYTHON'
"""A Llama of four layers, its tokenizer, and the beginnings of texts that it is to go on with."""
import json
import pydoc

from tokenizers import ByteLevelBPETokenizer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed

texts = [pydoc.plain(pydoc.render_doc(name)) for name in ("json", "random", "textwrap", "string", "heapq")]
words = ByteLevelBPETokenizer()
words.train_from_iterator(texts, vocab_size=1024, special_tokens=["<|endoftext|>"])
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words._tokenizer, eos_token="<|endoftext|>")
tokenizer.save_pretrained("my-model")
set_seed(0)
config = LlamaConfig(
    vocab_size=1024, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=512, bos_token_id=0, eos_token_id=0, dtype="float32",
)  # fmt: skip
LlamaForCausalLM(config).save_pretrained("my-model")
lines = [line.strip() for text in texts for line in text.splitlines() if len(line.strip()) > 30][:64]
with open("prompts.jsonl", "w") as file:
    file.writelines(json.dumps({"text": line}) + "\n" for line in lines)
with open("question.jsonl", "w") as file:
    file.writelines(json.dumps({"turns": [line]}) + "\n" for line in lines[:4])
PYTHON

slipstream generate "def add(a, b):" --target ./my-model --max-new-tokens 16
slipstream regenerate prompts.jsonl --target ./my-model --out answers.jsonl --max-new-tokens 24 --temperature 0
slipstream data answers.jsonl --target ./my-model
for method in eagle eagle3 fasteagle medusa bita glide draft-model; do
    slipstream train $method --target ./my-model --data answers.jsonl --out runs/$method \
        data.held_out=4 data.held_out_tokens=8 schedule.epochs=1
    slipstream generate "import json" --target ./my-model --drafter runs/$method --max-new-tokens 16
done
slipstream tune --target ./my-model --drafter runs/eagle --questions question.jsonl --limit 2
slipstream certify --target ./my-model --drafter runs/eagle --drafter runs/medusa --questions question.jsonl \
    --limit 2 --max-new-tokens 16 --draws 8 --json certificate.json
for method in eagle eagle3 fasteagle medusa; do
    slipstream export runs/$method --target ./my-model --out exported/$method
done
slipstream import exported/eagle --target ./my-model --out runs/again
