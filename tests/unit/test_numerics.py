"""The output head whose sums are not rounded."""

import pytest
import torch
from torch import nn

from online_sao.numerics import ExactHead, bf16_products


@pytest.mark.parametrize("rows", [1, 8, 40])
def test_exact_head_is_a_hundred_times_closer_than_a_bf16_product(rows: int) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(96, 512, dtype=torch.bfloat16).requires_grad_(False)
    x = torch.randn(rows, 96, dtype=torch.bfloat16) * 8
    truth = x.double() @ linear.weight.double().T + linear.bias.double()
    exact = ExactHead(linear)(x)
    assert exact.dtype == torch.float32
    rounded_error = (linear(x).double() - truth).abs().mean()
    assert (exact.double() - truth).abs().mean() < rounded_error / 100


def test_switch_is_as_it_was_after_the_product_even_if_it_fails() -> None:
    before = torch.get_float32_matmul_precision()
    with pytest.raises(ZeroDivisionError), bf16_products():
        assert torch.get_float32_matmul_precision() == "medium"
        raise ZeroDivisionError
    assert torch.get_float32_matmul_precision() == before
