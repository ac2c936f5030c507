"""What decoding is made of: trees, sampling, verification, the cache, and the Target and Drafter protocols.
It imports torch, NumPy (for noise on a CPU) and jaxtyping, and no other part of the package."""
