"""Runs in files: done once, done again when the plan changed, none lost by another's failure."""

from __future__ import annotations

import io
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from rich.console import Console
from typer.testing import CliRunner

from online_sao import cli
from online_sao.ablation import runner
from online_sao.ablation.command import QUICK_UPDATES, Request, ablate
from online_sao.ablation.runner import finished, plans_for, run_all, run_file, write
from online_sao.ablation.runs import Outcome, Plan
from online_sao.ablation.tiny import TinyPolicy
from online_sao.errors import ConfigError

SMALL = TinyPolicy(width=32, layers=2, heads=2, steps=30, batch=8)
PLAN = Plan(
    task="single", arm="sao", seed=0, lag=1, updates=2, tiny=SMALL, batch=8, pool=4, held_out=8
)  # fmt: skip
RECORD = {"update": 0, "reward_mean": 0.5}


def outcome(plan: Plan) -> Outcome:
    return Outcome(plan, (RECORD, RECORD), critic_only=14, held_out=0.75, start=0.5)


def said(out: Path, plans: list[Plan]) -> tuple[dict[str, str], str]:
    text = io.StringIO()
    failed = run_all(plans, out, 2, Console(file=text, width=200))
    return failed, text.getvalue()


def test_a_finished_run_is_read_back_and_only_with_its_own_plan(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    write(tmp_path, outcome(PLAN), 1.5)
    run = finished(tmp_path, PLAN)
    assert run is not None
    assert (run.head["held_out"], run.head["seconds"], run.updates) == (0.75, 1.5, (RECORD,) * 2)
    assert finished(tmp_path, replace(PLAN, updates=3)) is None
    assert [path.name for path in (tmp_path / "runs").iterdir()] == [f"{PLAN.name}.jsonl"]


def test_what_is_done_is_not_done_again_and_a_changed_plan_is(tmp_path: Path) -> None:
    other = replace(PLAN, arm="grpo")
    (tmp_path / "runs").mkdir()
    write(tmp_path, outcome(PLAN), 1.5)
    stale = replace(other, updates=9)
    write(tmp_path, replace(outcome(stale), plan=stale), 1.5)
    kept = run_file(tmp_path, PLAN).read_bytes()
    failed, text = said(tmp_path, [PLAN, other])
    assert failed == {}
    assert "2 runs, 1 of them done before, 1 to do again because their plan changed" in text
    assert run_file(tmp_path, PLAN).read_bytes() == kept
    run = finished(tmp_path, other)
    assert run is not None
    assert len(run.updates) == 2
    assert "2 of them done before" in said(tmp_path, [PLAN, other])[1]


def test_a_run_that_fails_is_named_and_the_others_are_kept(tmp_path: Path) -> None:
    broken = replace(PLAN, batch=9, arm="grpo")  # nine replies are no whole groups of eight
    failed, text = said(tmp_path, [broken, PLAN])
    assert list(failed) == [broken.name]
    assert "LearnerError: a group is 8 replies" in failed[broken.name]
    assert f"{broken.name} failed" in text
    assert finished(tmp_path, PLAN) is not None


def test_seeds_come_one_after_the_other_so_that_a_stopped_comparison_has_all_arms() -> None:
    plans = plans_for(["tools", "single"], ["sao", "vapo"], 2, lag=4, updates=1, tiny=SMALL)
    assert [(p.seed, p.task, p.arm) for p in plans][:5] == [
        (0, "tools", "sao"),
        (0, "tools", "vapo"),
        (0, "single", "sao"),
        (0, "single", "vapo"),
        (1, "tools", "sao"),
    ]


def request(out: Path, **changes: object) -> Request:
    asked = Request(
        task="single", arms="sao,grpo", lag=1, seeds=1, updates=2, quick=False, out=out, jobs=2,
        report_only=False, tiny=SMALL,
    )  # fmt: skip
    return replace(asked, **changes)


def test_the_whole_command_on_a_small_scale_and_its_report_again(tmp_path: Path) -> None:
    text = io.StringIO()
    console = Console(file=text, width=200)
    assert ablate(request(tmp_path), console)
    names = {path.name for path in tmp_path.iterdir()}
    assert {"report.md", "results.csv", "summary.csv", "single_methods.png"} <= names
    assert (tmp_path / "results.csv").read_text().count("\n") == 1 + 2 * 2
    before = (tmp_path / "report.md").read_text()
    (tmp_path / "report.md").unlink()
    assert ablate(request(tmp_path, report_only=True), console)
    assert (tmp_path / "report.md").read_text() == before


def test_quick_is_five_arms_and_fewer_updates(tmp_path: Path) -> None:
    plans = request(tmp_path, arms="all", quick=True, updates=None, task="both", seeds=3).plans()
    assert {plan.updates for plan in plans} == {QUICK_UPDATES}
    assert len(plans) == 5 * 3 * 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"arms": "sao,sarsa"}, "there is no arm 'sarsa'; there are sao, grpo"),
        ({"task": "chess"}, "there is no task 'chess'; there are tools, single, both"),
        ({"report_only": True}, "holds no finished run"),
    ],
)
def test_what_cannot_be_done_is_said(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        ablate(request(tmp_path, **changes), Console(file=io.StringIO()))


def test_without_matplotlib_it_says_so_before_hours_of_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"online-sao\[ablate\]"):
        ablate(request(tmp_path), Console(file=io.StringIO()))
    assert not (tmp_path / runner.RUNS).exists()


def test_the_command_line_names_a_wrong_arm(tmp_path: Path) -> None:
    found = CliRunner().invoke(cli.app, ["ablate", "--arms", "sarsa", "--out", str(tmp_path)])
    assert found.exit_code == 1
    assert "there is no arm 'sarsa'" in found.stderr


def test_workers_end_with_their_parent_however_it_ends(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "online_sao", "ablate", "--task", "single", "--arms", "sao"]
    parent = subprocess.Popen(
        [*command, "--jobs", "1", "--updates", "1", "--seeds", "1", "--out", str(tmp_path)],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        workers: list[psutil.Process] = []
        while not (tmp_path / runner.POLICIES).exists():  # a worker has begun to teach
            assert parent.poll() is None
            workers = psutil.Process(parent.pid).children(recursive=True)
            time.sleep(0.1)
    finally:
        parent.kill()
        parent.wait()
    assert workers
    _, alive = psutil.wait_procs(workers, timeout=20)
    assert not alive


def test_a_damaged_file_is_a_run_that_is_not_done(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    for damaged in ("", "{", "[]\n", "{}\n"):
        run_file(tmp_path, PLAN).write_text(damaged)
        assert finished(tmp_path, PLAN) is None


def test_a_worker_s_death_loses_no_run(tmp_path: Path) -> None:
    """Killed in the middle of a run: it and the others are done all the same."""
    plans = [replace(PLAN, updates=60), replace(PLAN, arm="grpo"), replace(PLAN, seed=1)]
    text = io.StringIO()
    killed: list[int] = []

    def kill_one() -> None:
        policies, me = tmp_path / runner.POLICIES, psutil.Process()
        while not killed:
            time.sleep(0.05)
            taught = list(policies.glob("single-*/manifest.json")) if policies.exists() else []
            workers = [c for c in me.children() if "spawn_main" in " ".join(c.cmdline())]
            if taught and workers:
                killed.append(workers[0].pid)
                workers[0].kill()

    thread = threading.Thread(target=kill_one)
    thread.start()
    failed = run_all(plans, tmp_path, 2, Console(file=text, width=200))
    thread.join()
    assert failed == {}
    assert "begin again" in text.getvalue()
    assert all(finished(tmp_path, plan) for plan in plans)
