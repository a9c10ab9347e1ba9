"""The double: what it makes up, and the faults that can be switched on."""

from __future__ import annotations

import asyncio
import math
import time
from typing import Any

import pytest

from online_sao.engines.scripted import Faults, ScriptedEngine
from online_sao.engines.scripted.script import END, make_reply
from online_sao.errors import EngineRefused, EngineUnavailable, SwapFailed, WeightsNotDelivered
from online_sao.types import (
    Message,
    PolicyVersion,
    RenderedPrompt,
    ReplyChunk,
    Sampling,
    VersionState,
    utc_now,
)


async def reply(engine: ScriptedEngine, sampling: Sampling | None = None) -> list[ReplyChunk]:
    prompt = await engine.render([Message("user", "hello")])
    stream = engine.generate(prompt, sampling or Sampling(), request_id="r")
    return [chunk async for chunk in stream]


def version(number: int) -> PolicyVersion:
    return PolicyVersion(number, None, "", f"{number:064d}", VersionState.STABLE, utc_now())


def test_replies_fall_on_both_sides_of_forty_words_and_vary_with_the_turn() -> None:
    prompt = [1, 2, 3]
    lengths = [len(make_reply(prompt, Sampling(), turn=i, scripted=None)) for i in range(60)]
    assert 10 <= sum(length <= 40 for length in lengths) <= 50
    greedy = Sampling(temperature=0.0)
    same = [make_reply(prompt, greedy, turn=i, scripted=None) for i in (1, 2)]
    assert same[0] == same[1]


async def test_scripted_replies_come_in_turn_in_whole_characters() -> None:
    engine = ScriptedEngine(replies=["yes", "n\u00e9in \U0001f600"])
    texts = []
    for _ in range(3):
        chunks = await reply(engine)
        assert chunks[-1].token_ids == (END,)
        texts.append("".join(c.text for c in chunks))
        assert "\ufffd" not in texts[-1]
    assert texts == ["yes", "n\u00e9in \U0001f600", "yes"]


async def test_tokens_come_at_the_set_rate() -> None:
    engine = ScriptedEngine(tokens_per_s=50, replies=["a" * 60])
    began = time.monotonic()
    chunks = await reply(engine, Sampling(max_tokens=20))
    assert len(chunks) == 20
    assert 0.4 <= time.monotonic() - began < 1.0


@pytest.mark.parametrize("value", [math.nan, -math.inf, -9999.0, 1e-9])
async def test_a_logprob_that_is_none_is_reported(value: float) -> None:
    engine = ScriptedEngine()
    engine.faults.logprob = value
    found = (await reply(engine))[-1].logprobs[0]
    assert found == value or (math.isnan(found) and math.isnan(value))


async def test_one_logprob_less_than_tokens() -> None:
    engine = ScriptedEngine()
    engine.faults.drop_last_logprob = True
    chunks = await reply(engine)
    ids, logprobs = (sum((getattr(c, n) for c in chunks), ()) for n in ("token_ids", "logprobs"))
    assert len(logprobs) == len(ids) - 1


async def test_it_dies_after_so_many_tokens() -> None:
    engine = ScriptedEngine()
    engine.faults.die_after = 3
    stream = engine.generate(RenderedPrompt((1, 2)), Sampling(), request_id="r")
    for _ in range(3):
        await anext(stream)
    with pytest.raises(EngineUnavailable):
        await anext(stream)
    assert (await engine.status()).in_flight == 0


async def test_it_stalls_until_the_reader_leaves() -> None:
    engine = ScriptedEngine()
    engine.faults.stall_after = 2
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await reply(engine)
    assert (await engine.status()).in_flight == 0


async def test_it_refuses_and_is_not_there() -> None:
    engine = ScriptedEngine()
    engine.backend.faults = Faults(refuse="not today")
    with pytest.raises(EngineRefused, match="not today"):
        await reply(engine)
    engine.backend.faults = Faults(unavailable=True)
    with pytest.raises(EngineUnavailable):
        await reply(engine)


@pytest.mark.parametrize(
    ("faults", "error"),
    [
        (Faults(swap_error=True), SwapFailed),
        (Faults(swap_ignored=True), WeightsNotDelivered),
        (Faults(probe_offset=0.5), WeightsNotDelivered),
        (Faults(swap_stall_s=60.0), SwapFailed),
    ],
)
async def test_a_failed_swap_leaves_the_old_version(faults: Faults, error: Any) -> None:
    engine = ScriptedEngine(version=3, swap_timeout_s=0.3)
    engine.backend.faults = faults
    with pytest.raises(error):
        await engine.load_version(version(4), version(3))
    status = await engine.status()
    assert (status.version, status.paused) == (3, False)
    engine.backend.faults = Faults()
    await engine.load_version(version(4), version(3))
    assert (await engine.status()).version == 4
