"""Shapes and types are checked in every test; nothing reaches for the network; one thread, the quickest for tiny models."""

import os

os.environ["HF_HUB_OFFLINE"] = os.environ["TRANSFORMERS_OFFLINE"] = "1"

import torch
from jaxtyping import install_import_hook

install_import_hook("slipstream", "beartype.beartype")  # before anything imports slipstream
torch.set_num_threads(1)
