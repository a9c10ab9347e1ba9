"""A whole service in a child process, for benchmarks, simulations and tests of one's own.

with RunningService(data, args=["--engine", "scripted"]) as service:
    httpx.post(f"{service.url}/v1/chat/completions", headers=service.headers, json=...)
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

import httpx

from online_sao.config import ENV_ADMIN_KEY
from online_sao.errors import OnlineSaoError
from online_sao.ports import free_port

KEY = "sk-sao-local"
STOP_TIMEOUT_S = 180.0


class RunningService:
    """`online-sao up` as a subprocess. Its output goes to `<data>.log` beside the data folder."""

    def __init__(
        self,
        data: Path,
        *,
        args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        start_timeout_s: float = 300.0,
    ) -> None:
        self.data = data
        self.log = data.with_name(data.name + ".log")
        self.key = KEY
        self.headers = {"Authorization": f"Bearer {KEY}"}
        self._args = list(args)
        self._env = {**os.environ, ENV_ADMIN_KEY: KEY, **(env or {})}
        self._start_timeout_s = start_timeout_s
        self._port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Base URL."""
        return f"http://127.0.0.1:{self._port}"

    @property
    def pid(self) -> int:
        """Process id of the parent."""
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Start and wait until it is ready. Raises OnlineSaoError with the log's end."""
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [
                    sys.executable, "-m", "online_sao", "up", "--data", str(self.data),
                    "--port", str(self._port), *self._args,
                ],
                stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=self._env,
            )  # fmt: skip
        deadline = time.monotonic() + self._start_timeout_s
        while not self._ready():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                raise OnlineSaoError(f"the service did not start:\n{self.log_tail()}")
            time.sleep(0.1)

    def stop(self) -> int:
        """SIGTERM, wait for the clean end; the exit code."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(STOP_TIMEOUT_S)

    def kill(self) -> None:
        """SIGKILL, as a crash would."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def log_tail(self, size: int = 3000) -> str:
        """The last characters of the log."""
        return self.log.read_text(errors="replace")[-size:]

    def _ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/readyz", timeout=2).status_code == 200
        except httpx.HTTPError:
            return False

    def __enter__(self) -> RunningService:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._process is not None and self._process.poll() is None:
            if error is None:
                self.stop()
            self.kill()
