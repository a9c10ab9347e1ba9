"""What the learner's loop relies on, on the real trainer and on its double."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from tiny_llama import make_folder, sampled

from online_sao.config import AlgorithmSettings, LearnerSettings
from online_sao.errors import ModelError, UpdateNotFinite
from online_sao.interfaces import Trainer
from online_sao.learner.scripted import ScriptedTrainer
from online_sao.learner.trainer import SaoTrainer
from online_sao.manifest import Manifest
from online_sao.types import Trajectory, UpdateKind

LEARNER = LearnerSettings(policy_lr=1e-2, critic_lr=1e-2, policy_layers=2, critic_layers=1)


@dataclass(frozen=True)
class Subject:
    """One implementation: how to make it, version 0, and a batch it can train on."""

    make: Callable[[], Trainer]
    base: Path
    trajectories: list[Trajectory]
    make_failing: Callable[[], Trainer]
    """Restored or not, its next update meets NaN."""
    spoil: Callable[[list[Trajectory]], list[Trajectory]]


def scripted(folder: Path) -> Subject:
    base = folder / "base"
    ScriptedTrainer().export_policy(base)
    one = Trajectory(("r",), (1, 2, 3), (False, True, True), (float("nan"), -1.0, -2.0), 1.0, 1.0)
    many = [replace(one, rollout_ids=(f"r{i}",), reward=float(i % 2)) for i in range(6)]
    return Subject(
        ScriptedTrainer,
        base,
        many,
        lambda: ScriptedTrainer(faults={"update": [None, UpdateNotFinite("loss is nan")]}),
        lambda trajectories: trajectories,
    )


def real(folder: Path, dtype: str) -> Subject:
    base = make_folder(folder / "base", attention_dropout=0.1)
    settings = LEARNER.model_copy(update={"dtype": dtype})

    def make() -> Trainer:
        return SaoTrainer(AlgorithmSettings(), settings, base)

    def spoil(trajectories: list[Trajectory]) -> list[Trajectory]:
        return [replace(t, temperature=float("nan")) for t in trajectories]

    return Subject(make, base, sampled(base, 6), make, spoil)


@pytest.fixture(params=["scripted", "float32", "bfloat16"])
def subject(request: pytest.FixtureRequest, tmp_path: Path) -> Subject:
    return scripted(tmp_path) if request.param == "scripted" else real(tmp_path, request.param)


def exported(trainer: Trainer, folder: Path) -> Manifest:
    trainer.export_policy(folder)
    manifest = Manifest.read(folder)
    manifest.verify(folder)
    return manifest


def test_it_is_a_trainer(subject: Subject) -> None:
    assert isinstance(subject.make(), Trainer)


def test_a_fresh_start_has_nothing_to_say_and_exports_version_0_itself(
    subject: Subject, tmp_path: Path
) -> None:
    trainer = subject.make()
    assert trainer.restore(subject.base, None) == ""
    assert exported(trainer, tmp_path / "v").sha256 == Manifest.read(subject.base).sha256


def test_an_update_changes_the_bytes_and_keeps_every_name_dtype_and_shape(
    subject: Subject, tmp_path: Path
) -> None:
    trainer = subject.make()
    trainer.restore(subject.base, None)
    result = trainer.update(subject.trajectories, critic_only=False)
    assert result.kind is UpdateKind.POLICY
    manifest, base = exported(trainer, tmp_path / "v"), Manifest.read(subject.base)
    assert manifest.sha256 != base.sha256
    assert dict(manifest.tensors) == dict(base.tensors)
    assert manifest.probes.token_ids == base.probes.token_ids
    copied = {f.name for f in subject.base.iterdir()}
    assert {f.name for f in (tmp_path / "v").iterdir()} == copied


def test_a_critic_only_update_leaves_the_policy_s_bytes_alone(
    subject: Subject, tmp_path: Path
) -> None:
    trainer = subject.make()
    trainer.restore(subject.base, None)
    result = trainer.update(subject.trajectories, critic_only=True)
    assert result.kind is UpdateKind.CRITIC_ONLY
    assert exported(trainer, tmp_path / "v").sha256 == Manifest.read(subject.base).sha256


def test_traces_name_every_trajectory_and_cover_its_actions(subject: Subject) -> None:
    trainer = subject.make()
    trainer.restore(subject.base, None)
    traces = trainer.update(subject.trajectories, critic_only=False).traces
    assert [t.rollout_id for t in traces] == [t.rollout_ids[0] for t in subject.trajectories]
    for trace, trajectory in zip(traces, subject.trajectories, strict=True):
        n = sum(trajectory.action_mask)
        lengths = map(len, (trace.values, trace.advantages, trace.ratios, trace.kept))
        assert list(lengths) == [n] * 4


def test_clean_stop_resume_one_step_equals_the_uninterrupted_run(
    subject: Subject, tmp_path: Path
) -> None:
    trainer = subject.make()
    trainer.restore(subject.base, None)
    trainer.update(subject.trajectories[:3], critic_only=True)
    trainer.update(subject.trajectories[:3], critic_only=False)
    trainer.export_policy(tmp_path / "v1")
    trainer.save_state(tmp_path / "s1")
    uninterrupted = trainer.update(subject.trajectories[3:], critic_only=False)
    trainer.save_state(tmp_path / "s2")

    resumed = subject.make()
    assert resumed.restore(tmp_path / "v1", tmp_path / "s1") == ""
    result = resumed.update(subject.trajectories[3:], critic_only=False)
    resumed.save_state(tmp_path / "s2-resumed")
    assert result.traces == uninterrupted.traces
    one, two = exported(trainer, tmp_path / "v2"), exported(resumed, tmp_path / "v2-resumed")
    assert one.sha256 == two.sha256
    for file in (tmp_path / "s2").iterdir():
        assert file.read_bytes() == (tmp_path / "s2-resumed" / file.name).read_bytes(), file.name


def test_a_newer_policy_beside_an_older_state_is_taken_and_said(
    subject: Subject, tmp_path: Path
) -> None:
    trainer = subject.make()
    trainer.restore(subject.base, None)
    trainer.update(subject.trajectories, critic_only=False)
    trainer.save_state(tmp_path / "s1")
    trainer.update(subject.trajectories, critic_only=False)
    newest = exported(trainer, tmp_path / "v2")
    resumed = subject.make()
    assert "state" in resumed.restore(tmp_path / "v2", tmp_path / "s1")
    assert exported(resumed, tmp_path / "again").sha256 == newest.sha256
    result = resumed.update(subject.trajectories, critic_only=False)
    assert result.kind is UpdateKind.POLICY


def test_a_merged_episode_is_trained_as_one_trajectory(subject: Subject) -> None:
    one = subject.trajectories[0]
    ends = [i for i, action in enumerate(one.action_mask) if action]
    pad = (float("nan"),)
    merged = replace(
        one,
        rollout_ids=("first", "second"),
        token_ids=one.token_ids + one.token_ids,
        action_mask=one.action_mask * 2,
        logprobs=one.logprobs + pad * ends[0] + one.logprobs[ends[0] :],
        reward=1.5,
        reward_at=((ends[-1], 0.5), (ends[-1] + len(one.token_ids), 1.0)),
    )
    trainer = subject.make()
    trainer.restore(subject.base, None)
    result = trainer.update([merged, *subject.trajectories[1:]], critic_only=False)
    assert result.kind is UpdateKind.POLICY
    assert result.traces[0].rollout_id == "first"
    assert len(result.traces[0].advantages) == 2 * len(ends)
    counted = [result.metrics[name] for name in ("trajectories", "rollouts")]
    assert counted == [len(subject.trajectories), len(subject.trajectories) + 1]


def test_a_state_is_taken_only_whole(subject: Subject, tmp_path: Path) -> None:
    trainer = subject.make()
    trainer.restore(subject.base, None)
    trainer.save_state(tmp_path / "s")
    (tmp_path / "s" / "state.json").unlink()
    with pytest.raises(ModelError):
        subject.make().restore(subject.base, tmp_path / "s")


def test_a_folder_that_is_not_whole_is_refused(subject: Subject, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(subject.base, broken)
    (broken / "model.safetensors").unlink()
    with pytest.raises(ModelError):
        subject.make().restore(broken, None)


def test_not_finite_leaves_everything_as_it_was(subject: Subject, tmp_path: Path) -> None:
    trainer = subject.make_failing()
    trainer.restore(subject.base, None)
    trainer.update(subject.trajectories, critic_only=False)
    before = exported(trainer, tmp_path / "v-before")
    trainer.save_state(tmp_path / "s-before")
    with pytest.raises(UpdateNotFinite):
        trainer.update(subject.spoil(subject.trajectories), critic_only=False)
    trainer.save_state(tmp_path / "s-after")
    assert exported(trainer, tmp_path / "v-after").sha256 == before.sha256
    for file in (tmp_path / "s-before").iterdir():
        assert file.read_bytes() == (tmp_path / "s-after" / file.name).read_bytes(), file.name
    result = trainer.update(subject.trajectories, critic_only=False)
    assert result.kind is UpdateKind.POLICY
