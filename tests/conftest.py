"""Shapes and types are checked in every test; nothing reaches for the network; one thread, the quickest for tiny models.

With TEST_COMPILED=1 (`make test-compiled`) all targets are compiled; the checks cannot be, and are left out.
"""

import os

os.environ["HF_HUB_OFFLINE"] = os.environ["TRANSFORMERS_OFFLINE"] = "1"

import torch
from jaxtyping import install_import_hook

if not os.environ.get("TEST_COMPILED"):
    install_import_hook("slipstream", "beartype.beartype")  # before anything imports slipstream
torch.set_num_threads(1)
