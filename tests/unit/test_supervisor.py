"""Children: restarted when they die, gone when told to stop, never orphaned."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from online_sao import supervisor
from online_sao.supervisor import Child, ChildSpec, ChildState

SLEEP = "import time; time.sleep(60)"
STUBBORN = f"import signal; signal.signal(15, signal.SIG_IGN); print('up', flush=True); {SLEEP}"


def spec(tmp_path: Path, code: str, **changes: object) -> ChildSpec:
    async def command() -> list[str]:
        return [sys.executable, "-c", code]

    fields: dict[str, object] = {
        "name": "child", "command": command, "log": tmp_path / "child.log",
        "env": dict(os.environ), "grace_s": 0.5,
    }  # fmt: skip
    return ChildSpec(**{**fields, **changes})  # type: ignore[arg-type]


async def nothing(code: int) -> None:
    return None


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def until(condition: Callable[[], bool], limit_s: float = 10) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        await asyncio.sleep(0.01)


async def test_killed_child_is_started_again_and_its_death_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "FIRST_BACKOFF_S", 0.01)
    codes: list[int] = []

    async def on_death(code: int) -> None:
        codes.append(code)

    child, stop = Child(spec(tmp_path, SLEEP), on_death), asyncio.Event()
    running = asyncio.create_task(child.run(stop))
    await until(child.running.is_set)
    first = child.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    await until(lambda: child.running.is_set() and child.pid not in (None, first))
    stop.set()
    await running
    assert codes == [-9]
    assert child.restarts == 1
    assert child.state is ChildState.STOPPED


async def test_child_that_ignores_sigterm_is_killed_after_its_grace(tmp_path: Path) -> None:
    child, stop = Child(spec(tmp_path, STUBBORN), nothing), asyncio.Event()
    running = asyncio.create_task(child.run(stop))
    await until(
        lambda: (tmp_path / "child.log").exists() and "up" in (tmp_path / "child.log").read_text()
    )
    pid = child.pid
    assert pid is not None
    stop.set()
    await asyncio.wait_for(running, 5)
    assert not alive(pid)


async def test_child_is_running_only_once_it_answers(tmp_path: Path) -> None:
    answers = False

    async def ready() -> bool:
        return answers

    child, stop = Child(spec(tmp_path, SLEEP, ready=ready), nothing), asyncio.Event()
    running = asyncio.create_task(child.run(stop))
    await until(lambda: child.pid is not None)
    await asyncio.sleep(0.25)
    assert not child.running.is_set()
    answers = True
    await until(child.running.is_set)
    stop.set()
    await running


async def test_command_is_asked_anew_at_every_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "FIRST_BACKOFF_S", 0.01)
    asked: list[int] = []

    async def command() -> list[str]:
        asked.append(len(asked))
        return [sys.executable, "-c", "pass" if len(asked) < 3 else SLEEP]

    given: Callable[[], Awaitable[list[str]]] = command
    child, stop = Child(spec(tmp_path, "", command=given), nothing), asyncio.Event()
    running = asyncio.create_task(child.run(stop))
    await until(lambda: len(asked) == 3)
    stop.set()
    await running
    assert child.restarts == 2


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent-death signal")
def test_children_die_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    parent_code = f"""
import asyncio, os, pathlib, sys
from online_sao.supervisor import Child, ChildSpec
async def command(): return [sys.executable, "-c", {SLEEP!r}]
async def nothing(code): pass
async def main():
    log = pathlib.Path({str(tmp_path / "log")!r})
    child = Child(ChildSpec("c", command, log, dict(os.environ)), nothing)
    task = asyncio.create_task(child.run(asyncio.Event()))
    await child.running.wait()
    print(child.pid, flush=True)
    await task
asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", parent_code], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert alive(pid)
        parent.kill()
    deadline = time.monotonic() + 5
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not alive(pid)
