"""The CUDA machine's benchmark runs from end to end, on a tiny shape on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu" / "check_update.py"


def run(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *options],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )


def test_smoke_on_two_ranks_finds_all_well() -> None:
    done = run("--cpu-smoke", "--ranks", "2")
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.rpartition("RESULT ")[2])
    assert result["well"] == {"clip_ratio": True, "log_ratio_abs_mean": True, "ranks_apart": True}
    assert result["ranks_apart"] < 1e-3
    assert result["speed_ratio"] > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_cuda_it_says_so_in_one_line() -> None:
    done = run()
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines() == ["no CUDA device is here: nothing was measured"]
