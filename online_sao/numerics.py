"""The output head without the rounding of its sums. Torch alone.

A bf16 product adds in fp32 and rounds each sum to 8 bits: at a logit of 20 that is an error of up
to 0.06, and the larger part of what engine and learner disagree about. The same bf16 inputs with
fp32 sums cost little more on a CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@contextmanager
def bf16_products() -> Iterator[None]:
    """fp32 matrix products inside multiply in bf16 and add in fp32.

    Torch's switch is global, so it is on for the product alone: elsewhere (rotary embeddings, say)
    fp32 means fp32.
    """
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


class ExactHead(nn.Module):
    """A bf16 linear layer whose output is fp32, its sums unrounded. Not trainable.

    Keeps an fp32 copy of the matrix: (out, in) x 4 bytes.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = nn.Parameter(linear.weight.detach().float(), requires_grad=False)
        self.bias = None if linear.bias is None else linear.bias.detach().float()

    def forward(self, x: Tensor) -> Tensor:
        """x W' + b, (..., in) -> (..., out) float32."""
        with bf16_products():
            return F.linear(x.float(), self.weight, self.bias)
