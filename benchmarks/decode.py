"""The embedded engine's decoding against transformers' own model in a plain batched loop.

Both write the same number of tokens after the same prompts, with the same dtype and threads, and
take turns, so that a busy machine slows both; ratios are the median round's. The engine is
measured through its HTTP face: rendering to JSON, streaming and log-probabilities included. The
plain loop is a forward pass with transformers' own cache, softmax, `torch.multinomial` and the
sampled token's log-probability, in one batch that nobody joins or leaves.

- `decode_ratio`: tokens per second at 32 replies, engine over plain loop.
- `decode_ratio_cumsum`: over the same loop with the cheaper sampling by a cumulative sum.
- `cpu_ratio`: the plain loop's processor time per token over the engine's, both with all of their
  threads; steadier than the clock on a machine that others use too.
- `continuous_ratio` (with `--continuous`): transformers' own continuous batching over plain loop.

    python benchmarks/decode.py --quick
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
from engine_process import EngineProcess, engine_process, model_folder
from rich.console import Console
from rich.progress import Progress

console = Console(stderr=True)
FIRST_ID, LAST_ID = 1000, 20000
PROMPT_TOKENS = 60
SIDES = ("engine", "multinomial", "cumsum")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="3 rounds instead of 7")
    parser.add_argument("--model", type=Path, help="a prepared folder; else it is made (30 s)")
    parser.add_argument("--replies", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=40, help="per reply")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--dtype", default="auto", choices=["auto", "bfloat16", "float32"])
    parser.add_argument("--continuous", action="store_true", help="transformers' own batching too")
    args = parser.parse_args()
    args.rounds = 3 if args.quick else 7
    return args


def make_prompts(count: int) -> list[list[int]]:
    rng = random.Random(7)
    return [[rng.randint(FIRST_ID, LAST_ID) for _ in range(PROMPT_TOKENS)] for _ in range(count)]


async def through_engine(url: str, prompts: list[list[int]], tokens: int) -> float:
    """Seconds for all replies, streamed."""

    async def one(client: httpx.AsyncClient, number: int) -> int:
        body = {
            "request_id": f"bench-{number}",
            "token_ids": prompts[number],
            "sampling_params": {
                "temperature": 1.0, "max_tokens": tokens, "ignore_eos": True, "logprobs": 0,
                "seed": number,
            },
            "output_mode": "text",
            "stream": True,
        }  # fmt: skip
        count = 0
        async with client.stream("POST", "/inference/v1/generate", json=body) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    for choice in json.loads(line[6:])["choices"]:
                        count += len(choice["token_ids"])
        return count

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(
        base_url=url, timeout=600, limits=limits, trust_env=False
    ) as client:
        began = time.perf_counter()
        counts = await asyncio.gather(*(one(client, n) for n in range(len(prompts))))
        took = time.perf_counter() - began
    assert counts == [tokens] * len(prompts), counts
    return took


def load_plain(folder: Path, dtype: str, threads: int) -> Any:
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    from online_sao.engines.embedded.weights import choose_dtype

    transformers_logging.disable_progress_bar()
    torch.set_num_threads(threads)
    chosen = choose_dtype(dtype, torch.device("cpu"))
    return AutoModelForCausalLM.from_pretrained(folder, dtype=chosen).eval()


def by_multinomial(logits: Any) -> Any:
    import torch

    logprobs = logits.float().log_softmax(-1)
    token = torch.multinomial(logprobs.exp(), 1)
    logprobs.gather(1, token)
    return token


def by_cumsum(logits: Any) -> Any:
    import torch

    logprobs = logits.float().log_softmax(-1)
    cumulative = logprobs.exp().cumsum(-1)
    token = torch.searchsorted(cumulative, torch.rand(len(logits), 1) * cumulative[:, -1:])
    logprobs.gather(1, token)
    return token


def plain_loop(
    model: Any, prompts: list[list[int]], tokens: int, sample: Callable[[Any], Any]
) -> float:
    """Seconds for all replies in one batch."""
    import torch

    with torch.inference_mode():
        began = time.perf_counter()
        out = model(input_ids=torch.tensor(prompts), use_cache=True, logits_to_keep=1)
        token = sample(out.logits[:, -1])
        for _ in range(tokens - 1):
            out = model(input_ids=token, cache=out.cache, use_cache=True, logits_to_keep=1)
            token = sample(out.logits[:, -1])
        return time.perf_counter() - began


def continuous(model: Any, prompts: list[list[int]], tokens: int) -> float:
    """Seconds for all replies by transformers' own continuous batching."""
    from transformers import GenerationConfig

    settings = GenerationConfig(
        max_new_tokens=tokens, do_sample=True, eos_token_id=-1, pad_token_id=0
    )
    began = time.perf_counter()
    replies = model.generate_batch(inputs=prompts, generation_config=settings, progress_bar=False)
    took = time.perf_counter() - began
    assert {len(reply.generated_tokens) for reply in replies.values()} == {tokens}
    return took


def one_round(
    args: argparse.Namespace, engine: EngineProcess, model: Any, prompts: list[list[int]]
) -> dict[str, float]:
    """Seconds of each side, one after the other."""
    took: dict[str, float] = {}
    before = engine.cpu_s()
    took["engine"] = asyncio.run(through_engine(engine.url, prompts, args.tokens))
    took["engine cpu"] = engine.cpu_s() - before
    before = time.process_time()
    took["multinomial"] = plain_loop(model, prompts, args.tokens, by_multinomial)
    took["plain cpu"] = time.process_time() - before
    took["cumsum"] = plain_loop(model, prompts, args.tokens, by_cumsum)
    if args.continuous:
        took["continuous"] = continuous(model, prompts, args.tokens)
    return took


def ratio(rounds: list[dict[str, float]], slow: str, fast: str) -> float:
    return round(statistics.median(r[slow] / r[fast] for r in rounds), 3)


def rate(args: argparse.Namespace, rounds: list[dict[str, float]], name: str) -> float:
    seconds = statistics.median(r[name] for r in rounds)
    return round(args.replies * args.tokens / seconds, 1)


def main() -> None:
    args = arguments()
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    prompts = make_prompts(args.replies)
    rounds: list[dict[str, float]] = []
    with model_folder(args.model) as folder:
        model = load_plain(folder, args.dtype, args.threads)
        with (
            engine_process(folder, threads=args.threads, dtype=args.dtype) as engine,
            Progress(console=console) as progress,
        ):
            task = progress.add_task("decode", total=args.rounds + 1)
            for _ in range(args.rounds + 1):  # the first round warms both up
                rounds.append(one_round(args, engine, model, prompts))
                progress.advance(task)
            peak = engine.peak_gib()
    result = {
        "decode_ratio": ratio(rounds[1:], "multinomial", "engine"),
        "decode_ratio_cumsum": ratio(rounds[1:], "cumsum", "engine"),
        "cpu_ratio": ratio(rounds[1:], "plain cpu", "engine cpu"),
        **{f"{name}_tokens_per_s": rate(args, rounds[1:], name) for name in SIDES},
        "engine_peak_gib": round(peak, 3),
        "replies": args.replies,
        "threads": args.threads,
    }
    if args.continuous:
        result["continuous_ratio"] = ratio(rounds[1:], "multinomial", "continuous")
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main()
