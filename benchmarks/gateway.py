"""What the gateway adds to calling the engine directly.

A scripted engine (no model, a fixed token rate) runs in a process of its own. Its replies are
read directly by `HttpEngine`, and as event streams through a gateway with a SQLite store, a
process of its own, which calls the engine by `HttpEngine` too. The ways take turns, so that a busy
machine slows both.

- `added_ms_p50`: one client, one reply after another: the difference of the medians of the
  time from asking to the end of the reply. `added_first_token_ms_p50`: to its first token.
- `throughput_ratio`: 32 clients at once: tokens per second through the gateway over directly.

    python benchmarks/gateway.py --quick
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
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
from online_sao.ports import free_port
from online_sao.types import Message, Sampling, new_id

console = Console(stderr=True)
KEY = "bench"
PROMPT = "Say something long about the sea."
START_TIMEOUT_S = 60.0
SHORT = 4
"""Tokens per reply where latency is measured."""

Ask = Callable[[int], Awaitable[tuple[int, float, float]]]
"""One reply by its seed: (tokens, seconds to the first token, seconds to the end)."""


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
    options.rounds = 1 if options.quick else 4
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
    config = uvicorn.Config(
        app, port=port, log_config=None, access_log=False, timeout_keep_alive=60
    )
    try:
        await uvicorn.Server(config).serve()
    finally:
        await engine.aclose()
        await store.aclose()


# -- the client's process -----------------------------------------------------------------------


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
    async def ask(seed: int) -> tuple[int, float, float]:
        began, first, count = time.perf_counter(), 0.0, 0
        sampling = Sampling(max_tokens=tokens, seed=seed)
        prompt = await engine.render([Message("user", PROMPT)])
        async for chunk in engine.generate(prompt, sampling, request_id=new_id("bench-")):
            if chunk.token_ids and not count:
                first = time.perf_counter() - began
            count += len(chunk.token_ids)
        return count, first, time.perf_counter() - began

    return ask


class BareClient:
    """The gateway's client: sockets, one per chat at once, and no HTTP library whose own time
    would be taken for the gateway's."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._free: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    def ask(self, tokens: int) -> Ask:
        """One streamed reply per call."""
        fields = {
            "model": "online-sao",
            "messages": [{"role": "user", "content": PROMPT}],
            "max_tokens": tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }

        async def ask(seed: int) -> tuple[int, float, float]:
            body = json.dumps({**fields, "seed": seed}).encode()
            head = (
                f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\n"
                f"authorization: Bearer {KEY}\r\ncontent-length: {len(body)}\r\n\r\n"
            )
            began = time.perf_counter()
            reader, writer = await self._connection()
            writer.write(head.encode() + body)
            answer = await reader.readuntil(b"\r\n\r\n")
            if not answer.startswith(b"HTTP/1.1 200"):
                raise SystemExit(f"the gateway answered {answer[:100]!r}")
            await reader.readuntil(b'"delta":{"content"')
            first = time.perf_counter() - began
            rest = await reader.readuntil(b"data: [DONE]\n\n\r\n")
            end = time.perf_counter() - began
            await reader.readuntil(b"0\r\n\r\n")
            self._free.append((reader, writer))
            usage = json.loads(rest.split(b"data: ")[-2])["usage"]
            return usage["completion_tokens"], first, end

        return ask

    async def _connection(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._free:
            return self._free.pop()
        return await asyncio.open_connection("127.0.0.1", self._port, limit=1 << 22)

    def close(self) -> None:
        for _, writer in self._free:
            writer.close()


async def tokens_per_s(ask: Ask, clients: int, replies: int) -> float:
    """All clients at once, each with several replies one after another, alike in both ways."""

    async def one_client(number: int) -> int:
        seeds = range(number * replies, (number + 1) * replies)
        return sum([(await ask(seed))[0] for seed in seeds])

    began = time.perf_counter()
    counts = await asyncio.gather(*map(one_client, range(clients)))
    return sum(counts) / (time.perf_counter() - began)


async def added_ms(ways: Mapping[str, Ask], replies: int) -> tuple[float, float]:
    """Milliseconds the gateway adds to (first token, end); the ways take turns."""
    firsts: dict[str, list[float]] = {name: [] for name in ways}
    ends: dict[str, list[float]] = {name: [] for name in ways}
    for done in range(replies):
        for name, ask in ways.items():
            _, first, end = await ask(done)
            firsts[name].append(first * 1e3)
            ends[name].append(end * 1e3)
        if (done + 1) % 10 == 0:
            console.print(
                f"{done + 1}/{replies} replies: "
                + ", ".join(
                    f"{name} first token {statistics.median(firsts[name]):.2f} ms, "
                    f"end {statistics.median(ends[name]):.2f} ms"
                    for name in ways
                )
            )
    first_direct, first_gateway = (statistics.median(times) for times in firsts.values())
    end_direct, end_gateway = (statistics.median(times) for times in ends.values())
    return first_gateway - first_direct, end_gateway - end_direct


async def measure(options: argparse.Namespace, engine_url: str, port: int) -> dict[str, float]:
    engine = wiring.make_engine(settings_of(options.data), engine_url)
    client = BareClient(port)

    def ways(tokens: int) -> dict[str, Ask]:
        return {"direct": direct(engine, tokens), "gateway": client.ask(tokens)}

    await added_ms(ways(SHORT), 3)  # warm both
    # What is added does not depend on a reply's length, so short ones are asked for.
    first, end = await added_ms(ways(SHORT), options.replies)
    rates: dict[str, list[float]] = {"direct": [], "gateway": []}
    for round_number in range(options.rounds):
        for name, ask in ways(options.tokens).items():
            rates[name].append(await tokens_per_s(ask, options.clients, 4))
            console.print(
                f"round {round_number + 1}/{options.rounds}: {options.clients} clients "
                f"{name}: {rates[name][-1]:.0f} tokens/s"
            )
    client.close()
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
            result = asyncio.run(measure(options, engine_url, port))
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main()
