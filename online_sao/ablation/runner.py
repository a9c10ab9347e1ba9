"""All runs of a comparison: side by side, each in a file of its own, never done twice.

    <out>/policies/           the warm-started policies
    <out>/runs/<name>.jsonl   a finished run: a head, then a line per update

A run's file appears whole or not at all, and carries the digest of its plan: the same command goes
on where it was stopped, and a plan that changed is run again.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from online_sao.ablation.runs import Outcome, Plan, Record, run
from online_sao.ablation.tasks import TASKS
from online_sao.ablation.tiny import TinyPolicy, is_prepared, prepare

POLICIES, RUNS = "policies", "runs"
_TICK_S = 0.2


@dataclass(frozen=True, slots=True)
class Finished:
    """A run as its file tells it."""

    head: Mapping[str, Any]
    updates: tuple[Record, ...]


def run_file(out: Path, plan: Plan) -> Path:
    """Where the run's file stands."""
    return out / RUNS / f"{plan.name}.jsonl"


def finished(out: Path, plan: Plan) -> Finished | None:
    """The run, if it was done with this very plan."""
    path = run_file(out, plan)
    if not path.exists():
        return None
    try:
        head, *updates = map(json.loads, path.read_text().splitlines())
        return Finished(head, tuple(updates)) if head["digest"] == plan.digest else None
    except (ValueError, KeyError, TypeError):  # not ours, or damaged: it is done again
        return None


def write(out: Path, outcome: Outcome, seconds: float) -> None:
    """The run's file, whole or not at all."""
    plan = outcome.plan
    head = {
        "digest": plan.digest,
        "plan": asdict(plan),
        "critic_only": outcome.critic_only,
        "start": outcome.start,
        "held_out": outcome.held_out,
        "seconds": seconds,
    }
    path = run_file(out, plan)
    aside = path.with_suffix(f".{os.getpid()}")
    with aside.open("w") as file:
        file.writelines(json.dumps(line) + "\n" for line in (head, *outcome.updates))
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)


def run_all(plans: Sequence[Plan], out: Path, jobs: int, console: Console) -> dict[str, str]:
    """Do what is not done yet, `jobs` at a time; returns each failed run's reason."""
    (out / RUNS).mkdir(parents=True, exist_ok=True)
    missing = [plan for plan in plans if finished(out, plan) is None]
    again = sum(run_file(out, plan).exists() for plan in missing)
    console.print(
        f"{len(plans)} runs, {len(plans) - len(missing)} of them done before"
        + (f", {again} to do again because their plan changed" if again else "")
    )
    if not missing:
        return {}
    with _bars(console) as bars, _Crew(jobs, bars) as crew:
        lessons = dict.fromkeys((plan.task, plan.tiny) for plan in missing)
        taught = [
            _Work(f"warm start: {task}", tiny.steps, _teach, (out, task, tiny))
            for task, tiny in lessons
            if not is_prepared(tiny, TASKS[task], out / POLICIES)
        ]
        failed = crew.do(taught)
        if failed:
            return failed
        runs = [_Work(plan.name, plan.updates, _run, (out, plan)) for plan in missing]
        return crew.do(runs)


@dataclass(frozen=True, slots=True)
class _Work:
    """A piece of work for one process."""

    name: str
    steps: int
    do: Callable[..., None]
    arguments: tuple[Any, ...]


class _Crew:
    """Worker processes of one thread each, and the bar that shows what they have done."""

    def __init__(self, jobs: int, bars: Progress) -> None:
        self._jobs = jobs
        self._bars = bars
        self._context = multiprocessing.get_context("spawn")
        self._steps = self._context.SimpleQueue()
        self._pool = self._new_pool()

    def _new_pool(self) -> ProcessPoolExecutor:
        return ProcessPoolExecutor(
            self._jobs, mp_context=self._context, initializer=_begin, initargs=(self._steps,)
        )

    def __enter__(self) -> _Crew:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        processes = list((self._pool._processes or {}).values())
        self._pool.shutdown(wait=kind is None, cancel_futures=True)
        if kind is not None:  # stopped: what is half done is done again another time
            for process in processes:
                process.terminate()

    def do(self, works: Sequence[_Work]) -> dict[str, str]:
        """All of it; returns the reasons of what failed, by name.

        A worker that dies takes the pool with it; what was not done is tried once more.
        """
        bar = self._bars.add_task("", total=sum(work.steps for work in works), runs="")
        failed, lost = self._attempt(works, bar)
        if lost:
            self._bars.console.print(f"a worker died; {len(lost)} pieces of work begin again")
            self._pool = self._new_pool()
            failed_again, lost = self._attempt(lost, bar)
            failed |= failed_again
        return failed | {work.name: "a worker process died twice (out of memory?)" for work in lost}

    def _attempt(self, works: Sequence[_Work], bar: Any) -> tuple[dict[str, str], list[_Work]]:
        """What failed, and what was lost with a worker."""
        failed: dict[str, str] = {}
        lost: list[_Work] = []
        submitted: dict[Future[None], _Work] = {}
        for work in works:
            try:
                submitted[self._pool.submit(work.do, *work.arguments)] = work
            except BrokenProcessPool:
                lost.append(work)
        pending = set(submitted)
        while pending:
            done, pending = wait(pending, _TICK_S, FIRST_COMPLETED)
            self._show(bar, len(submitted) - len(pending), len(works))
            for future in done:
                error = future.exception()
                if isinstance(error, BrokenProcessPool):
                    lost.append(submitted[future])
                elif error is not None:
                    name, reason = submitted[future].name, f"{type(error).__name__}: {error}"
                    failed[name] = reason
                    self._bars.console.print(f"{name} failed: {reason}")
        self._show(bar, len(submitted), len(works))
        return failed, lost

    def _show(self, bar: Any, done: int, total: int) -> None:
        while not self._steps.empty():
            self._steps.get()
            self._bars.advance(bar)
        self._bars.update(bar, runs=f"{done}/{total}")


def _bars(console: Console) -> Progress:
    return Progress(
        TextColumn("done {task.fields[runs]}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("steps, left:"),
        TimeRemainingColumn(),
        console=console,
    )


# -- in the worker processes ----------------------------------------------------------------------

_steps: Any = None
"""Where this process tells its steps."""


def _begin(steps: Any) -> None:
    import torch
    from transformers.utils import logging as transformers_logging

    global _steps
    _steps = steps
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    logging.getLogger().setLevel(logging.WARNING)
    transformers_logging.disable_progress_bar()


def _tell_step(_done: int, _total: int) -> None:
    _steps.put(1)


def _end_with_parent() -> None:
    """However the parent ends: a worker that nobody hears any more must not stay."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _teach(out: Path, task: str, tiny: TinyPolicy) -> None:
    (out / POLICIES).mkdir(parents=True, exist_ok=True)
    prepare(tiny, TASKS[task], out / POLICIES, _tell_step)


def _run(out: Path, plan: Plan) -> None:
    begin = time.monotonic()
    folder = prepare(plan.tiny, TASKS[plan.task], out / POLICIES)
    write(out, run(plan, folder, _tell_step), time.monotonic() - begin)


def plans_for(tasks: Iterable[str], arms: Iterable[str], seeds: int, **shared: Any) -> list[Plan]:
    """Every arm and seed on every task; seed by seed, so that a stopped comparison has all arms."""
    arms = list(arms)
    return [
        Plan(task=task, arm=arm, seed=seed, **shared)
        for seed in range(seeds)
        for task in tasks
        for arm in arms
    ]
