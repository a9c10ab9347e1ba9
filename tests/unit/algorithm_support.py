"""What the tests of the equations share: the reference's numbers, and how to spoil a batch."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

CASES: list[dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "data" / "sao_vectors.json").read_text()
)["cases"]
JUNK = (math.nan, math.inf, -math.inf, 1e30, -9999.0)
PRECISIONS = {torch.float64: 1e-9, torch.float32: 1e-5}
"""The absolute error allowed against the reference, by type."""


def padded(
    rows: list[list[float]], fill: float = 0.0, dtype: torch.dtype = torch.float64
) -> Tensor:
    """Ragged rows as (B, T), `fill` behind each row's end."""
    width = max(len(row) for row in rows)
    return torch.tensor([row + [fill] * (width - len(row)) for row in rows], dtype=dtype)


def mask_of(rows: list[list[bool]]) -> Tensor:
    return padded([[float(x) for x in row] for row in rows]).bool()


def spoiled(x: Tensor, mask: Tensor, junk: float) -> Tensor:
    return torch.where(mask, x, junk)


def assert_near(got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    """Equal to what the reference says, within what `dtype` can hold."""
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), want, rtol=0.0, atol=PRECISIONS[dtype])
