"""The first adaptation: a real model behind a real service learns to answer briefly.

Starts `online-sao up` in a temporary data folder with the shipped rubric `brief` (a finished
answer of at most 40 words earns 1, anything else 0) and sends it varied everyday requests over
HTTP until enough updates are done. Prints the mean reward of all replies judged between one
update and the next, writes a plot, and ends with `RESULT {json}`.

    python benchmarks/first_adaptation.py --plot docs/first_adaptation.png
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from online_sao import wiring
from online_sao.config import Settings, load_settings
from online_sao.interfaces import Store
from online_sao.running import RunningService
from online_sao.types import LedgerState, Update, UpdateKind, VersionState

REQUESTS = Path(__file__).parent / "data" / "everyday_requests.txt"
SHOWN = (
    "reward_mean_judged", "reward_mean", "explained_variance", "clip_ratio", "kl_start", "entropy",
    "reply_tokens_mean", "lag_mean",
)  # fmt: skip
COLUMNS = (
    TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"),
    TextColumn("reward {task.fields[reward]}"), TimeElapsedColumn(), TimeRemainingColumn(),
)  # fmt: skip
console = Console(stderr=True)


@dataclass
class Traffic:
    """What the clients saw."""

    statuses: Counter[str] = field(default_factory=Counter)
    latencies: list[float] = field(default_factory=list)

    @property
    def failed(self) -> int:
        return sum(count for status, count in self.statuses.items() if not status.startswith("2"))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a handful of updates, to see it run")
    parser.add_argument("--updates", type=int, default=40, help="policy updates (default 40)")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--warmup", type=int, default=4, help="critic-only updates before them")
    parser.add_argument("--policy-lr", type=float, default=7e-5)
    parser.add_argument("--kl-coef", type=float, default=0.03)
    parser.add_argument("--loss-mean", choices=("token", "trajectory"), default="trajectory")
    parser.add_argument("--clients", type=int, default=16, help="chats at once")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data", type=Path, help="keep the data folder here")
    parser.add_argument("--plot", type=Path, default=Path("first_adaptation.png"))
    options = parser.parse_args()
    if options.quick:
        options.updates, options.warmup, options.batch_size = 3, 1, 8
    return options


def service_environment(options: argparse.Namespace) -> dict[str, str]:
    return {
        "ONLINE_SAO_PRESET": "online",
        "ONLINE_SAO_JUDGING__RUBRIC": "brief",
        "ONLINE_SAO_LEARNER__BATCH_SIZE": str(options.batch_size),
        "ONLINE_SAO_LEARNER__POLICY_LR": str(options.policy_lr),
        "ONLINE_SAO_ALGORITHM__KL_COEF": str(options.kl_coef),
        "ONLINE_SAO_ALGORITHM__LOSS_MEAN": options.loss_mean,
        "ONLINE_SAO_ALGORITHM__VALUE_WARMUP_UPDATES": str(options.warmup),
    }


async def client(
    http: httpx.AsyncClient, requests: list[str], rng: random.Random, options: argparse.Namespace,
    traffic: Traffic, may_send: asyncio.Event, stop: asyncio.Event,
) -> None:  # fmt: skip
    while not stop.is_set():
        await may_send.wait()
        body = {
            "model": "online-sao",
            "messages": [{"role": "user", "content": rng.choice(requests)}],
            "max_tokens": options.max_tokens,
            "temperature": 1.0,
        }
        started = time.monotonic()
        try:
            response = await http.post("/v1/chat/completions", json=body)
            traffic.statuses[str(response.status_code)] += 1
        except httpx.HTTPError as error:
            traffic.statuses[type(error).__name__] += 1
            await asyncio.sleep(0.5)
        traffic.latencies.append(time.monotonic() - started)


async def watch(
    store: Store, options: argparse.Namespace, may_send: asyncio.Event, progress: Progress
) -> list[Update]:
    """Follow the updates; hold the clients back while a whole batch already waits."""
    task = progress.add_task("updates", total=options.updates, reward="-")
    seen: set[str] = set()
    policy_updates: list[Update] = []
    while len(policy_updates) < options.updates:
        for update in reversed(await store.list_updates(limit=20)):
            if update.id in seen:
                continue
            seen.add(update.id)
            if update.kind is UpdateKind.POLICY:
                policy_updates.append(update)
            reward = number(update.metrics.get("reward_mean_judged"))
            progress.update(task, completed=len(policy_updates), reward=reward)
            progress.console.print(describe(update))
        waiting = (await store.ledger()).counts.get(LedgerState.JUDGED, 0)
        if waiting >= options.batch_size:
            may_send.clear()
        else:
            may_send.set()
        await asyncio.sleep(0.5)
    return policy_updates[: options.updates]


def describe(update: Update) -> str:
    shown = [f"{name} {number(update.metrics.get(name))}" for name in SHOWN]
    return "  ".join([f"{update.kind:12} version {update.version}", *shown])


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


async def drive(
    service: RunningService, settings: Settings, options: argparse.Namespace, progress: Progress
) -> tuple[list[Update], Traffic]:
    requests = [line.strip() for line in REQUESTS.read_text().splitlines() if line.strip()]
    store = wiring.make_store(settings)
    await store.open()
    traffic, stop, may_send = Traffic(), asyncio.Event(), asyncio.Event()
    rng = random.Random(options.seed)
    limits = httpx.Limits(max_connections=None)
    try:
        async with httpx.AsyncClient(
            base_url=service.url, headers=service.headers, timeout=600, limits=limits
        ) as http:
            clients = [
                asyncio.create_task(client(http, requests, rng, options, traffic, may_send, stop))
                for _ in range(options.clients)
            ]
            updates = await watch(store, options, may_send, progress)
            stop.set()
            may_send.set()
            await asyncio.gather(*clients)
    finally:
        await store.aclose()
    return updates, traffic


async def read_end(settings: Settings) -> dict[str, Any]:
    """The ledger and the versions after a clean stop."""
    store = wiring.make_store(settings)
    await store.open()
    try:
        book = await store.ledger()
        served = [
            v for v in await store.list_versions()
            if v.state in (VersionState.LIVE, VersionState.RETIRED)
        ]  # fmt: skip
    finally:
        await store.aclose()
    for problem in book.problems:
        console.print(f"[red]ledger: {problem}")
    return {"ledger_ok": book.adds_up, "requests": book.requests, "versions_served": len(served)}


def rewards_of(updates: list[Update]) -> list[float | None]:
    """Mean reward of all replies judged since the update before; None where there were none."""
    return [update.metrics["reward_mean_judged"] for update in updates]


def mean(rewards: list[float] | list[float | None]) -> float:
    """Over the updates between which anything was judged."""
    known = [r for r in rewards if r is not None and not math.isnan(r)]
    return sum(known) / len(known) if known else math.nan


def plot(updates: list[Update], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rewards = [math.nan if r is None else r for r in rewards_of(updates)]
    smooth = [mean(rewards[max(0, i - 4) : i + 1]) for i in range(len(rewards))]
    figure, axes = pyplot.subplots(figsize=(7.5, 3.6), dpi=120)
    axes.plot(
        range(1, len(rewards) + 1), rewards, ".", color="#7a9cc6", label="between two updates"
    )
    axes.plot(range(1, len(smooth) + 1), smooth, color="#1f4e8c", label="mean of five")
    axes.set(xlabel="policy update", ylabel="mean reward of all judged replies", ylim=(0, 1))
    axes.set_title("First adaptation: finished answers of at most 40 words earn 1")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    console.print(f"plot: {path}")


def main() -> None:
    options = arguments()
    with tempfile.TemporaryDirectory(prefix="first-adaptation-") as scratch:
        data = options.data or Path(scratch) / "data"
        environment = service_environment(options)
        settings = load_settings(None, {"service": {"data": data}}, environ=environment)
        started = time.monotonic()
        service = RunningService(data, env=environment, start_timeout_s=600)
        console.print(f"starting the service on {data}")
        with service, Progress(*COLUMNS, console=console) as progress:
            updates, traffic = asyncio.run(drive(service, settings, options, progress))
        end = asyncio.run(read_end(settings))
    rewards = rewards_of(updates)
    plot(updates, options.plot)
    for count, reward in enumerate(rewards, 1):
        console.print(f"update {count:3}  reward {number(reward)}")
    result = {
        "reward_first5": round(mean(rewards[:5]), 4),
        "reward_last5": round(mean(rewards[-5:]), 4),
        "updates": len(updates),
        "versions_served": end["versions_served"],
        "failed_requests": traffic.failed,
        "ledger_ok": end["ledger_ok"],
        "requests": end["requests"],
        "statuses": dict(traffic.statuses),
        "seconds": round(time.monotonic() - started, 1),
    }
    print("RESULT " + json.dumps(result))
    sys.exit(0 if end["ledger_ok"] and traffic.failed == 0 else 1)


if __name__ == "__main__":
    main()
