"""The doctor: its limits at their edges, what it names, and the very tokens it compares."""

from __future__ import annotations

import asyncio
import importlib.util
import io
import json
import math
import os
import shutil
import sys
from collections import namedtuple
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from online_sao import doctor, wiring
from online_sao.config import Settings, load_settings
from online_sao.engines.launch import scripted_command
from online_sao.engines.scripted import ScriptedEngine
from online_sao.errors import ConfigError, EngineUnavailable
from online_sao.types import Message, Sampling, TrainingResult, Trajectory, UpdateKind

WELL = {"clip_ratio": 0.0, "log_ratio_abs_mean": 0.0}
MEASURED = {**WELL, "log_ratio_abs_max": 0.01, "kl_rollout": 1e-5}
GIB = 2**30
Usage = namedtuple("Usage", "total used free")


def made(tmp_path: Path, kind: str = "embedded") -> Settings:
    return load_settings(
        overrides={"service": {"data": tmp_path / "data"}, "engine": {"kind": kind}}, environ={}
    )


def with_free(monkeypatch: pytest.MonkeyPatch, gib: float) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(0, 0, int(gib * GIB)))


def without(monkeypatch: pytest.MonkeyPatch, *missing: str) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name in missing else find(name)
    )


# -- the verdict ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "clip", "log_ratio", "expected"),
    [
        ("BF16", 0.00099, 0.0499, [True, True]),
        ("BF16", 0.001, 0.0499, [False, True]),
        ("BF16", 0.00099, 0.05, [True, False]),
        ("F32", 0.00099, 0.00099, [True, True]),
        ("F32", 0.00099, 0.001, [True, False]),
        ("F32", 0.0, 0.0499, [True, False]),  # what bf16 may is far off in fp32
        ("F32", 0.54, 0.3, [False, False]),
        ("BF16", math.nan, math.inf, [False, False]),
        ("BF16", None, None, [False, False]),
    ],
)
def test_limits_are_0_1_percent_clipped_and_005_nats_in_bf16_or_0001_in_fp32(
    dtype: str, clip: float | None, log_ratio: float | None, expected: list[bool]
) -> None:
    findings = doctor.judge(dtype, {"clip_ratio": clip, "log_ratio_abs_mean": log_ratio})
    assert [finding.well for finding in findings] == expected


def test_verdict_says_the_number_and_its_limit() -> None:
    findings = doctor.judge("F32", {"clip_ratio": 0.25, "log_ratio_abs_mean": 0.0125})
    assert findings[0].detail.startswith("0.25000 ")
    assert "0.001" in findings[0].detail
    assert findings[1].detail.startswith("0.01250 ")
    assert "0.001" in findings[1].detail


# -- the machine ---------------------------------------------------------------------------------


def test_machine_names_the_packages_that_are_missing_and_how_to_get_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without(monkeypatch, "torch", "safetensors")
    (packages,) = [f for f in doctor.machine(made(tmp_path)) if "packages" in f.name]
    assert not packages.well
    assert "torch, safetensors" in packages.detail
    assert "transformers" not in packages.detail
    assert "pip install 'online-sao[learner]'" in packages.detail


@pytest.mark.parametrize(("gib", "well"), [(1.99, False), (2.0, True)])
def test_machine_needs_two_gib_of_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gib: float, well: bool
) -> None:
    with_free(monkeypatch, gib)
    (disk,) = [f for f in doctor.machine(made(tmp_path)) if f.name == "disk"]
    assert disk.well is well
    assert f"{gib:.1f} GiB" in disk.detail


# -- what is printed -----------------------------------------------------------------------------


def run(settings: Settings, *, as_json: bool) -> tuple[bool, str]:
    file = io.StringIO()
    well = doctor.run(settings, 4, as_json=as_json, console=Console(file=file, width=60))
    return well, file.getvalue()


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> dict[str, float | None]:
    """What the comparison gives; a test may change it."""
    numbers: dict[str, float | None] = {**WELL}

    async def compare(settings: Settings, replies: int) -> tuple[str, Mapping[str, float | None]]:
        assert replies == 4
        return "F32", numbers

    monkeypatch.setattr(doctor, "compare", compare)
    with_free(monkeypatch, 10)
    return numbers


def test_json_is_valid_and_says_what_was_measured(
    tmp_path: Path, measured: dict[str, float | None]
) -> None:
    well, printed = run(made(tmp_path), as_json=True)
    told = json.loads(printed)
    assert well
    assert told["well"] is True
    assert told["measured"] == WELL
    assert [f["well"] for f in told["findings"]] == [True] * 5
    measured["log_ratio_abs_mean"] = 0.5
    well, printed = run(made(tmp_path), as_json=True)
    told = json.loads(printed)
    assert not well
    assert told["well"] is False
    assert [f["name"] for f in told["findings"] if not f["well"]] == ["mean |log r|"]


def test_json_stays_valid_when_the_learner_computes_nan(
    tmp_path: Path, measured: dict[str, float | None]
) -> None:
    measured["clip_ratio"] = math.nan

    def no_constant(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    well, printed = run(made(tmp_path), as_json=True)
    told = json.loads(printed, parse_constant=no_constant)
    assert not well
    assert told["measured"] == {"clip_ratio": None, "log_ratio_abs_mean": 0.0}
    (clip,) = [f for f in told["findings"] if f["name"] == "clip ratio"]
    assert "nan" in clip["detail"]


def test_text_says_yes_or_no_to_each_finding_on_a_line_of_its_own(
    tmp_path: Path, measured: dict[str, float | None]
) -> None:
    measured["log_ratio_abs_mean"] = 0.5
    well, printed = run(made(tmp_path), as_json=False)
    lines = printed.splitlines()
    assert not well
    assert [line[:3] for line in lines[:-1]] == ["yes", "yes", "yes", "yes", "NO "]
    assert "0.50000" in lines[4]
    assert lines[-1] == "Something is not well."


def test_unfit_machine_is_told_what_to_install_and_nothing_is_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def compare(settings: Settings, replies: int) -> tuple[str, Mapping[str, float | None]]:
        raise AssertionError("there is nothing to compare with")

    monkeypatch.setattr(doctor, "compare", compare)
    with_free(monkeypatch, 10)
    without(monkeypatch, "torch")
    well, printed = run(made(tmp_path), as_json=False)
    assert not well
    assert "pip install 'online-sao[learner]'" in printed


# -- the comparison ------------------------------------------------------------------------------


class Scorer:
    """Stands where the learner's trainer stands, and remembers what it was given."""

    def __init__(self) -> None:
        self.restored: list[tuple[Path, Path | None]] = []
        self.trajectories: list[Trajectory] = []

    def restore(self, policy: Path, state: Path | None) -> str:
        self.restored.append((policy, state))
        return ""

    def update(self, trajectories: Sequence[Trajectory], *, critic_only: bool) -> TrainingResult:
        assert critic_only  # the policy is not to be moved
        self.trajectories += trajectories
        return TrainingResult(UpdateKind.CRITIC_ONLY, {**MEASURED, "value_loss": 0.5})


async def prepared(tmp_path: Path) -> Settings:
    await wiring.prepare_model(made(tmp_path, kind="scripted"))
    settings = made(tmp_path)
    doctor.machine(settings)  # makes the folders
    return settings


async def test_learner_scores_the_very_tokens_that_an_engine_on_the_newest_version_sampled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, scorer = await prepared(tmp_path), Scorer()
    started: list[Path] = []

    def command(
        settings: Settings, *, model: Path, version: int, port: int, threads: int
    ) -> list[str]:
        started.append(model)
        return scripted_command(settings, model, version, port, threads)

    monkeypatch.setattr(wiring, "engine_command", command)
    monkeypatch.setattr(wiring, "make_trainer", lambda _: scorer)
    dtype, measured = await doctor.compare(settings, 5)
    model = tmp_path / "data" / "model"
    assert (dtype, measured) == ("F32", MEASURED)
    assert started == [model]
    assert scorer.restored == [(model, None)]
    engine = ScriptedEngine()  # says the same in this process
    for number, trajectory in enumerate(scorer.trajectories):
        prompt = await engine.render([Message("user", doctor.QUESTIONS[number])])
        sampling = Sampling(seed=number, max_tokens=doctor.MAX_TOKENS)
        chunks = [c async for c in engine.generate(prompt, sampling, request_id=str(number))]
        p = len(prompt.token_ids)
        assert trajectory.token_ids[:p] == prompt.token_ids
        assert trajectory.token_ids[p:] == tuple(i for c in chunks for i in c.token_ids)
        assert trajectory.logprobs[p:] == tuple(x for c in chunks for x in c.logprobs)
        assert trajectory.temperature == 1.0
    assert len(scorer.trajectories) == 5


async def test_engine_other_than_the_embedded_one_is_not_compared(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"\[engine\] kind"):
        await doctor.compare(made(tmp_path, kind="scripted"), 4)


@pytest.mark.parametrize("rest", ["raise SystemExit(3)", "time.sleep(60)"])
async def test_engine_that_does_not_start_is_ended_and_its_log_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rest: str
) -> None:
    settings = await prepared(tmp_path)
    monkeypatch.setattr(doctor, "START_TIMEOUT_S", 1.0)
    pid_file = tmp_path / "pid"
    code = f"import os, time; open({str(pid_file)!r}, 'w').write(str(os.getpid())); {rest}"

    def command(settings: Settings, **_: Any) -> list[str]:
        return [sys.executable, "-c", code]

    monkeypatch.setattr(wiring, "engine_command", command)
    with pytest.raises(EngineUnavailable, match=r"doctor\.log"):
        await asyncio.wait_for(doctor.compare(settings, 4), 20)
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)


async def test_newest_version_is_compared_and_version_0_before_the_first_start(
    tmp_path: Path,
) -> None:
    settings = await prepared(tmp_path)
    await asyncio.to_thread(wiring.migrate, settings)
    assert await doctor._newest(settings) == tmp_path / "data" / "model"
    store = wiring.make_store(settings)
    await store.open()
    await store.add_base_version(str(tmp_path / "elsewhere"), "0" * 64)
    await store.aclose()
    assert await doctor._newest(settings) == tmp_path / "elsewhere"
