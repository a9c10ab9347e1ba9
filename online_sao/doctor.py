"""`online-sao doctor`: is this machine fit, and do engine and learner compute the same policy?

Starts an engine of its own on the newest version of the data folder, samples replies at
temperature 1, and has the learner's network compute their log-probabilities: on the weights that
sampled a reply every ratio r_t is 1, up to the two engines' rounding (algorithm README,
invariant 1). A learner that disagrees with its engine trains on noise.
"""

from __future__ import annotations

import asyncio
import importlib.util
import math
import shutil
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from online_sao import wiring
from online_sao.config import Settings
from online_sao.datafolder import DataFolder
from online_sao.errors import ConfigError, EngineError, EngineUnavailable
from online_sao.interfaces import Engine
from online_sao.manifest import Manifest
from online_sao.ports import free_port
from online_sao.types import (
    Message,
    Outcome,
    RolloutCompletion,
    RolloutRequest,
    Sampling,
    Trajectory,
    VersionSpan,
    new_id,
    token_problem,
    utc_now,
)

MAX_CLIP_RATIO = 0.001
MAX_LOG_RATIO = {"BF16": 0.05, "F32": 0.001}
"""Largest mean |log r| (nats) by the dtype the engine serves in."""
MEASURED = ("clip_ratio", "log_ratio_abs_mean", "log_ratio_abs_max", "kl_rollout")
MAX_TOKENS = 64
START_TIMEOUT_S = 300.0
NEEDED_GIB = 2.0
QUESTIONS = (
    "How do I keep bread fresh?",
    "Write two sentences about the sea.",
    "What is the difference between a frog and a toad?",
    "Give me three ideas for a rainy afternoon.",
    "Explain photosynthesis to a child.",
    "How can I remember names better?",
    "Describe your favourite season.",
    "What makes a good cup of tea?",
)


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing the doctor looked at."""

    name: str
    well: bool
    detail: str


def run(settings: Settings, replies: int, *, as_json: bool, console: Console) -> bool:
    """Look at everything, say what was found; True when all is well."""
    findings = machine(settings)
    measured: Mapping[str, float | None] = {}
    if all(finding.well for finding in findings):
        with console.status("measuring the engine against the learner ..."):
            dtype, measured = asyncio.run(compare(settings, replies))
        findings += judge(dtype, measured)
    well = all(finding.well for finding in findings)
    if as_json:
        listed = [{"name": f.name, "well": f.well, "detail": f.detail} for f in findings]
        numbers = {name: _finite(value) for name, value in measured.items()}
        console.print_json(data={"well": well, "findings": listed, "measured": numbers})
        return well
    for finding in findings:
        mark = "[green]yes[/]" if finding.well else "[red]NO[/] "
        said = escape(f"{finding.name}: {finding.detail}")
        console.print(f"{mark}  {said}", highlight=False, soft_wrap=True)
    console.print("All is well." if well else "Something is not well.")
    return well


def _finite(value: float | None) -> float | None:
    """JSON has no NaN; the finding's detail says it."""
    return value if value is not None and math.isfinite(value) else None


def machine(settings: Settings) -> list[Finding]:
    """What the service needs of this machine."""
    folder = DataFolder(settings.service.data)
    folder.create()
    free = shutil.disk_usage(folder.root).free / 2**30
    engine, learner = wiring.split_cores(settings)
    missing = [name for name in ("torch", "transformers", "safetensors")
               if importlib.util.find_spec(name) is None]  # fmt: skip
    return [
        Finding("disk", free >= NEEDED_GIB, f"{free:.1f} GiB free, at least {NEEDED_GIB} needed"),
        Finding("cores", True, f"{wiring.cores()}: engine {engine}, learner {learner} thread(s)"),
        Finding(
            "learner's packages", not missing,
            f"missing: {', '.join(missing)} (pip install 'online-sao[learner]')"
            if missing else "installed",
        ),
    ]  # fmt: skip


def judge(dtype: str, measured: Mapping[str, float | None]) -> list[Finding]:
    """The verdict on what was measured; what could not be measured is not well."""
    limit = MAX_LOG_RATIO[dtype]
    return [
        _under("clip ratio", measured["clip_ratio"], MAX_CLIP_RATIO, "of the action tokens"),
        _under("mean |log r|", measured["log_ratio_abs_mean"], limit, f"nats in {dtype}"),
    ]


def _under(name: str, value: float | None, limit: float, unit: str) -> Finding:
    if value is None:
        return Finding(name, False, "not measured: no tokens")
    return Finding(name, value < limit, f"{value:.5f} {unit}, under {limit} is well")


async def compare(settings: Settings, replies: int) -> tuple[str, Mapping[str, float | None]]:
    """Serve the newest version, sample, and let the learner score the same tokens."""
    if settings.engine.kind != "embedded":
        raise ConfigError("doctor compares the embedded engine; set [engine] kind = 'embedded'")
    await asyncio.to_thread(wiring.migrate, settings)
    await wiring.prepare_model(settings)
    model = await _newest(settings)
    async with AsyncExitStack() as stack:
        engine = await _start_engine(settings, model, stack)
        trajectories = await asyncio.gather(*(_sample(engine, i) for i in range(replies)))
    trainer = await asyncio.to_thread(wiring.make_trainer, settings)
    await asyncio.to_thread(trainer.restore, model, None)
    # An update that leaves the policy alone, by a trainer that is thrown away: it measures the
    # ratios before it does anything, exactly as the learner does.
    update = partial(trainer.update, trajectories, critic_only=True)
    metrics = (await asyncio.to_thread(update)).metrics
    measured = {name: metrics[name] for name in MEASURED}
    dtypes = {dtype for dtype, _ in Manifest.read(model).tensors.values()}
    return ("BF16" if "BF16" in dtypes else "F32"), measured


async def _newest(settings: Settings) -> Path:
    """The folder of the newest version, version 0 in a data folder that has not served yet."""
    store = wiring.make_store(settings)
    await store.open()
    try:
        versions = await store.list_versions()
        path = (await store.newest_stable()).path if versions else None
    finally:
        await store.aclose()
    return Path(path) if path is not None else DataFolder(settings.service.data).model.resolve()


async def _start_engine(settings: Settings, model: Path, stack: AsyncExitStack) -> Engine:
    port, (threads, _) = free_port(), wiring.split_cores(settings)
    log = stack.enter_context((DataFolder(settings.service.data).logs / "doctor.log").open("wb"))
    process = await asyncio.create_subprocess_exec(
        *wiring.engine_command(settings, model=model, version=0, port=port, threads=threads),
        env=wiring.child_environment(threads, wiring.ENGINE_MEMORY), stdout=log, stderr=log,
    )  # fmt: skip

    async def stop() -> None:
        if process.returncode is None:
            process.terminate()
        await process.wait()

    stack.push_async_callback(stop)
    engine = wiring.make_engine(settings, f"http://127.0.0.1:{port}")
    stack.push_async_callback(engine.aclose)
    deadline = time.monotonic() + START_TIMEOUT_S
    while process.returncode is None and time.monotonic() < deadline:
        try:
            await engine.status()
        except EngineError:
            await asyncio.sleep(0.2)
        else:
            return engine
    raise EngineUnavailable(f"the engine did not start; see {log.name}")


async def _sample(engine: Engine, number: int) -> Trajectory:
    """One reply as a trajectory. Raises EngineError when its record has a hole."""
    message = Message("user", QUESTIONS[number % len(QUESTIONS)])
    sampling = Sampling(seed=number, max_tokens=MAX_TOKENS)
    prompt = await engine.render([message])
    ids: list[int] = []
    logprobs: list[float] = []
    spans: tuple[VersionSpan, ...] = ()
    finish_reason = None
    async for chunk in engine.generate(prompt, sampling, request_id=f"doctor-{number}"):
        ids += chunk.token_ids
        logprobs += chunk.logprobs
        spans, finish_reason = chunk.version_spans, chunk.finish_reason
    problem = token_problem(ids, logprobs, spans)
    if problem is not None:
        raise EngineError(f"the engine's record of a reply is not whole: {problem[1]}")
    request = RolloutRequest(
        id=new_id("chatcmpl-"), created_at=utc_now(), messages=(message,), sampling=sampling,
        session_id="doctor",
    )  # fmt: skip
    completion = RolloutCompletion(
        rollout_id=request.id, completed_at=utc_now(), outcome=Outcome.COMPLETED,
        prompt_ids=prompt.token_ids, reply_ids=tuple(ids), logprobs=tuple(logprobs),
        version_spans=spans, finish_reason=finish_reason,
    )  # fmt: skip
    return Trajectory.from_rollout(request, completion, reward=0.0, lag=0)
