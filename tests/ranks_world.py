"""Runs a piece of work on two ranks of this machine, as torchrun would start them.

`on_ranks(tmp_path, jobs)` starts `python ranks_world.py` twice; each process joins, does the jobs
(functions of this file with their arguments), one after the other, and pickles what they return.
"""

from __future__ import annotations

import math
import os
import pickle
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from tiny_llama import sampled

from online_sao.config import AlgorithmSettings, LearnerSettings
from online_sao.errors import UpdateNotFinite
from online_sao.learner.ranks import ALONE, Ranks
from online_sao.learner.trainer import SaoTrainer
from online_sao.ports import free_port

HERE = Path(__file__)
LEARNER = {"policy_lr": 1e-2, "critic_lr": 1e-2, "critic_layers": 2, "dtype": "float32"}


Job = tuple[str, dict[str, Any]]


def on_ranks(tmp_path: Path, jobs: Mapping[str, Job], *, ranks: int = 2) -> list[dict[str, Any]]:
    """What each job returned, by rank. Fails where one of the ranks does."""
    given = tmp_path / "jobs"
    given.write_bytes(pickle.dumps(jobs))
    environment = {
        **os.environ, "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE",
        "PYTHONPATH": f"{HERE.parent}:{HERE.parents[1]}",
    }  # fmt: skip
    command = [sys.executable, str(HERE), str(given)]
    running = [
        subprocess.Popen(
            [*command, str(tmp_path / f"answers.{rank}")],
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        said = [process.communicate(timeout=200)[1] for process in running]
    finally:
        for process in running:
            process.kill()
    for process, text in zip(running, said, strict=True):
        assert process.returncode == 0, text[-4000:]
    return [pickle.loads((tmp_path / f"answers.{rank}").read_bytes()) for rank in range(ranks)]


def trainer_on(
    ranks: Ranks, base: Path, learner: Mapping[str, Any], algorithm: Mapping[str, Any]
) -> SaoTrainer:
    settings = LearnerSettings(**{**LEARNER, **learner})
    return SaoTrainer(AlgorithmSettings(**algorithm), settings, base, ranks)


def updates(
    ranks: Ranks,
    base: Path,
    out: Path,
    learner: Mapping[str, Any] = {},
    algorithm: Mapping[str, Any] = {},
    count: int = 3,
    size: int = 7,
    state: tuple[Path, Path] | None = None,
) -> list[dict[str, Any]]:
    """`count` updates on replies of the tiny Llama; the version and state they end at in `out`."""
    trainer = trainer_on(ranks, base, learner, algorithm)
    trainer.restore(*(state or (base, None)))
    results = [
        asdict(trainer.update(sampled(base, size, seed=seed), critic_only=False))
        for seed in range(count)
    ]
    trainer.export_policy(out / "version")
    trainer.save_state(out / "state")
    return results


def nan_on_one_rank(ranks: Ranks, base: Path, out: Path) -> list[Any]:
    """An update whose longest reply, rank 0's alone, gives NaN; then one that is well."""
    trainer = trainer_on(ranks, base, {}, {})
    trainer.restore(base, None)
    batch = sampled(base, 6)
    longest = max(range(6), key=lambda row: (len(batch[row].token_ids), -row))
    spoiled = [replace(t, temperature=math.nan) if i == longest else t for i, t in enumerate(batch)]
    trainer.update(batch, critic_only=False)
    trainer.save_state(out / "before")
    try:
        trainer.update(spoiled, critic_only=False)
    except UpdateNotFinite as error:
        said = str(error)
    trainer.save_state(out / "after")
    return [said, asdict(trainer.update(batch, critic_only=False))]


def main() -> None:
    given, answer = map(Path, sys.argv[1:])
    jobs: dict[str, Job] = pickle.loads(given.read_bytes())
    ranks = Ranks.join()
    assert ranks is not ALONE
    answers = {
        name: globals()[work](ranks, **arguments) for name, (work, arguments) in jobs.items()
    }
    answer.write_bytes(pickle.dumps(answers))
    ranks.leave()


if __name__ == "__main__":
    main()
