"""The trainer's double itself: its faults, and that it needs no torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from online_sao.learner.scripted import ScriptedTrainer, _read_weight
from online_sao.manifest import read_header
from online_sao.types import Trajectory

ONE = Trajectory(("r",), (1, 2), (False, True), (float("nan"), -1.0), 1.0, 1.0)


def test_its_weight_is_the_number_of_policy_updates(tmp_path: Path) -> None:
    trainer = ScriptedTrainer()
    trainer.update([ONE], critic_only=True)
    for _ in range(3):
        trainer.update([ONE], critic_only=False)
    trainer.export_policy(tmp_path / "v")
    assert _read_weight(tmp_path / "v") == 3
    assert read_header(tmp_path / "v" / "model.safetensors") == {"weight": ("F32", (1,))}


def test_faults_come_in_their_order_and_then_no_more() -> None:
    trainer = ScriptedTrainer(faults={"update": [None, RuntimeError("second")]})
    trainer.update([ONE], critic_only=False)
    with pytest.raises(RuntimeError, match="second"):
        trainer.update([ONE], critic_only=False)
    trainer.update([ONE], critic_only=False)
    assert len(trainer.trained) == 2


def test_a_point_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="points are"):
        ScriptedTrainer(delays={"lunch": 1.0})


@pytest.mark.parametrize("module", ["scripted", "loop", "checkpoints", "heartbeat"])
def test_the_loop_s_process_needs_no_torch(module: str) -> None:
    code = f"import sys, online_sao.learner.{module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
