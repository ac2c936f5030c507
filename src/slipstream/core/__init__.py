"""The nouns: Tree, Sampling, verify, KVCache, Span and the Drafter protocol. Imports torch (and NumPy's
Philox) only."""
