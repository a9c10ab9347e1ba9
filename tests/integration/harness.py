"""Drives a whole service on the scripted engine and trainer: no model, seconds to start."""

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil

from online_sao.running import RunningService

SCRIPTED = {
    "ONLINE_SAO_PRESET": "interactive",
    "ONLINE_SAO_ENGINE__KIND": "scripted",
    "ONLINE_SAO_JUDGING__RUBRIC": "brief",
    "ONLINE_SAO_LEARNER__LEASE_S": "3",
}


def command(data: Path, *args: str) -> subprocess.CompletedProcess[str]:
    """`online-sao ARGS --data DATA`."""
    return subprocess.run(
        [sys.executable, "-m", "online_sao", *args, "--data", str(data)],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def ledger(data: Path) -> dict[str, Any]:
    book: dict[str, Any] = json.loads(command(data, "ledger", "--json").stdout)
    return book


def status(data: Path) -> dict[str, Any]:
    shown: dict[str, Any] = json.loads(command(data, "status", "--json").stdout)
    return shown


def children(pid: int, word: str) -> list[psutil.Process]:
    """The service's child processes whose command line has `word`."""
    found = []
    for child in psutil.Process(pid).children(recursive=True):
        try:
            if any(word in part for part in child.cmdline()):
                found.append(child)
        except psutil.NoSuchProcess:
            continue
    return found


def wait_for(condition: Callable[[], Any], what: str, limit_s: float = 60.0) -> Any:
    """The condition's first true value; fails by name when it never comes."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.1)
    raise AssertionError(f"never came: {what}")


def body(text: str = "Tell me something.", **more: Any) -> dict[str, Any]:
    return {"model": "online-sao", "messages": [{"role": "user", "content": text}], **more}


class Traffic:
    """Chats that never stop, and every answer's status."""

    def __init__(self, service: RunningService, clients: int = 4) -> None:
        self._service = service
        self._clients = clients
        self.statuses: list[int | str] = []

    @property
    def failed(self) -> list[int | str]:
        return [status for status in self.statuses if status != 200]

    async def run(self, stop: asyncio.Event) -> None:
        async with httpx.AsyncClient(
            base_url=self._service.url, headers=self._service.headers, timeout=60
        ) as http:
            await asyncio.gather(*(self._client(http, i, stop) for i in range(self._clients)))

    async def _client(self, http: httpx.AsyncClient, number: int, stop: asyncio.Event) -> None:
        turn = 0
        while not stop.is_set():
            turn += 1
            try:
                answer = await http.post(
                    "/v1/chat/completions", json=body(f"Client {number}, turn {turn}: go on.")
                )
                self.statuses.append(answer.status_code)
            except httpx.HTTPError as error:
                self.statuses.append(type(error).__name__)
            await asyncio.sleep(0.02)
