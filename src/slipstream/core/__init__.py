"""The nouns: Tree, Sampling, verify, KVCache, Span and the Drafter protocol. Beside the modules that the
whole package shares they import torch, NumPy (Philox) and jaxtyping only."""
