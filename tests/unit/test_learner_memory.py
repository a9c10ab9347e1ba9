"""A learner's memory over a long life: flat, once its first updates are over."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tiny_llama import make_folder

from online_sao.wiring import LEARNER_MEMORY, child_environment

UPDATES, SETTLED = 200, 40
LIVE = """
import gc, sys
from pathlib import Path
from tiny_llama import sampled
from online_sao.config import AlgorithmSettings, LearnerSettings
from online_sao.learner.trainer import SaoTrainer

base, updates, settled = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
trainer = SaoTrainer(AlgorithmSettings(), LearnerSettings(dtype="float32", policy_layers=2), base)
trainer.restore(base, None)
pool = sampled(base, 48)

def resident_mib():
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20

for number in range(updates):
    if number == settled:
        begin = resident_mib()
    first = 7 * number % 40
    trainer.update(pool[first : first + 8], critic_only=False)
print(resident_mib() - begin)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_is_flat_over_200_updates(tmp_path: Path) -> None:
    """One (8, 14, 2048) tensor kept from each update would alone add 140 MiB."""
    base = make_folder(
        tmp_path / "base", vocab_size=2048, hidden_size=64, intermediate_size=256,
        num_hidden_layers=3,
    )  # fmt: skip
    environment = {
        **child_environment(1, LEARNER_MEMORY),
        "PYTHONPATH": f"{Path(__file__).parents[1]}:{Path(__file__).parents[2]}",
    }
    done = subprocess.run(
        [sys.executable, "-c", LIVE, str(base), str(UPDATES), str(SETTLED)],
        env=environment, check=True, capture_output=True, text=True,
    )  # fmt: skip
    assert float(done.stdout) < 8.0
