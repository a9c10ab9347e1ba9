"""The report's numbers, from runs made up by hand."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest

from online_sao.ablation.report import (
    Measured,
    collect,
    markdown,
    mean,
    smooth,
    spread,
    verdict,
    write_report,
)
from online_sao.ablation.runner import Finished


def made(seed: int, rewards: list[float], held_out: float, *, critic: bool = True) -> Finished:
    updates: list[dict[str, Any]] = [
        {
            "update": i, "reward_mean": r, "explained_variance": 0.5 if critic and i else None,
            "clip_ratio": 0.01 * i, "outside_band": 0.02, "log_ratio_abs_mean": 0.1,
            "policy_grad_norm": 1.0 + i, "critic_grad_norm": 2.0 if critic else None,
        }
        for i, r in enumerate(rewards)
    ]  # fmt: skip
    head = {
        "held_out": held_out, "seconds": 10.0 + seed, "critic_only": 14, "start": 0.4,
        "plan": {"seed": seed, "lag": 4},
    }  # fmt: skip
    return Finished(head, tuple(updates))


RUNS = {
    ("tools", "sao"): [made(0, [0.0] * 4 + [0.8], 0.9), made(1, [0.0] * 4 + [0.6], 0.8)],
    ("tools", "sao_unmasked"): [made(0, [0.5] * 5, 0.1), made(1, [0.5] * 5, 0.3)],
    ("tools", "grpo"): [
        made(0, [0.5] * 5, 0.85, critic=False),
        made(1, [0.5] * 5, 0.7, critic=False),
    ],
}


def test_the_end_of_a_run_is_its_last_fifth() -> None:
    measured = Measured.of(made(0, [0.0] * 8 + [0.5, 1.0], 0.9))
    assert measured.reward == 0.75
    assert measured.clip_ratio == pytest.approx(0.045)  # over all: mean of 0 to 0.09
    assert measured.policy_grad_norm == 5.5
    assert measured.critic_grad_norm == 2.0
    assert Measured.of(made(0, [0.5] * 5, 0.9, critic=False)).explained_variance is None


@pytest.mark.parametrize(
    ("ours", "want"),
    [
        ([0.91, 0.95], "higher"),
        ([0.1, 0.79], "lower"),
        ([0.9, 0.95], "no difference measured"),  # 0.9 is not above 0.9
        ([0.85, 0.7], "no difference measured"),
        ([0.1], "too few seeds"),
    ],
)
def test_a_difference_is_one_that_no_seed_gainsays(ours: list[float], want: str) -> None:
    assert verdict(ours, [0.9, 0.8]) == want


def test_the_table_by_hand() -> None:
    page = markdown(RUNS, "Lag 4.")
    assert "## The mask: `tools`" in page
    assert "## Methods (the paper's table 3): `tools`" in page
    assert "What is an action" not in page  # of its arms only sao was run
    (row,) = [line for line in page.splitlines() if line.startswith("| `sao_unmasked`")]
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[1:3] == ["0.20 (0.10 to 0.30)", "lower"]
    assert cells[3:6] == ["0.50 (0.50 to 0.50)", "higher", "0.50 (0.50 to 0.50)"]
    assert cells[6:8] == ["0.50 (0.50 to 0.50)", "0.0200 (0.0200 to 0.0200)"]
    (row,) = [line for line in page.splitlines() if line.startswith("| `grpo`")]
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert (cells[2], cells[6], cells[10]) == ("no difference measured", "-", "-")
    (row, _) = [line for line in page.splitlines() if line.startswith("| `sao`")]
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[1:4] == ["0.85 (0.80 to 0.90)", "", "0.14 (0.12 to 0.16)"]
    assert cells[5] == "0.70 (0.60 to 0.80)"
    assert cells[11] == "10"


def test_the_files_hold_every_update_and_every_run(tmp_path: Path) -> None:
    write_report(RUNS, tmp_path, "Lag 4.")
    rows = list(csv.DictReader((tmp_path / "results.csv").read_text().splitlines()))
    assert len(rows) == 3 * 2 * 5
    assert (rows[4]["arm"], rows[4]["seed"], rows[4]["reward_mean"]) == ("sao", "0", "0.8")
    summary = list(csv.DictReader((tmp_path / "summary.csv").read_text().splitlines()))
    assert [row["held_out"] for row in summary] == ["0.9", "0.8", "0.1", "0.3", "0.85", "0.7"]
    assert (summary[5]["explained_variance"], summary[5]["critic_only"]) == ("", "14")
    for figure in ("tools_methods.png", "tools_the_mask.png"):
        assert (tmp_path / figure).stat().st_size > 10_000
        assert figure in (tmp_path / "report.md").read_text()


def test_means_leave_out_what_is_not_known() -> None:
    assert mean([{"a": 1.0}, {"a": None}, {}, {"a": 3.0}], "a") == 2.0
    assert mean([{"a": None}], "a") is None
    assert spread([1.0, None, 2.0]) == "1.50 (1.00 to 2.00)"
    assert spread([None]) == "-"
    assert smooth([None, 1.0, None, 3.0], 2) == [1.0, 1.0, 2.0]
    assert collect([], Path("nowhere")) == {}
