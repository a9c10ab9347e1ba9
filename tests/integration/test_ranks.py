"""A learner of two ranks, started as `up` starts it: one version, written once, a clean stop."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from judged import serve_and_judge
from tiny_llama import make_folder

from online_sao import wiring
from online_sao.config import Settings, load_settings, to_toml
from online_sao.datafolder import DataFolder
from online_sao.learner.export import SavedState
from online_sao.manifest import Manifest
from online_sao.types import LedgerState, PolicyVersion, UpdateKind

LIMIT_S = 120.0


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    learner = {"batch_size": 4, "ranks": 2, "dtype": "float32", "policy_layers": 0}
    made = load_settings(
        overrides={
            "service": {"data": tmp_path / "data"},
            "learner": learner,
            "algorithm": {"value_warmup_updates": 1},
        },
        environ={},
    )
    folder = DataFolder(made.service.data)
    folder.create()
    make_folder(folder.model)
    folder.running_settings.write_text(to_toml(made))
    wiring.migrate(made)
    asyncio.run(_fill(made))
    return made


async def _fill(settings: Settings) -> None:
    folder = DataFolder(settings.service.data)
    store = wiring.make_store(settings)
    await store.open()
    await store.add_base_version(str(folder.model.resolve()), Manifest.read(folder.model).sha256)
    await store.mark_live(0, {})
    await serve_and_judge(store, 8)
    await store.aclose()


@contextmanager
def learner(settings: Settings) -> Iterator[subprocess.Popen[bytes]]:
    folder = DataFolder(settings.service.data)
    command = wiring.learner_command(folder.running_settings, settings.learner.ranks)
    with folder.root.joinpath("learner.log").open("ab") as log:
        process = subprocess.Popen(
            command, env=wiring.child_environment(1, wiring.LEARNER_MEMORY), stderr=log, stdout=log
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            for member in psutil.Process(process.pid).children(recursive=True):
                member.kill()
            process.kill()
            process.wait()


def read(settings: Settings) -> tuple[list[PolicyVersion], list[Any], Any]:
    async def work() -> tuple[list[PolicyVersion], list[Any], Any]:
        store = wiring.make_store(settings)
        await store.open()
        try:
            return await store.list_versions(), await store.list_updates(), await store.ledger()
        finally:
            await store.aclose()

    return asyncio.run(work())


def until(condition: Callable[[], bool], process: subprocess.Popen[bytes], log: Path) -> None:
    begin = time.monotonic()
    while not condition():
        assert process.poll() is None, log.read_text()[-3000:]
        assert time.monotonic() - begin < LIMIT_S, log.read_text()[-3000:]
        time.sleep(0.3)


def test_two_ranks_make_one_version_and_stop_cleanly(settings: Settings) -> None:
    folder = DataFolder(settings.service.data)
    log = folder.root / "learner.log"
    with learner(settings) as process:
        until(lambda: len(read(settings)[0]) == 2, process, log)
        members = psutil.Process(process.pid).children(recursive=True)
        assert len(members) == 2
        process.send_signal(signal.SIGTERM)
        process.wait(60)
        psutil.wait_procs(members, timeout=10)
        assert not any(member.is_running() for member in members)
    versions, updates, ledger = read(settings)
    assert [u.kind for u in reversed(updates)] == [UpdateKind.CRITIC_ONLY, UpdateKind.POLICY]
    assert ledger.adds_up
    assert ledger.counts[LedgerState.TRAINED] == ledger.counts[LedgerState.CRITIC_ONLY] == 4
    assert [v.number for v in versions] == [1, 0]
    made = Path(versions[0].path)
    Manifest.read(made).verify(made)
    assert [path.name for path in made.parent.iterdir()] == [made.name]
    assert SavedState.read(max(folder.learner_states.iterdir())).updates == 2
    assert "action=learner_stopped" in log.read_text()


def test_the_death_of_a_rank_ends_the_learner(settings: Settings) -> None:
    log = DataFolder(settings.service.data).root / "learner.log"
    with learner(settings) as process:
        until(lambda: len(read(settings)[0]) == 2, process, log)
        members = psutil.Process(process.pid).children(recursive=True)
        os.kill(members[-1].pid, signal.SIGKILL)
        assert process.wait(60) != 0
        _, alive = psutil.wait_procs(members, timeout=10)
        assert not alive
