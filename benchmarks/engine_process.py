"""What the engine's benchmarks share: the real model as a folder, and an engine process on it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx

from online_sao.ports import free_port

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
START_TIMEOUT_S = 180.0


@dataclass(frozen=True)
class EngineProcess:
    """A running engine."""

    url: str
    pid: int

    def peak_gib(self) -> float:
        """The most memory it ever had."""
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 2**20
        return 0.0

    def cpu_s(self) -> float:
        """Processor seconds of all its threads so far."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def model_folder(given: Path | None) -> Iterator[Path]:
    """`given`, or the real model prepared in a temporary folder."""
    if given is not None:
        yield given
        return
    with tempfile.TemporaryDirectory(prefix="online-sao-bench-") as folder:
        out = Path(folder) / "model"
        command = ["-m", "online_sao.engines.embedded.prepare", "--model", MODEL, "--out", str(out)]
        subprocess.run([sys.executable, *command], check=True)
        yield out


@contextlib.contextmanager
def engine_process(folder: Path, *, threads: int, dtype: str) -> Iterator[EngineProcess]:
    """An embedded engine on `folder`, ended at the end."""
    port = free_port()
    command = [
        *(sys.executable, "-m", "online_sao.engines.embedded", "--model", str(folder)),
        *("--version", "0", "--port", str(port), "--threads", str(threads), "--dtype", dtype),
    ]
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
    try:
        url = f"http://127.0.0.1:{port}"
        _wait(url, process)
        yield EngineProcess(url, process.pid)
    finally:
        process.terminate()
        process.wait(timeout=30)


def _wait(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise SystemExit(f"the engine ended with code {process.returncode}")
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{url}/health", timeout=2, trust_env=False).status_code == 200:
                return
        time.sleep(0.2)
    raise SystemExit("the engine did not start in time")
