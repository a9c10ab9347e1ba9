"""`online-sao ablate`: which runs, where, and what is said at the end."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.markdown import Markdown

from online_sao.ablation.arms import ARMS, QUICK
from online_sao.ablation.report import collect, write_report
from online_sao.ablation.runner import plans_for, run_all
from online_sao.ablation.runs import Plan
from online_sao.ablation.tasks import TASKS
from online_sao.ablation.tiny import TinyPolicy
from online_sao.errors import ConfigError

UPDATES, QUICK_UPDATES = 60, 40


@dataclass(frozen=True, slots=True)
class Request:
    """What was asked on the command line."""

    task: str
    arms: str
    lag: int
    seeds: int
    updates: int | None
    quick: bool
    out: Path
    jobs: int
    report_only: bool
    tiny: TinyPolicy = field(default_factory=TinyPolicy)

    def plans(self) -> list[Plan]:
        """The runs. Raises ConfigError for a task or an arm that there is not."""
        tasks = list(TASKS) if self.task == "both" else [self.task]
        named = self.named_arms()
        _check("task", tasks, [*TASKS, "both"])
        _check("arm", named, list(ARMS))
        updates = self.updates or (QUICK_UPDATES if self.quick else UPDATES)
        return plans_for(tasks, named, self.seeds, lag=self.lag, updates=updates, tiny=self.tiny)

    def named_arms(self) -> tuple[str, ...]:
        """The arms, whether they exist or not."""
        if self.arms != "all":
            return tuple(dict.fromkeys(name.strip() for name in self.arms.split(",")))
        return QUICK if self.quick else tuple(ARMS)

    def heading(self, plans: Sequence[Plan]) -> str:
        """The settings of all runs, in a sentence."""
        plan = plans[0]
        return (
            f"`online-sao ablate --task {self.task} --arms {','.join(self.named_arms())} "
            f"--lag {plan.lag} --seeds {self.seeds} --updates {plan.updates}`. "
            f"Lag {plan.lag}, {self.seeds} seeds, {plan.updates} policy updates of {plan.batch} "
            f"trajectories, prompts from a pool of {plan.pool}; policy's rate {plan.policy_lr:g}, "
            f"critic's {plan.critic_lr:g}, the same for all arms."
        )


def ablate(request: Request, console: Console) -> bool:
    """Do the runs that are missing, write the report, show it; False when a run failed.

    Raises ConfigError for what cannot be run, KeyboardInterrupt when it is stopped: the same
    request then goes on where it was.
    """
    plans = request.plans()
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("the figures need matplotlib: pip install 'online-sao[ablate]'")
    failed: dict[str, str] = {}
    if not request.report_only:
        failed = run_all(plans, request.out, request.jobs, console)
    runs = collect(plans, request.out)
    if not runs:
        raise ConfigError(f"{request.out} holds no finished run of this comparison")
    write_report(runs, request.out, request.heading(plans))
    console.print(Markdown((request.out / "report.md").read_text()))
    console.print(f"report, CSV files and figures: {request.out.resolve()}")
    for name, reason in failed.items():
        console.print(f"failed: {name}: {reason}")
    return not failed


def _check(what: str, given: Sequence[str], known: Sequence[str]) -> None:
    for name in given:
        if name not in known:
            raise ConfigError(f"there is no {what} {name!r}; there are {', '.join(known)}")
