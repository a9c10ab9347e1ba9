"""What the runs say: two CSV files, a Markdown page, a figure for each table and task.

An arm is called higher or lower than `sao` when every one of its seeds lies above, or below,
every one of sao's; otherwise no difference was measured. By chance alone three seeds against three
do that in one comparison of ten.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from online_sao.ablation.arms import ARMS, TABLES
from online_sao.ablation.runner import Finished, finished
from online_sao.ablation.runs import Plan

REFERENCE = "sao"
LAST = 0.2
"""The share of a run's updates that its end is taken over."""
CURVES = (
    ("reward_mean", "reward"),
    ("explained_variance", "explained variance"),
    ("clip_ratio", "clip ratio"),
    ("outside_band", "share of ratios outside the band"),
    ("policy_grad_norm", "policy's gradient norm"),
    ("critic_grad_norm", "critic's gradient norm"),
)
_SMOOTH = 5
"""Updates in the moving average of the figures."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One run's numbers in the tables; None where an arm has no critic."""

    reward: float
    reward_all: float
    held_out: float
    explained_variance: float | None
    clip_ratio: float
    outside_band: float
    log_ratio: float
    policy_grad_norm: float | None
    """None where nothing ever pulled on the policy: no reward, no advantage, no step."""
    critic_grad_norm: float | None
    seconds: float

    @classmethod
    def of(cls, run: Finished) -> Measured:
        """`reward` and explained variance at the end of the run, the others over all of it."""
        end = run.updates[-max(1, round(LAST * len(run.updates))) :]
        return cls(
            reward=_known(mean(end, "reward_mean")),
            reward_all=_known(mean(run.updates, "reward_mean")),
            held_out=run.head["held_out"],
            explained_variance=mean(end, "explained_variance"),
            clip_ratio=_known(mean(run.updates, "clip_ratio")),
            outside_band=_known(mean(run.updates, "outside_band")),
            log_ratio=_known(mean(run.updates, "log_ratio_abs_mean")),
            policy_grad_norm=mean(run.updates, "policy_grad_norm"),
            critic_grad_norm=mean(run.updates, "critic_grad_norm"),
            seconds=run.head["seconds"],
        )


Runs = Mapping[tuple[str, str], Sequence[Finished]]
"""By task and arm, seed by seed."""


def collect(plans: Iterable[Plan], out: Path) -> dict[tuple[str, str], list[Finished]]:
    """The finished ones among the runs."""
    found: dict[tuple[str, str], list[Finished]] = {}
    for plan in plans:
        run = finished(out, plan)
        if run is not None:
            found.setdefault((plan.task, plan.arm), []).append(run)
    return found


def mean(records: Iterable[Mapping[str, Any]], name: str) -> float | None:
    """Over the records that have it; None when none does."""
    values = [record[name] for record in records if record.get(name) is not None]
    return sum(values) / len(values) if values else None


def verdict(ours: Sequence[float], reference: Sequence[float]) -> str:
    """`higher`, `lower`, or that no difference was measured (see the top of this file)."""
    if min(len(ours), len(reference)) < 2:
        return "too few seeds"
    if min(ours) > max(reference):
        return "higher"
    if max(ours) < min(reference):
        return "lower"
    return "no difference measured"


def write_report(runs: Runs, out: Path, heading: str) -> None:
    """Everything into `out`."""
    _write_csv(runs, out)
    (out / "report.md").write_text(markdown(runs, heading))
    _figures(runs, out)


def markdown(runs: Runs, heading: str) -> str:
    """The page: a table for each group of arms and task that has at least two of them."""
    lines = ["# SAO and what it is compared with", "", heading, ""]
    for title, task, present in _comparisons(runs):
        lines += [f"## {title}: `{task}`", "", *_table(runs, task, present), ""]
        lines += [f"![{title}, {task}]({_figure_name(title, task)})", ""]
    lines.append(
        "Mean over the seeds, in brackets the lowest and the highest. `reward` and `EV`: over "
        f"the last {LAST:.0%} of the updates; `over all`: reward over all of them; `held-out`: the "
        "final policy on fresh prompts; the others: over all updates. Against `sao`: higher or "
        "lower where every seed lies above or below every seed of sao's."
    )
    return "\n".join(lines) + "\n"


def _comparisons(runs: Runs) -> Iterator[tuple[str, str, list[str]]]:
    """Title, task and arms of every table that has at least two arms to compare."""
    for title, arms in TABLES.items():
        for task in dict.fromkeys(task for task, _ in runs):
            present = [arm for arm in arms if (task, arm) in runs]
            if len(present) > 1:
                yield title, task, present


def _table(runs: Runs, task: str, arms: Sequence[str]) -> list[str]:
    head = (
        "arm", "held-out", "against sao", "over all", "against sao", "reward", "EV",
        "clip ratio", "outside band", "gradient norm: policy", "critic", "s",
    )  # fmt: skip
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    reference = [Measured.of(run) for run in runs.get((task, REFERENCE), ())]
    for arm in arms:
        found = [Measured.of(run) for run in runs[task, arm]]
        held_out, over_all = [m.held_out for m in found], [m.reward_all for m in found]
        cells = (
            f"`{arm}`: {ARMS[arm].what}",
            spread(held_out),
            "" if arm == REFERENCE else verdict(held_out, [m.held_out for m in reference]),
            spread(over_all),
            "" if arm == REFERENCE else verdict(over_all, [m.reward_all for m in reference]),
            spread([m.reward for m in found]),
            spread([m.explained_variance for m in found]),
            spread([m.clip_ratio for m in found], 4),
            spread([m.outside_band for m in found], 4),
            spread([m.policy_grad_norm for m in found]),
            spread([m.critic_grad_norm for m in found]),
            f"{sum(m.seconds for m in found) / len(found):.0f}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def spread(values: Sequence[float | None], digits: int = 2) -> str:
    """`mean (lowest to highest)`; a dash where there are none."""
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    middle = f"{sum(known) / len(known):.{digits}f}"
    if len(known) == 1:
        return middle
    return f"{middle} ({min(known):.{digits}f} to {max(known):.{digits}f})"


def _write_csv(runs: Runs, out: Path) -> None:
    with (out / "results.csv").open("w", newline="") as file:
        every = [run for found in runs.values() for run in found]
        names = sorted({name for run in every for name in run.updates[0]})
        writer = csv.writer(file)
        writer.writerow(["task", "arm", "seed", "lag", *names])
        for (task, arm), found in runs.items():
            for run in found:
                plan = run.head["plan"]
                for record in run.updates:
                    values = [record.get(name) for name in names]
                    writer.writerow([task, arm, plan["seed"], plan["lag"], *values])
    fields = Measured.__dataclass_fields__
    with (out / "summary.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["task", "arm", "seed", "lag", "critic_only", "start", *fields])
        for (task, arm), found in runs.items():
            for run in found:
                plan, measured = run.head["plan"], Measured.of(run)
                values = [getattr(measured, name) for name in fields]
                start = [run.head["critic_only"], run.head["start"]]
                writer.writerow([task, arm, plan["seed"], plan["lag"], *start, *values])


def _figures(runs: Runs, out: Path) -> None:
    for title, task, present in _comparisons(runs):
        arms = {arm: runs[task, arm] for arm in present}
        _figure(arms, f"{title}: {task}", out / _figure_name(title, task))


def _figure_name(title: str, task: str) -> str:
    words = title.lower().partition(" (")[0].replace(" ", "_")
    return f"{task}_{words}.png"


def _figure(arms: Mapping[str, Sequence[Finished]], title: str, path: Path) -> None:
    """Six panels; a line is the mean over the seeds, its band from the lowest to the highest."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 7), layout="constrained")
    figure.suptitle(title)
    for axes, (name, label) in zip(figure.subplots(2, 3).flat, CURVES, strict=True):
        for arm, found in arms.items():
            curves = [c for run in found if (c := smooth([r[name] for r in run.updates]))]
            if not curves:
                continue
            length = min(map(len, curves))
            columns = [[curve[i] for curve in curves] for i in range(length)]
            (line,) = axes.plot([sum(c) / len(c) for c in columns], label=arm, linewidth=1.4)
            low, high = [min(c) for c in columns], [max(c) for c in columns]
            axes.fill_between(range(length), low, high, color=line.get_color(), alpha=0.12)
        axes.set_title(label, fontsize=10)
        axes.set_xlabel("policy updates", fontsize=8)
        if name.endswith("grad_norm") and any(max(line.get_ydata()) > 0 for line in axes.lines):
            axes.set_yscale("log")
        if name == "explained_variance":
            axes.set_ylim(-1.0, 1.0)
    figure.axes[0].legend(fontsize=8)
    figure.savefig(path, dpi=110)


def smooth(values: Sequence[float | None], window: int = _SMOOTH) -> list[float]:
    """Moving mean of the last `window` known values; [] where none is known."""
    known: list[float] = []
    smoothed = []
    for value in values:
        if value is not None:
            known.append(value)
        if known:
            recent = known[-window:]
            smoothed.append(sum(recent) / len(recent))
    return smoothed


def _known(value: float | None) -> float:
    if value is None:
        raise ValueError("a run without its numbers")
    return value
