"""The promise on the real model: chat, be judged, learn, serve the new weights; survive kills."""

import asyncio
import os
import signal
import sqlite3
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from online_sao.running import RunningService

pytestmark = [pytest.mark.slow, pytest.mark.model, pytest.mark.timeout(1500)]

ENVIRONMENT = {
    "ONLINE_SAO_PRESET": "interactive",
    "ONLINE_SAO_JUDGING__RUBRIC": "brief",
    "ONLINE_SAO_LEARNER__LEASE_S": "10",
}
QUESTIONS = (
    "How do I boil an egg?",
    "Name three birds.",
    "What is a noun?",
    "Why is the sky blue?",
    "Give me a short greeting for a friend.",
    "What should I pack for a picnic?",
)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("real") / "data"


@pytest.fixture(scope="module")
def service(data: Path) -> Iterator[RunningService]:
    with RunningService(data, env=ENVIRONMENT, start_timeout_s=300) as running:
        yield running


def command(data: Path, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "online_sao", *args, "--data", str(data)],
        capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip


def query(data: Path, sql: str) -> Any:
    with sqlite3.connect(f"file:{data / 'online-sao.db'}?mode=ro", uri=True) as database:
        return database.execute(sql).fetchone()[0]


class Traffic:
    def __init__(self, service: RunningService) -> None:
        self._service = service
        self.failed: list[int | str] = []
        self.answered = 0

    async def run(self, stop: asyncio.Event) -> None:
        async with httpx.AsyncClient(
            base_url=self._service.url, headers=self._service.headers, timeout=120
        ) as http:
            await asyncio.gather(*(self._client(http, i, stop) for i in range(6)))

    async def _client(self, http: httpx.AsyncClient, number: int, stop: asyncio.Event) -> None:
        turn = number
        while not stop.is_set():
            turn += 1
            messages = [{"role": "user", "content": QUESTIONS[turn % len(QUESTIONS)]}]
            try:
                answer = await http.post(
                    "/v1/chat/completions",
                    json={"model": "online-sao", "messages": messages, "max_tokens": 48},
                )
            except httpx.HTTPError as error:
                self.failed.append(type(error).__name__)
                continue
            self.answered += 1
            if answer.status_code != 200:
                self.failed.append(answer.status_code)


def test_doctor_says_yes_before_any_update(data: Path, service: RunningService) -> None:
    verdict = command(data, "doctor", "--json")
    assert verdict.returncode == 0, verdict.stdout + verdict.stderr


def test_openai_sdk_gets_sane_text_streamed_and_not(service: RunningService) -> None:
    client = openai.OpenAI(base_url=f"{service.url}/v1", api_key=service.key)
    messages: Any = [{"role": "user", "content": "What is the capital of France?"}]
    whole = client.chat.completions.create(
        model="online-sao", messages=messages, temperature=0, max_tokens=24
    )
    assert "Paris" in (whole.choices[0].message.content or "")
    stream = client.chat.completions.create(
        model="online-sao", messages=messages, temperature=0, max_tokens=24, stream=True
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert text == whole.choices[0].message.content


async def test_status_and_metrics_answer_at_once_during_an_update(
    service: RunningService, data: Path
) -> None:
    traffic, stop = Traffic(service), asyncio.Event()
    running = asyncio.create_task(traffic.run(stop))
    seconds: list[float] = []
    leased = "SELECT count(*) FROM ledger_entries WHERE state = 'leased'"
    async with httpx.AsyncClient(base_url=service.url, timeout=30) as http:
        for _ in range(1200):
            if query(data, leased):
                for path in ("/metrics", "/readyz"):
                    begin = time.perf_counter()
                    assert (await http.get(path)).status_code == 200
                    seconds.append(time.perf_counter() - begin)
            if len(seconds) >= 40:
                break
            await asyncio.sleep(0.1)
    stop.set()
    await running
    assert len(seconds) >= 40
    assert statistics.median(seconds) < 0.2


async def test_kills_of_the_learner_and_the_parent_lose_nothing(
    service: RunningService, data: Path
) -> None:
    def updates() -> int:
        return int(query(data, "SELECT count(*) FROM updates"))

    async def until_updates(count: int) -> None:
        for _ in range(6000):
            if updates() >= count:
                return
            await asyncio.sleep(0.1)
        raise AssertionError(f"update {count} never came:\n{service.log_tail()}")

    traffic, stop = Traffic(service), asyncio.Event()
    running = asyncio.create_task(traffic.run(stop))
    for kill in range(3):
        await until_updates(2 * kill + 1)
        # The learner has the next batch in hand before long: this is in mid-update.
        for _ in range(600):
            if query(data, "SELECT count(*) FROM ledger_entries WHERE state = 'leased'"):
                break
            await asyncio.sleep(0.05)
        for child in psutil.Process(service.pid).children(recursive=True):
            if "learn" in child.cmdline():
                os.kill(child.pid, signal.SIGKILL)
    await until_updates(updates() + 2)
    stop.set()
    await running
    assert traffic.failed == []
    assert traffic.answered > 40
    repeated = "SELECT 1 FROM update_members GROUP BY rollout_id HAVING count(*) > 1"
    twice = f"SELECT count(*) FROM ({repeated})"
    assert query(data, twice) == 0
    assert query(data, "SELECT max(number) FROM policy_versions") >= 1
    assert service.stop() == 0
    book = command(data, "ledger", "--json")
    assert book.returncode == 0, book.stdout
