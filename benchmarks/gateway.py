"""What the gateway adds to calling the engine directly.

A scripted engine (no model, a fixed token rate) runs in a process of its own; a client reads its
replies once through `HttpEngine` and once as an event stream through a gateway with a SQLite
store, itself a process of its own. Both ways alternate, so that a busy machine slows both.

- `added_ms_p50`: one client, one reply after another: the difference of the medians of the
  seconds from asking to the end of the reply. `added_first_token_ms_p50`: to its first token.
- `throughput_ratio`: 32 clients at once: tokens per second through the gateway over directly.

    python benchmarks/gateway.py --quick
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import httpx
import uvicorn
from rich.console import Console

from online_sao import wiring
from online_sao.config import Settings, load_settings
from online_sao.interfaces import Engine
from online_sao.types import Message, Sampling, new_id

console = Console(stderr=True)
KEY = "bench"
PROMPT = "Say something long about the sea."
START_TIMEOUT_S = 60.0
SHORT = 4
"""Tokens per reply where latency is measured."""
CONTENT = b'"delta":{"content"'

Ask = Callable[[], Awaitable[tuple[int, float, float]]]
"""One reply: (tokens, seconds to the first token, seconds to the end)."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tenth of the work")
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64, help="per reply")
    parser.add_argument("--tokens-per-s", type=float, default=40.0, help="per reply, of the engine")
    parser.add_argument("--serve", metavar="ENGINE_URL", help=argparse.SUPPRESS)
    parser.add_argument("--data", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.replies = 40 if options.quick else 200
    options.rounds = 2 if options.quick else 5
    return options


def settings_of(data: Path) -> Settings:
    return load_settings(overrides={"service": {"data": data}}, environ={})


# -- the gateway's process ----------------------------------------------------------------------


async def serve(engine_url: str, data: Path, port: int) -> None:
    settings = settings_of(data)
    store = wiring.make_store(settings)
    engine = wiring.make_engine(settings, engine_url)
    await store.open()
    app = wiring.make_app(settings, store, engine, KEY)
    config = uvicorn.Config(app, port=port, log_config=None, access_log=False)
    try:
        await uvicorn.Server(config).serve()
    finally:
        await engine.aclose()
        await store.aclose()


# -- the client's process -----------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def running(command: list[str], ready_url: str) -> Iterator[None]:
    """A child process, from its first good answer to its end."""
    process = subprocess.Popen([sys.executable, *command])
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not answers(ready_url):
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"did not start: {' '.join(command)}")
            time.sleep(0.05)
        yield
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()


def answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=1).status_code == 200
    except httpx.HTTPError:
        return False


def direct(engine: Engine, tokens: int) -> Ask:
    sampling = Sampling(max_tokens=tokens)

    async def ask() -> tuple[int, float, float]:
        began, first, count = time.perf_counter(), 0.0, 0
        prompt = await engine.render([Message("user", PROMPT)])
        async for chunk in engine.generate(prompt, sampling, request_id=new_id("bench-")):
            if chunk.token_ids and not count:
                first = time.perf_counter() - began
            count += len(chunk.token_ids)
        return count, first, time.perf_counter() - began

    return ask


def through_gateway(client: httpx.AsyncClient, tokens: int) -> Ask:
    body = {
        "model": "online-sao",
        "messages": [{"role": "user", "content": PROMPT}],
        "max_tokens": tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
    }

    async def ask() -> tuple[int, float, float]:
        began, first, tail = time.perf_counter(), 0.0, b""
        async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
            answer.raise_for_status()
            async for data in answer.aiter_bytes():
                if not first and CONTENT in data:
                    first = time.perf_counter() - began
                tail = (tail + data)[-1000:]
        end = time.perf_counter() - began
        if not tail.endswith(b"data: [DONE]\n\n"):
            raise SystemExit(f"a reply broke off: {tail!r}")
        usage = json.loads(tail.split(b"data: ")[-2])["usage"]
        return usage["completion_tokens"], first, end

    return ask


async def tokens_per_s(ask: Ask, clients: int, replies: int) -> float:
    """All clients at once, each with several replies one after another."""

    async def one_client() -> int:
        return sum([(await ask())[0] for _ in range(replies)])

    began = time.perf_counter()
    counts = await asyncio.gather(*(one_client() for _ in range(clients)))
    return sum(counts) / (time.perf_counter() - began)


async def added_ms(ways: Mapping[str, Ask], replies: int) -> tuple[float, float]:
    """Milliseconds the gateway adds to (first token, end); the ways take turns."""
    firsts: dict[str, list[float]] = {name: [] for name in ways}
    ends: dict[str, list[float]] = {name: [] for name in ways}
    for done in range(replies):
        for name, ask in ways.items():
            _, first, end = await ask()
            firsts[name].append(first * 1e3)
            ends[name].append(end * 1e3)
        if (done + 1) % 10 == 0:
            console.print(
                f"{done + 1}/{replies} replies: "
                + ", ".join(
                    f"{name} {statistics.median(firsts[name]):.2f} ms to the first token, "
                    f"{statistics.median(ends[name]):.2f} ms to the end"
                    for name in ways
                )
            )
    first_direct, first_gateway = (statistics.median(times) for times in firsts.values())
    end_direct, end_gateway = (statistics.median(times) for times in ends.values())
    return first_gateway - first_direct, end_gateway - end_direct


async def measure(options: argparse.Namespace, engine_url: str, url: str) -> dict[str, float]:
    engine = wiring.make_engine(settings_of(options.data), engine_url)
    limits = httpx.Limits(max_connections=options.clients, max_keepalive_connections=None)
    headers = {"authorization": f"Bearer {KEY}"}
    async with httpx.AsyncClient(base_url=url, headers=headers, limits=limits, timeout=60) as http:

        def ways(tokens: int) -> dict[str, Ask]:
            return {"direct": direct(engine, tokens), "gateway": through_gateway(http, tokens)}

        await added_ms(ways(SHORT), 3)  # warm both
        # What is added does not depend on a reply's length, so short ones are asked for.
        first, end = await added_ms(ways(SHORT), options.replies)
        rates: dict[str, list[float]] = {"direct": [], "gateway": []}
        for round_number in range(options.rounds):
            for name, ask in ways(options.tokens).items():
                rates[name].append(await tokens_per_s(ask, options.clients, 2))
                console.print(
                    f"round {round_number + 1}/{options.rounds}: {options.clients} clients "
                    f"{name}: {rates[name][-1]:.0f} tokens/s"
                )
    await engine.aclose()
    through = statistics.median(rates["gateway"])
    return {
        "added_ms_p50": round(end, 3),
        "added_first_token_ms_p50": round(first, 3),
        "throughput_ratio": round(through / statistics.median(rates["direct"]), 3),
        "tokens_per_s": round(through, 1),
        "clients": options.clients,
        "cores": wiring.cores(),
    }


def main() -> None:
    options = arguments()
    if options.serve:
        asyncio.run(serve(options.serve, options.data, options.port))
        return
    with tempfile.TemporaryDirectory() as folder:
        options.data = Path(folder)
        wiring.migrate(settings_of(options.data))
        engine_port, port = free_port(), free_port()
        engine_url, url = f"http://127.0.0.1:{engine_port}", f"http://127.0.0.1:{port}"
        scripted = ["-m", "online_sao.engines.scripted", "--port", str(engine_port)]
        scripted += ["--tokens-per-s", str(options.tokens_per_s)]
        gateway = [os.path.abspath(__file__), "--serve", engine_url]
        gateway += ["--data", str(options.data), "--port", str(port)]
        with running(scripted, f"{engine_url}/health"), running(gateway, f"{url}/readyz"):
            result = asyncio.run(measure(options, engine_url, url))
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main()
