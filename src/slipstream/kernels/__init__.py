"""Kernels of our own, in which a row's bits do not depend on its neighbours."""

import torch

PRECISIONS = (torch.float32, torch.bfloat16)  # of the kernels for the CPU
HALVES = (torch.bfloat16, torch.float16)
ON_CUDA = (*PRECISIONS, torch.float16)
