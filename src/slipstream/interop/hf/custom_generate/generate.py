"""For Hugging Face's `generate(custom_generate=DIRECTORY, trust_remote_code=True)`. It copies this file."""

from typing import Any

from transformers import GenerationMixin
from transformers.generation import StopStringCriteria

import slipstream


def generate(model: Any, **options: Any) -> Any:
    """Hugging Face's `generate` with Slipstream inside. It gets all arguments, `tokenizer` among them."""
    tokenizer, stops = options.pop("tokenizer", None), options.pop("stop_strings", None)
    if stops is not None:
        criteria = options.pop("stopping_criteria", None) or []
        options["stopping_criteria"] = [*criteria, StopStringCriteria(tokenizer, stops)]
    # Where a model's own directory holds this file, its `generate` is this function.
    return GenerationMixin.generate(model, custom_generate=slipstream.custom_generate, **options)
