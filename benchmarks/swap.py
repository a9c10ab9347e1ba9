"""How long a stream stands still while new weights come in.

Four streams on the real model; versions are swapped in while they run, by the service's own
client (read, check, pause, exchange, prove, resume; the streams' keys and values are computed
anew). A stall is the longest gap between two tokens of a stream around a swap.

- `stall_s`: the longest stall over all swaps; `stall_p50_s`: the median swap's.
- `stall_over_load`: the median swap's stall over what the engine needs without traffic to load a
  version and to prefill four sequences of the streams' mean length.

    python benchmarks/swap.py --quick
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import shutil
import statistics
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import httpx
from engine_process import engine_process, model_folder
from rich.console import Console
from rich.progress import Progress

from online_sao.engines.client import HttpEngine
from online_sao.manifest import Manifest
from online_sao.types import (
    PolicyVersion,
    ProbeTokens,
    RenderedPrompt,
    Sampling,
    VersionState,
)

console = Console(stderr=True)
STREAMS = 4
PROMPT_TOKENS, REPLY_TOKENS = 60, 300
REST_S = 1.5
"""Between two swaps."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="3 swaps instead of 12")
    parser.add_argument("--model", type=Path, help="a prepared folder; else it is made (30 s)")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--dtype", default="auto", choices=["auto", "bfloat16", "float32"])
    args = parser.parse_args()
    args.swaps = 3 if args.quick else 12
    return args


@dataclass
class Stream:
    """One endless reply after the other, with the time of every chunk."""

    engine: HttpEngine
    number: int
    times: list[float] = field(default_factory=list)

    async def run(self, stop: asyncio.Event) -> None:
        prompt = RenderedPrompt(tuple(1000 + 97 * i + self.number for i in range(PROMPT_TOKENS)))
        for turn in itertools.count():
            # An end token that cannot come keeps the streams alive; no swap may fall between two.
            sampling = Sampling(
                seed=turn, max_tokens=REPLY_TOKENS, logit_bias=((2, -100.0), (0, -100.0))
            )
            replies = self.engine.generate(prompt, sampling, request_id=f"s{self.number}-{turn}")
            try:
                async for _chunk in replies:
                    self.times.append(time.perf_counter())
                    if stop.is_set():
                        return
            finally:
                await replies.aclose()

    def longest_gap(self, since: float, until: float) -> float:
        pairs = itertools.pairwise(self.times)
        return max((b - a for a, b in pairs if b > since and a < until), default=0.0)


def other_version(base: Path, folder: Path) -> None:
    """The same model with its last norm scaled a little, and the probe tokens that go with it."""
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    shutil.copytree(base, folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"] * 1.02
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    ids = Manifest.read(base).probes.token_ids
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    scores = logits.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
    manifest = Manifest.describe(folder, ProbeTokens(ids, tuple(scores)))
    (folder / "manifest.json").write_text(manifest.to_json())


def version(number: int, folder: Path) -> PolicyVersion:
    sha256 = Manifest.read(folder).sha256
    return PolicyVersion(number, None, str(folder), sha256, VersionState.STABLE, datetime.now(UTC))


async def load_alone(url: str, engine: HttpEngine, folders: list[Path]) -> float:
    """Seconds of the engine's own work for one version, without traffic (median of 3)."""
    times = []
    async with httpx.AsyncClient(base_url=url, timeout=120, trust_env=False) as client:
        for turn in range(3):
            new = version(100 + turn, folders[(turn + 1) % 2])
            info = {"update_info": {"path": new.path, "version": new.number, "sha256": new.sha256}}
            began = time.perf_counter()
            for path, body in (
                ("/start_weight_update", info),
                ("/pause?mode=keep", None),
                ("/update_weights", info),
                ("/finish_weight_update", {"weight_version": str(new.number)}),
                ("/resume", None),
            ):
                (await client.post(path, json=body)).raise_for_status()
            times.append(time.perf_counter() - began)
    return statistics.median(times)


async def prefill_alone(engine: HttpEngine, lengths: list[int]) -> float:
    """Seconds until sequences of these lengths, sent at once, each have one token (median of 3)."""

    async def first(length: int, turn: int) -> None:
        prompt = RenderedPrompt(tuple(1000 + (31 * i + turn) % 20000 for i in range(length)))
        sampling = Sampling(max_tokens=1)
        async for _ in engine.generate(prompt, sampling, request_id=f"p{length}-{turn}"):
            pass

    times = []
    for turn in range(3):
        began = time.perf_counter()
        await asyncio.gather(*(first(length, turn) for length in lengths))
        times.append(time.perf_counter() - began)
    return statistics.median(times)


async def measure(
    url: str, folders: list[Path], swaps: int, progress: Progress
) -> dict[str, float]:
    engine = HttpEngine(url, swap_timeout_s=60)
    try:
        load_s = await load_alone(url, engine, folders)
        streams = [Stream(engine, n) for n in range(STREAMS)]
        stop = asyncio.Event()
        running = [asyncio.create_task(s.run(stop)) for s in streams]
        await asyncio.sleep(REST_S)
        stalls, deliveries = [], []
        task = progress.add_task("swap", total=swaps)
        before = version(102, folders[1])
        for turn in range(swaps):
            new = version(200 + turn, folders[turn % 2])
            began = time.perf_counter()
            deliveries.append(await engine.load_version(new, before))
            await asyncio.sleep(REST_S)
            stalls.append(
                max(s.longest_gap(began, began + deliveries[-1].total_s) for s in streams)
            )
            before = new
            progress.advance(task)
        gaps = [b - a for s in streams for a, b in itertools.pairwise(s.times)]
        stop.set()
        await asyncio.gather(*running)
        mean_length = PROMPT_TOKENS + REPLY_TOKENS // 2
        prefill_s = await prefill_alone(engine, [mean_length] * STREAMS)
    finally:
        await engine.aclose()
    stall_p50 = statistics.median(stalls)
    return {
        "stall_over_load": round(stall_p50 / (load_s + prefill_s), 3),
        "stall_s": round(max(stalls), 3),
        "stall_p50_s": round(stall_p50, 3),
        "load_s": round(load_s, 3),
        "prefill_s": round(prefill_s, 3),
        "paused_p50_s": round(statistics.median(d.paused_s for d in deliveries), 3),
        "total_p50_s": round(statistics.median(d.total_s for d in deliveries), 3),
        "token_gap_p50_s": round(statistics.median(gaps), 4),
        "probe_error_max": round(max(d.probe_error for d in deliveries), 4),
        "swaps": swaps,
    }


def main() -> None:
    args = arguments()
    with model_folder(args.model) as base, Progress(console=console) as progress:
        changed = base.parent / f"{base.name}-changed-{os.getpid()}"
        try:
            other_version(base, changed)
            with engine_process(base, threads=args.threads, dtype=args.dtype) as engine:
                result = asyncio.run(measure(engine.url, [base, changed], args.swaps, progress))
                result["engine_peak_gib"] = round(engine.peak_gib(), 3)
        finally:
            shutil.rmtree(changed, ignore_errors=True)
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main()
