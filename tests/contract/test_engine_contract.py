"""What every `Engine` promises, run on each implementation."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Generator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engine_fixtures import (
    ByteVersions,
    Server,
    UnderTest,
    client,
    collect,
    embedded_args,
    make_model,
    make_tokenizer,
    nudged,
    post,
    real_model,
    serve,
    until,
    user,
    write_version,
)

from online_sao.engines.scripted import ScriptedEngine
from online_sao.errors import EngineRefused, SwapFailed
from online_sao.interfaces import Engine
from online_sao.types import Message, PolicyVersion, Sampling, token_problem

KINDS = ["scripted", "scripted-server", "embedded", pytest.param("model", marks=pytest.mark.model)]

REAL_VOCABULARY = 49152


@pytest.fixture(scope="module")
def scripted_server(tmp_path_factory: pytest.TempPathFactory) -> Generator[Server, None, None]:
    log = tmp_path_factory.mktemp("scripted") / "log"
    arguments = ("online_sao.engines.scripted", "--tokens-per-s", "400")
    with serve(log, *arguments) as server:
        yield server


class TinyVersions:
    """Folders of tiny models with ever other weights."""

    def __init__(self, root: Path) -> None:
        self.root, self.tokenizer, self.count = root, make_tokenizer(), -1

    def __call__(self) -> PolicyVersion:
        self.count += 1
        model = make_model(len(self.tokenizer), seed=self.count)
        return write_version(self.root / f"v{self.count}", model, self.tokenizer, self.count)


@pytest.fixture(scope="module")
def tiny(
    tmp_path_factory: pytest.TempPathFactory,
) -> Generator[tuple[Server, TinyVersions], None, None]:
    root = tmp_path_factory.mktemp("tiny")
    versions = TinyVersions(root)
    first = versions()
    with serve(root / "log", *embedded_args(first.path, 0)) as server:
        yield server, versions


class NudgedVersions:
    """The real model with ever other weights."""

    def __init__(self, root: Path, base: PolicyVersion) -> None:
        self.root, self.base, self.count = root, base, 0

    def __call__(self) -> PolicyVersion:
        self.count += 1
        return nudged(self.base, self.root / f"n{self.count}", self.count)


@pytest.fixture(scope="module")
def real(
    tmp_path_factory: pytest.TempPathFactory,
) -> Generator[tuple[Server, NudgedVersions], None, None]:
    root = tmp_path_factory.mktemp("real")
    base = real_model(root / "v0")
    arguments = ("--model", base.path, "--version", "0", "--threads", "2")
    with serve(root / "log", "online_sao.engines.embedded", *arguments) as server:
        yield server, NudgedVersions(root, base)


@pytest.fixture(params=KINDS)
async def it(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncGenerator[UnderTest, None]:
    if request.param == "scripted":
        engine = ScriptedEngine(tokens_per_s=400)
        versions = ByteVersions(tmp_path)
        yield _under_test(engine, 2048, 500, versions, engine.backend.pause)
        return
    if request.param == "scripted-server":
        server: Server = request.getfixturevalue("scripted_server")
        await post(server.url, "/scripted/faults", {})
        make: Any = ByteVersions(tmp_path)
    elif request.param == "embedded":
        server, make = request.getfixturevalue("tiny")
    else:
        server, make = request.getfixturevalue("real")
    async with client(server.url) as engine_client:
        status = await engine_client.status()

        async def pause() -> None:
            await post(server.url, "/pause?mode=keep")

        vocabulary = REAL_VOCABULARY if request.param == "model" else 500
        yield _under_test(engine_client, status.max_model_len, vocabulary, make, pause, server.url)


def _under_test(
    engine: Engine, context: int, vocabulary: int, make: Any, pause: Any, url: str = ""
) -> UnderTest:
    numbers = iter(range(1000, 2000))

    def new_version() -> PolicyVersion:
        version: PolicyVersion = make()
        return version

    async def serving() -> PolicyVersion:
        version = replace(new_version(), number=next(numbers) + int(time.time()))
        await engine.load_version(version, version)
        return version

    return UnderTest(engine, context, vocabulary, new_version, serving, pause, url)


async def test_rendering_is_the_same_every_time_and_longer_for_a_longer_chat(it: UnderTest) -> None:
    once = await it.engine.render(user("hello"))
    assert once == await it.engine.render(user("hello"))
    longer = [*user("hello"), Message("assistant", "good morning"), Message("user", "and you")]
    assert len((await it.engine.render(longer)).token_ids) > len(once.token_ids) > 0


async def test_ids_logprobs_tokens_and_spans_have_one_length(it: UnderTest) -> None:
    version = (await it.engine.status()).version
    prompt = await it.engine.render(user("hello"))
    reply = await collect(it.engine, prompt, Sampling(max_tokens=12))
    assert (
        token_problem(reply.ids, reply.logprobs, reply.spans, reply.last.completion_tokens) is None
    )
    assert len(reply.tokens) == len(reply.ids) <= 12
    assert reply.last.finish_reason in ("stop", "length")
    assert [c.finish_reason for c in reply.chunks[:-1]] == [None] * (len(reply.chunks) - 1)
    assert {span.version for span in reply.spans} == {version}


async def test_greedy_and_seeded_replies_repeat_and_seeds_differ(it: UnderTest) -> None:
    prompt = await it.engine.render(user("tell me"))
    greedy = [
        await collect(it.engine, prompt, Sampling(temperature=0.0, max_tokens=10)) for _ in "ab"
    ]
    assert greedy[0].ids == greedy[1].ids
    assert greedy[0].logprobs == greedy[1].logprobs
    seeded = [await collect(it.engine, prompt, Sampling(seed=s, max_tokens=10)) for s in (5, 5, 6)]
    assert seeded[0].ids == seeded[1].ids != seeded[2].ids


async def test_max_tokens_cuts_after_exactly_that_many(it: UnderTest) -> None:
    prompt = await it.engine.render(user("count"))
    reply = await collect(it.engine, prompt, Sampling(max_tokens=3, seed=1))
    assert (len(reply.ids), reply.last.finish_reason) == (3, "length")


async def test_the_text_ends_before_a_stop_string_and_the_ids_do_not(it: UnderTest) -> None:
    prompt = await it.engine.render(user("stop"))
    sampling = Sampling(temperature=0.0, max_tokens=12)
    whole = await collect(it.engine, prompt, sampling)
    at = len(whole.text) // 2
    stop = whole.text[at : at + 3]
    cut = await collect(it.engine, prompt, replace(sampling, stop=(stop,)))
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert cut.last.finish_reason == "stop"
    assert cut.ids == whole.ids[: len(cut.ids)]
    assert len(cut.ids) == len(cut.logprobs) == cut.last.completion_tokens


async def test_a_prompt_longer_than_the_context_is_refused_with_both_numbers(it: UnderTest) -> None:
    with pytest.raises(EngineRefused) as caught:
        await it.engine.render(user("word " * 3 * it.context))
    assert caught.value.code == "context_length_exceeded"
    assert str(it.context) in str(caught.value)
    assert any(int(n) > it.context for n in str(caught.value).split() if n.isdigit())


@pytest.mark.parametrize("count", [10**9, 0, -1])
async def test_max_tokens_that_cannot_be_is_refused_by_name(it: UnderTest, count: int) -> None:
    prompt = await it.engine.render(user("hello"))
    with pytest.raises(EngineRefused) as caught:
        await collect(it.engine, prompt, Sampling(max_tokens=count))
    assert caught.value.param == "max_tokens"
    if count > 0:
        assert str(count) in str(caught.value)
        assert str(it.context) in str(caught.value)


async def test_a_bias_on_no_token_is_refused_and_the_engine_lives(it: UnderTest) -> None:
    prompt = await it.engine.render(user("hello"))
    with pytest.raises(EngineRefused) as caught:
        await collect(it.engine, prompt, Sampling(logit_bias=((999_999_999, 5.0),)))
    assert caught.value.param == "logit_bias"
    assert (await collect(it.engine, prompt, Sampling(max_tokens=2))).ids


async def test_top_logprobs_give_so_many_alternatives_in_order(it: UnderTest) -> None:
    prompt = await it.engine.render(user("hello"))
    reply = await collect(it.engine, prompt, Sampling(max_tokens=3, top_logprobs=4, seed=2))
    for token in reply.tokens:
        values = [t.logprob for t in token.top]
        assert len(values) == 4
        assert values == sorted(values, reverse=True)
    plain = await collect(it.engine, prompt, Sampling(max_tokens=3))
    assert [token.top for token in plain.tokens] == [()] * len(plain.tokens)


async def test_closing_the_stream_ends_the_engines_work_within_a_second(it: UnderTest) -> None:
    prompt = await it.engine.render(user("go on"))
    stream = it.engine.generate(prompt, Sampling(max_tokens=1500, seed=3), request_id="left")
    for _ in range(3):
        await anext(stream)
    assert (await it.engine.status()).in_flight == 1
    await stream.aclose()

    async def idle() -> bool:
        return (await it.engine.status()).in_flight == 0

    assert await until(idle, 1.0) < 1.0


async def test_a_loaded_version_is_served_with_proof(it: UnderTest) -> None:
    fallback = await it.serving()
    version = replace(it.new_version(), number=fallback.number + 1)
    delivery = await it.engine.load_version(version, fallback)
    assert (delivery.version, delivery.sha256) == (version.number, version.sha256)
    assert 0 <= delivery.probe_error < 0.35
    assert 0 < delivery.paused_s <= delivery.total_s
    status = await it.engine.status()
    assert (status.version, status.paused) == (version.number, False)
    reply = await collect(it.engine, await it.engine.render(user("hi")), Sampling(max_tokens=4))
    assert [s.version for s in reply.spans] == [version.number]


async def test_a_swap_in_mid_stream_cuts_nothing_and_shows_in_the_spans(it: UnderTest) -> None:
    fallback = await it.serving()
    version = replace(it.new_version(), number=fallback.number + 1)
    prompt = await it.engine.render(user("a long story"))
    started, chunks = asyncio.Event(), []

    async def read() -> None:
        sampling = Sampling(max_tokens=400, seed=it.context)
        async for chunk in it.engine.generate(prompt, sampling, request_id="long"):
            chunks.append(chunk)
            if len(chunks) == 5:
                started.set()

    reading = asyncio.create_task(read())
    await started.wait()
    await it.engine.load_version(version, fallback)
    await reading
    spans = chunks[-1].version_spans
    ids = [i for c in chunks for i in c.token_ids]
    assert {s.version for s in spans} <= {fallback.number, version.number}
    assert spans[0].version == fallback.number
    assert (spans[0].start, spans[-1].end) == (0, len(ids))
    assert chunks[-1].completion_tokens == len(ids)
    if spans[0].end < len(ids):
        assert spans[1] == replace(spans[1], version=version.number, start=spans[0].end)


def _break(version: PolicyVersion, how: str) -> PolicyVersion:
    weights = Path(version.path) / "model.safetensors"
    if how == "missing file":
        weights.unlink()
    elif how == "changed bytes":
        data = bytearray(weights.read_bytes())
        data[-1] ^= 1
        weights.write_bytes(data)
    elif how == "cut short":
        weights.write_bytes(weights.read_bytes()[:-1])
    else:
        return replace(version, sha256="0" * 64)
    return version


@pytest.mark.parametrize("how", ["missing file", "changed bytes", "cut short", "other hash"])
async def test_a_broken_version_is_not_taken_and_the_old_one_answers_at_once(
    it: UnderTest, how: str
) -> None:
    fallback = await it.serving()
    broken = _break(replace(it.new_version(), number=fallback.number + 1), how)
    with pytest.raises(SwapFailed):
        await it.engine.load_version(broken, fallback)
    status = await it.engine.status()
    assert (status.version, status.paused) == (fallback.number, False)
    prompt = await it.engine.render(user("still there"))
    async with asyncio.timeout(5):
        reply = await collect(it.engine, prompt, Sampling(max_tokens=3))
    assert [s.version for s in reply.spans] == [fallback.number]


async def test_recover_resumes_what_a_dead_controller_left_paused(it: UnderTest) -> None:
    await it.pause()
    assert (await it.engine.status()).paused
    prompt = await it.engine.render(user("hello"))
    waiting = asyncio.create_task(collect(it.engine, prompt, Sampling(max_tokens=3)))
    await asyncio.sleep(0.2)
    assert not waiting.done()
    await it.engine.recover()
    async with asyncio.timeout(5):
        assert (await waiting).ids
    assert not (await it.engine.status()).paused


@pytest.mark.parametrize("roles", [("assistant", "user"), ("user", "user")])
async def test_a_chat_the_template_refuses_is_refused_not_an_error(
    it: UnderTest, roles: tuple[str, str]
) -> None:
    if it.vocabulary == REAL_VOCABULARY:  # this model's template takes every order of roles
        assert (await it.engine.render([Message(role, "hello") for role in roles])).token_ids
        return
    with pytest.raises(EngineRefused) as caught:
        await it.engine.render([Message(role, "hello") for role in roles])
    assert caught.value.param == "messages"
