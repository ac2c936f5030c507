"""logit_bias."""

import torch

from slipstream.serve.bias import Bias


def test_it_adds_to_the_scores_of_its_tokens():
    bias = Bias.of({"2": 5.0, "0": -100.0}, 4)
    made = bias(torch.tensor([[1]]), torch.zeros(1, 4, dtype=torch.float64))
    assert made.tolist() == [[-100.0, 0.0, 5.0, 0.0]]
