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


def test_switch_is_on_for_the_product_alone_even_if_it_fails() -> None:
    def fail() -> None:
        with bf16_products():
            seen.append(torch.get_float32_matmul_precision())
            raise ZeroDivisionError

    before = torch.get_float32_matmul_precision()
    seen: list[str] = []
    with pytest.raises(ZeroDivisionError):
        fail()
    assert seen == ["medium"]
    assert torch.get_float32_matmul_precision() == before
