"""What learning costs a chat: tokens per second while updates run, against the engine alone.

1. The engine alone, with every core: one chat's tokens per second.
2. A whole service with its learner paused collects judged replies for several updates; then the
   learner goes on, and one chat is measured while it updates.

`chat_ratio` is the second over the first.

    python benchmarks/interference.py --quick
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console

from online_sao import wiring
from online_sao.config import Settings, load_settings
from online_sao.errors import EngineError
from online_sao.interfaces import Engine, Store
from online_sao.ports import free_port
from online_sao.running import RunningService
from online_sao.types import LedgerState, Message, Sampling

console = Console(stderr=True)
PROMPT = "Tell me a long story about a fox who learns to sail around the world."
BATCH = 16


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two updates instead of five")
    parser.add_argument("--seconds", type=float, default=20.0, help="for the engine alone")
    options = parser.parse_args()
    options.updates = 2 if options.quick else 5
    if options.quick:
        options.seconds = 8.0
    return options


async def stream_until(engine: Engine, done: asyncio.Event) -> float:
    """Tokens per second of chats, one after another, until `done`; from the first token on."""
    tokens, seconds, seed = 0, 0.0, 0
    while not done.is_set():
        prompt = await engine.render([Message("user", PROMPT)])
        sampling = Sampling(max_tokens=256, seed=seed)
        seed += 1
        first = last = None
        async for chunk in engine.generate(prompt, sampling, request_id=f"bench-{seed}"):
            now = time.monotonic()
            if first is None:
                first = now
            else:
                tokens += len(chunk.token_ids)
            last = now
            if done.is_set():
                break
        if first is not None and last is not None:
            seconds += last - first
    return tokens / seconds if seconds else 0.0


async def engine_alone(settings: Settings, model: Path, seconds: float) -> float:
    """Tokens per second of one chat on the engine with all cores and nothing beside it."""
    port, threads = free_port(), wiring.cores()
    argv = wiring.engine_command(settings, model=model, version=0, port=port, threads=threads)
    process = await asyncio.create_subprocess_exec(
        *argv,
        env=wiring.child_environment(threads, wiring.ENGINE_MEMORY),
        stdout=asyncio.subprocess.DEVNULL,
    )
    engine = wiring.make_engine(settings, f"http://127.0.0.1:{port}")
    try:
        await wait_ready(engine, process)
        done = asyncio.Event()
        asyncio.get_running_loop().call_later(seconds, done.set)
        return await stream_until(engine, done)
    finally:
        await engine.aclose()
        process.terminate()
        await process.wait()


async def wait_ready(engine: Engine, process: asyncio.subprocess.Process) -> None:
    while process.returncode is None:
        try:
            await engine.status()
        except EngineError:
            await asyncio.sleep(0.2)
        else:
            return
    raise SystemExit("the engine did not start")


async def collect(service: RunningService, store: Store, wanted: int) -> None:
    """Chats until `wanted` judged replies wait."""
    body = {
        "model": "online-sao",
        "messages": [{"role": "user", "content": PROMPT}],
        "max_tokens": 100,
    }
    async with httpx.AsyncClient(
        base_url=service.url, headers=service.headers, timeout=600
    ) as http:
        while (await store.ledger()).counts.get(LedgerState.JUDGED, 0) < wanted:
            answers = await asyncio.gather(
                *(http.post("/v1/chat/completions", json=body) for _ in range(BATCH))
            )
            assert all(answer.status_code == 200 for answer in answers)
            await asyncio.sleep(0.5)
            waiting = (await store.ledger()).counts.get(LedgerState.JUDGED, 0)
            console.print(f"{waiting} of {wanted} judged replies wait")


async def while_updating(
    service: RunningService, settings: Settings, updates: int
) -> tuple[float, int]:
    """Tokens per second of one chat through the service while `updates` updates run."""
    store = wiring.make_store(settings)
    await store.open()
    try:
        await store.put_note("learner", {"paused": True})
        await collect(service, store, updates * BATCH)
        before = await store.count_updates()
        await store.put_note("learner", {"paused": False})
        done = asyncio.Event()
        chat = asyncio.create_task(stream_chat(service, done))
        deadline = time.monotonic() + 600
        while (count := await store.count_updates() - before) < updates:
            if time.monotonic() > deadline:
                raise SystemExit("the updates did not come")
            await asyncio.sleep(0.1)
        done.set()
        return await chat, count
    finally:
        await store.aclose()


async def stream_chat(service: RunningService, done: asyncio.Event) -> float:
    """Tokens (chunks with text) per second as a client of the service sees them."""
    tokens, seconds = 0, 0.0
    body: dict[str, Any] = {
        "model": "online-sao", "stream": True, "max_tokens": 256, "temperature": 1.0,
        "messages": [{"role": "user", "content": PROMPT}], "sao": {"train": False},
        "logprobs": True,
    }  # fmt: skip
    async with httpx.AsyncClient(
        base_url=service.url, headers=service.headers, timeout=600
    ) as http:
        while not done.is_set():
            first = last = None
            async with http.stream("POST", "/v1/chat/completions", json=body) as response:
                async for line in response.aiter_lines():
                    if not line.startswith("data: {"):
                        continue
                    now = time.monotonic()
                    counted = count_tokens(json.loads(line.removeprefix("data: ")))
                    if first is None:
                        first = now if counted else None
                    else:
                        tokens += counted
                        last = now
                    if done.is_set():
                        break
            if first is not None and last is not None:
                seconds += last - first
    return tokens / seconds if seconds else 0.0


def count_tokens(chunk: dict[str, Any]) -> int:
    return sum(len((c.get("logprobs") or {}).get("content") or ()) for c in chunk["choices"])


def main() -> None:
    options = arguments()
    with tempfile.TemporaryDirectory(prefix="interference-") as scratch:
        data = Path(scratch) / "data"
        environment = {
            "ONLINE_SAO_JUDGING__RUBRIC": "brief",
            "ONLINE_SAO_ALGORITHM__VALUE_WARMUP_UPDATES": "0",
            "ONLINE_SAO_LEARNER__BATCH_SIZE": str(BATCH),
        }
        settings = load_settings(None, {"service": {"data": data}}, environ=environment)
        console.print("a whole service: collecting, then chatting while updates run")
        with RunningService(data, env=environment, start_timeout_s=600) as service:
            beside, updates = asyncio.run(while_updating(service, settings, options.updates))
        console.print(f"{beside:.1f} tokens/s while {updates} updates ran; now the engine alone")
        alone = asyncio.run(engine_alone(settings, data / "model", options.seconds))
    result = {
        "chat_ratio": round(beside / alone, 3),
        "tokens_per_s_beside": round(beside, 2),
        "tokens_per_s_alone": round(alone, 2),
        "updates": updates,
        "cores": os.cpu_count(),
    }
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main()
