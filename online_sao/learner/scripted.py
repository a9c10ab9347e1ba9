"""The trainer's double: no torch, no model, milliseconds. For tests and `--engine scripted`.

Its policy is one number, the policy updates done, in a valid safetensors file of a few bytes. It
keeps the whole contract: restore, exact resume, UpdateNotFinite with nothing changed.
"""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from online_sao.errors import ModelError, VersionFolderError
from online_sao.learner.facts import batch_facts
from online_sao.manifest import MANIFEST_NAME, Manifest
from online_sao.types import ProbeTokens, TokenTrace, TrainingResult, Trajectory, UpdateKind

POINTS = ("restore", "update", "export", "save")
"""Where delays and faults can be set. `export` and `save` fail with half a folder written."""
PROBES = ProbeTokens((0, 1, 2, 3), (-1.0, -1.0, -1.0))
WEIGHTS = "model.safetensors"
STATE = "state.json"


@dataclass(slots=True)
class _Counters:
    policy: int = 0
    """Updates of the policy: its only weight."""
    critic: int = 0
    updates: int = 0


class ScriptedTrainer:
    """`Trainer` that counts instead of learning."""

    def __init__(
        self,
        *,
        delays: Mapping[str, float] | None = None,
        faults: Mapping[str, Sequence[Exception | None]] | None = None,
    ) -> None:
        """`delays`: seconds at each point. `faults`: what each point raises at its first, second,
        ... visit; None or the end of the list: nothing. A fault `UpdateNotFinite` at `update` is
        how a batch that gives NaN is played.
        """
        named = {*(delays or {}), *(faults or {})}
        if not named <= set(POINTS):
            raise ValueError(f"points are {', '.join(POINTS)}")
        self._delays = dict(delays or {})
        self._faults = {point: list(given) for point, given in (faults or {}).items()}
        self._now = _Counters()
        self.trained: list[tuple[str, ...]] = []
        """Rollouts of each update it did, critic-only ones included; what was undone as well."""

    def restore(self, policy: Path, state: Path | None) -> str:
        """Take the policy's number from its folder, the other counters from `state`."""
        self._reach("restore")
        number = _read_weight(policy)
        if state is None:
            self._now = _Counters(policy=number)
            return "" if number == 0 else "no learner state: the counters start afresh"
        try:
            saved = _Counters(**json.loads((state / STATE).read_text()))
        except (OSError, ValueError, TypeError) as error:
            raise ModelError(f"{state} is no learner state: {error}") from error
        self._now = _Counters(number, saved.critic, saved.updates)
        if saved.policy == number:
            return ""
        return f"policy {number} with the counters of a state that belongs to {saved.policy}"

    def update(self, trajectories: Sequence[Trajectory], *, critic_only: bool) -> TrainingResult:
        """Count; values are 0, so every advantage is the reward."""
        self._reach("update")
        self.trained.append(tuple(i for t in trajectories for i in t.rollout_ids))
        self._now.updates += 1
        self._now.critic += 1
        self._now.policy += not critic_only
        kind = UpdateKind.CRITIC_ONLY if critic_only else UpdateKind.POLICY
        return TrainingResult(kind, batch_facts(trajectories), tuple(map(_trace, trajectories)))

    def export_policy(self, folder: Path) -> None:
        """A version folder of one tensor, with its manifest."""
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps({"model_type": "scripted"}))
        (folder / "tokenizer.json").write_text("{}")
        self._reach("export")
        (folder / WEIGHTS).write_bytes(_weight_file(self._now.policy))
        (folder / MANIFEST_NAME).write_text(Manifest.describe(folder, PROBES).to_json())

    def save_state(self, folder: Path) -> None:
        """The counters."""
        folder.mkdir(parents=True)
        self._reach("save")
        (folder / STATE).write_text(json.dumps(asdict(self._now)))

    def _reach(self, point: str) -> None:
        time.sleep(self._delays.get(point, 0.0))
        faults = self._faults.get(point, [])
        fault = faults.pop(0) if faults else None
        if fault is not None:
            raise fault


def _trace(trajectory: Trajectory) -> TokenTrace:
    n = sum(trajectory.action_mask)
    return TokenTrace(
        rollout_id=trajectory.rollout_ids[0],
        values=(0.0,) * n,
        advantages=(trajectory.reward,) * n,
        ratios=(1.0,) * n,
        kept=(True,) * n,
    )


def _weight_file(number: int) -> bytes:
    """A safetensors file of one float32 tensor `weight` (1,)."""
    tensor = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    header = json.dumps({"weight": tensor}).encode()
    header += b" " * (-len(header) % 8)
    return struct.pack("<Q", len(header)) + header + struct.pack("<f", float(number))


def _read_weight(folder: Path) -> int:
    try:
        Manifest.read(folder).verify(folder)
        (number,) = struct.unpack("<f", (folder / WEIGHTS).read_bytes()[-4:])
    except (OSError, struct.error, VersionFolderError) as error:
        raise ModelError(f"{folder} cannot be loaded: {error}") from error
    return int(number)
