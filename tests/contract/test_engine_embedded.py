"""The embedded engine against a plain transformers forward pass, in fp32, and under stress."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Generator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from engine_fixtures import (
    Collected,
    Server,
    client,
    collect,
    embedded_args,
    make_model,
    make_tokenizer,
    policy,
    post,
    score,
    serve,
    until,
    user,
    wait_until_healthy,
    write_version,
)

from online_sao.engines import wire
from online_sao.engines.client import HttpEngine
from online_sao.engines.embedded.service import EmbeddedBackend, Options
from online_sao.errors import EngineRefused, EngineUnavailable, SwapFailed
from online_sao.manifest import Manifest
from online_sao.ports import free_port
from online_sao.types import PolicyVersion, RenderedPrompt, Sampling, VersionSpan

TOLERANCE = 1e-4
CONTEXT = 1536


@dataclass
class Tiny:
    """One engine process with versions A and B (unrelated weights) of one tiny model."""

    server: Server
    tokenizer: Any
    models: dict[int, Any]
    versions: dict[int, PolicyVersion]
    root: Path
    count: int = 1

    def numbered(self, which: int) -> PolicyVersion:
        """Version A or B under a number that was not used yet."""
        self.count += 1
        number = 2 * self.count + which
        return replace(self.versions[which], number=number)

    def model_of(self, number: int) -> Any:
        return self.models[number % 2]


def _make(root: Path, *, tied: bool, model: Any = make_model) -> Tiny:
    tokenizer = make_tokenizer()
    models = {n: model(len(tokenizer), seed=10 + n, tied=tied) for n in (0, 1)}
    versions = {n: write_version(root / f"v{n}", models[n], tokenizer, n) for n in (0, 1)}
    return Tiny(None, tokenizer, models, versions, root)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Generator[Tiny, None, None]:
    made = _make(tmp_path_factory.mktemp("tiny"), tied=False)
    options = ("--max-num-seqs", "8", "--max-model-len", str(CONTEXT), "--silence-s", "2")
    with serve(
        made.root / "log", *embedded_args(made.versions[0].path, 0, *options)
    ) as made.server:
        yield made


@pytest.fixture
async def engine(tiny: Tiny) -> AsyncGenerator[HttpEngine, None]:
    async with client(tiny.server.url) as made:
        await made.load_version(tiny.numbered(0), tiny.numbered(0))
        yield made


def _prompt(length: int, seed: int = 0) -> RenderedPrompt:
    rng = random.Random(f"{length} {seed}")
    return RenderedPrompt(tuple(rng.randrange(3, 300) for _ in range(length)))


def _exact(tiny: Tiny, prompt: RenderedPrompt, reply: Collected, temperature: float = 1.0) -> float:
    """Largest error of a reply's log-probabilities, each span recomputed with its own weights."""
    worst = 0.0
    for span in reply.spans:
        ids = [*prompt.token_ids, *reply.ids]
        truth = score(tiny.model_of(span.version), ids, temperature)[len(prompt.token_ids) :]
        for t in range(span.start, span.end):
            worst = max(worst, abs(truth[t] - reply.logprobs[t]))
    return worst


@pytest.mark.parametrize("temperature", [1.0, 0.5, 1.7])
async def test_logprobs_are_those_of_a_plain_forward_pass_at_that_temperature(
    tiny: Tiny, engine: HttpEngine, temperature: float
) -> None:
    prompt = _prompt(20)
    reply = await collect(engine, prompt, Sampling(temperature=temperature, max_tokens=60, seed=1))
    assert len(reply.ids) == 60
    assert _exact(tiny, prompt, reply, temperature) < TOLERANCE


async def test_greedy_takes_the_likeliest_token_and_reports_it_at_temperature_one(
    tiny: Tiny, engine: HttpEngine
) -> None:
    import torch

    prompt = _prompt(12)
    reply = await collect(engine, prompt, Sampling(temperature=0.0, max_tokens=20))
    ids = torch.tensor([[*prompt.token_ids, *reply.ids]])
    with torch.inference_mode():
        best = tiny.models[0](input_ids=ids).logits[0, 11:-1].argmax(-1).tolist()
    assert list(reply.ids) == best
    assert _exact(tiny, prompt, reply) < TOLERANCE


async def test_replies_that_join_and_leave_a_batch_are_each_exact(
    tiny: Tiny, engine: HttpEngine
) -> None:
    """Twenty replies through eight rows: prompts of 1 to 700 tokens, joining at random moments."""
    rng = random.Random(5)
    prompts = [_prompt(n, seed=i) for i, n in enumerate([1, 700, 3, 513, 512, 64] + [30] * 14)]

    async def one(i: int) -> Collected:
        await asyncio.sleep(rng.random() * 0.5)
        sampling = Sampling(seed=i, max_tokens=rng.randint(1, 80))
        return await collect(engine, prompts[i], sampling, f"join-{i}")

    replies = await asyncio.gather(*(one(i) for i in range(len(prompts))))
    errors = [_exact(tiny, p, r) for p, r in zip(prompts, replies, strict=True)]
    assert max(errors) < TOLERANCE


async def test_a_seeded_reply_does_not_depend_on_its_company(engine: HttpEngine) -> None:
    sampling, prompt = Sampling(seed=77, max_tokens=40), _prompt(25)
    alone = await collect(engine, prompt, sampling)
    company = [collect(engine, _prompt(9 + i), Sampling(max_tokens=60), f"c{i}") for i in range(6)]
    together = await asyncio.gather(collect(engine, prompt, sampling, "it"), *company)
    assert together[0].ids == alone.ids


async def test_across_a_swap_each_span_is_exact_under_its_own_weights(
    tiny: Tiny, engine: HttpEngine
) -> None:
    """Eight replies in flight, one of them still in its long prompt; two swaps."""
    prompts = [_prompt(n) for n in (5, 40, 200, 300, 17, 90, 600, 1000)]
    limits = [CONTEXT - len(p.token_ids) for p in prompts]
    tasks = [
        asyncio.create_task(
            collect(engine, p, Sampling(seed=i, max_tokens=min(500, limits[i])), f"swap-{i}")
        )
        for i, p in enumerate(prompts)
    ]
    served = [(await engine.status()).version]
    for which in (1, 0):
        await asyncio.sleep(0.6)
        version = tiny.numbered(which)
        await engine.load_version(version, tiny.versions[1 - which])
        served.append(version.number)
    replies = await asyncio.gather(*tasks)
    assert max(len(r.spans) for r in replies) >= 2
    assert {s.version for r in replies for s in r.spans} <= set(served)
    for prompt, reply, limit in zip(prompts, replies, limits, strict=True):
        assert len(reply.ids) == min(500, limit) or reply.last.finish_reason == "stop"
        assert _exact(tiny, prompt, reply) < TOLERANCE


async def test_after_a_swap_the_same_prompt_answers_as_a_cold_engine_would(
    tiny: Tiny, engine: HttpEngine
) -> None:
    prompt, sampling = _prompt(600), Sampling(temperature=0.0, max_tokens=30)
    before = await collect(engine, prompt, sampling)
    await engine.load_version(tiny.numbered(1), tiny.versions[0])
    after = await collect(engine, prompt, sampling)
    async with in_process(tiny.versions[1]) as cold_engine:
        body = {
            "request_id": "cold",
            "token_ids": list(prompt.token_ids),
            "sampling_params": {"temperature": 0.0, "max_tokens": 30},
            "output_mode": "text",
        }
        request = wire.parse(wire.GenerateBody, wire.dumps(body))
        cold = wire.merge([chunk async for chunk in cold_engine.generate(request)])
    assert after.ids == cold.token_ids != before.ids
    assert max(abs(a - b) for a, b in zip(after.logprobs, cold.logprobs, strict=True)) < 1e-5


@contextlib.asynccontextmanager
async def in_process(version: PolicyVersion) -> AsyncGenerator[EmbeddedBackend, None]:
    """A cold engine on `version`, in this process."""
    backend = EmbeddedBackend(Options(Path(version.path), version.number, dtype="float32"))
    await backend.start()
    try:
        yield backend
    finally:
        await backend.stop()


async def test_streamed_and_whole_replies_have_the_same_ids_logprobs_and_text(
    tiny: Tiny, engine: HttpEngine
) -> None:
    prompt = await engine.render(user("hello there"))
    for parameters in ({"temperature": 0.0}, {"temperature": 1.0, "seed": 9}):
        sampling = Sampling(max_tokens=40, **parameters)  # type: ignore[arg-type]
        streamed = await collect(engine, prompt, sampling)
        body = {
            "request_id": "whole",
            "token_ids": list(prompt.token_ids),
            "sampling_params": {**parameters, "max_tokens": 40, "logprobs": 0},
            "output_mode": "text",
        }
        answer = (await post(tiny.server.url, "/inference/v1/generate", body)).json()
        choice = answer["choices"][0]
        assert tuple(choice["token_ids"]) == streamed.ids
        assert [e["logprob"] for e in choice["logprobs"]["content"]] == list(streamed.logprobs)
        assert choice["text"] == streamed.text
        assert answer["usage"]["completion_tokens"] == len(streamed.ids)


def _chain_version(tiny: Tiny, folder: str, text: str, number: int) -> PolicyVersion:
    """A model that says `text` after token 5, token by token, whatever came before."""
    import torch

    ids = [5, *tiny.tokenizer.encode(text, add_special_tokens=False), 2]
    assert len(set(ids)) == len(ids), "a chain needs each token once"
    model = make_model(len(tiny.tokenizer), seed=3)
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    embedding, head = model.model.embed_tokens.weight, model.lm_head.weight
    torch.nn.init.orthogonal_(embedding[ids])
    head.zero_()
    for before, after in itertools.pairwise(ids):
        head[after] = 5 * embedding[before] / embedding[before].norm()
    return write_version(tiny.root / folder, model, tiny.tokenizer, number)


async def test_characters_split_over_tokens_come_whole(tiny: Tiny, engine: HttpEngine) -> None:
    text = "hello\U0001f600w\u00e9\u8a9e!"
    version = replace(_chain_version(tiny, "emoji", text, 0), number=tiny.numbered(0).number)
    fallback = await _served(tiny, engine)
    await engine.load_version(version, fallback)
    reply = await collect(engine, RenderedPrompt((5,)), Sampling(temperature=0.0, max_tokens=60))
    await engine.load_version(tiny.numbered(0), version)
    assert reply.text == text
    assert "\ufffd" not in "".join(c.text for c in reply.chunks)
    assert b"".join(bytes(t.bytes or ()) for t in reply.tokens[:-1]) == text.encode()
    assert len(reply.tokens) > len(text)  # some characters took several tokens
    assert tiny.tokenizer.decode(reply.ids, skip_special_tokens=True) == text


async def test_a_stop_string_inside_a_token_cuts_the_text_and_keeps_the_token(
    tiny: Tiny, engine: HttpEngine
) -> None:
    text = "hello the town"
    version = replace(_chain_version(tiny, "stop", text, 0), number=tiny.numbered(0).number)
    fallback = await _served(tiny, engine)
    await engine.load_version(version, fallback)
    sampling = Sampling(temperature=0.0, max_tokens=60, stop=("he t", "never"))
    reply = await collect(engine, RenderedPrompt((5,)), sampling)
    await engine.load_version(tiny.numbered(0), version)
    assert reply.text == "hello t"
    assert reply.last.finish_reason == "stop"
    whole = tiny.tokenizer.encode(text, add_special_tokens=False)
    assert list(reply.ids) == whole[: len(reply.ids)]
    assert "he t" in tiny.tokenizer.decode(reply.ids)
    assert len(reply.ids) == len(reply.logprobs)


async def _served(tiny: Tiny, engine: HttpEngine) -> PolicyVersion:
    number = (await engine.status()).version
    assert number is not None
    return replace(tiny.versions[number % 2], number=number)


async def test_an_end_of_turn_that_is_not_the_tokenizers_eos_ends_the_reply_and_is_kept(
    tiny: Tiny, engine: HttpEngine
) -> None:
    end_of_turn = tiny.tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert tiny.tokenizer.eos_token_id != end_of_turn
    sampling = Sampling(max_tokens=5, logit_bias=((end_of_turn, 100.0),))
    reply = await collect(engine, _prompt(8), sampling)
    assert (reply.ids, reply.text, reply.last.finish_reason) == ((end_of_turn,), "", "stop")
    assert len(reply.logprobs) == 1


async def test_min_tokens_holds_the_end_back(tiny: Tiny, engine: HttpEngine) -> None:
    end_of_turn = tiny.tokenizer.convert_tokens_to_ids("<|im_end|>")
    sampling = Sampling(min_tokens=4, max_tokens=9, logit_bias=((end_of_turn, 100.0),))
    reply = await collect(engine, _prompt(8), sampling)
    assert end_of_turn not in reply.ids[:4]
    assert (len(reply.ids), reply.ids[4]) == (5, end_of_turn)


# -- swaps that fail ---------------------------------------------------------------------------


async def _still_serves(tiny: Tiny, engine: HttpEngine, version: PolicyVersion) -> None:
    """The old weights answer, exactly, within 5 s."""
    prompt = _prompt(11)
    async with asyncio.timeout(5):
        reply = await collect(engine, prompt, Sampling(max_tokens=8))
    assert {s.version for s in reply.spans} == {version.number}
    assert _exact(tiny, prompt, reply) < TOLERANCE


def _rewrite(version: PolicyVersion, folder: Path, change: Any) -> PolicyVersion:
    """A copy of a version whose tensors were changed, with a manifest that says so."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(version.path, folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    manifest = Manifest.describe(folder, Manifest.read(Path(version.path)).probes)
    (folder / "manifest.json").write_text(manifest.to_json())
    return policy(version.number, folder, manifest.sha256)


def _rename(tensors: dict[str, Any]) -> None:
    tensors["model.norm.other"] = tensors.pop("model.norm.weight")


def _shrink(tensors: dict[str, Any]) -> None:
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1].clone()


def _drop(tensors: dict[str, Any]) -> None:
    del tensors["model.layers.1.mlp.down_proj.weight"]


@pytest.mark.parametrize("change", [_rename, _shrink, _drop])
async def test_a_checkpoint_of_other_names_or_shapes_is_refused_before_the_pause(
    tiny: Tiny, engine: HttpEngine, tmp_path: Path, change: Any
) -> None:
    fallback = await _served(tiny, engine)
    broken = _rewrite(tiny.numbered(1), tmp_path / "broken", change)
    with pytest.raises(SwapFailed, match="its tensor model"):
        await engine.load_version(broken, fallback)
    await _still_serves(tiny, engine, fallback)


async def test_weights_that_do_not_give_the_probes_are_taken_back(
    tiny: Tiny, engine: HttpEngine, tmp_path: Path
) -> None:
    """The manifest's probes belong to other weights: what serves is not what was meant."""
    fallback = await _served(tiny, engine)

    def other(tensors: dict[str, Any]) -> None:
        tensors["lm_head.weight"] = tensors["lm_head.weight"].flip(0).contiguous()

    wrong = _rewrite(tiny.numbered(1), tmp_path / "wrong", other)
    with pytest.raises(SwapFailed, match="probe"):
        await engine.load_version(wrong, fallback)
    await _still_serves(tiny, engine, fallback)


async def test_a_receiver_that_stalls_costs_the_time_out_and_no_more(tiny: Tiny) -> None:
    """The whole engine process stands still for longer than the swap may take."""
    async with client(tiny.server.url, swap_timeout_s=2.0) as engine:
        await engine.load_version(tiny.numbered(0), tiny.numbered(0))
        fallback = await _served(tiny, engine)
        os.kill(tiny.server.process.pid, signal.SIGSTOP)
        began = time.monotonic()
        try:
            with pytest.raises(SwapFailed):
                await engine.load_version(tiny.numbered(1), fallback)
            assert time.monotonic() - began < 3.0
        finally:
            os.kill(tiny.server.process.pid, signal.SIGCONT)
        await asyncio.sleep(3.0)  # what had been sent is worked off; the watchdog sees silence
        assert (await engine.status()).version == fallback.number
        await _still_serves(tiny, engine, fallback)


async def test_a_controller_that_falls_silent_in_mid_swap_leaves_the_old_weights(
    tiny: Tiny, engine: HttpEngine
) -> None:
    old, new = await _served(tiny, engine), tiny.numbered(1)
    info = {"update_info": {"path": new.path, "version": new.number, "sha256": new.sha256}}
    prompt = _prompt(30)
    reading = asyncio.create_task(collect(engine, prompt, Sampling(max_tokens=300, seed=1)))
    await asyncio.sleep(0.1)
    assert (await post(tiny.server.url, "/pause?mode=keep")).status_code == 200
    assert (await post(tiny.server.url, "/update_weights", info)).status_code == 200
    assert (await engine.status()).version == new.number

    async def goes_on() -> bool:
        status = await engine.status()
        return not status.paused and status.version == old.number

    assert await until(goes_on, 6.0) > 1.0
    reply = await reading
    assert reply.spans == (VersionSpan(old.number, 0, 300),)
    assert _exact(tiny, prompt, reply) < TOLERANCE


async def test_reading_new_weights_does_not_hold_up_decoding(
    tiny: Tiny, engine: HttpEngine
) -> None:
    """Only the exchange of one module for the other lies inside the pause."""
    fallback = await _served(tiny, engine)
    reading = asyncio.create_task(collect(engine, _prompt(30), Sampling(max_tokens=400, seed=1)))
    await asyncio.sleep(0.1)
    delivery = await engine.load_version(tiny.numbered(1), fallback)
    await reading
    assert delivery.paused_s < max(0.5 * delivery.total_s, 0.25)


@pytest.mark.slow
async def test_two_hundred_swaps_leave_memory_and_swap_time_flat(
    tiny: Tiny, engine: HttpEngine
) -> None:
    memory, times = [], []
    before = await _served(tiny, engine)
    for i in range(200):
        version = tiny.numbered((i + 1) % 2)
        times.append((await engine.load_version(version, before)).total_s)
        await collect(engine, _prompt(20), Sampling(max_tokens=4))
        before = version
        memory.append(tiny.server.memory_mib())
    assert memory[-1] - memory[40] < 20.0
    assert sorted(times[-20:])[18] <= 1.5 * max(sorted(times[:20])[18], 0.05)


# -- requests that cannot be served -------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value", "param"),
    [
        ("best_of", 3, "best_of"),
        ("guided_json", {}, "guided_json"),
        ("temperature", -1.0, "temperature"),
        ("temperature", float("nan"), "temperature"),
        ("top_p", 0.0, "top_p"),
        ("max_tokens", True, "max_tokens"),
        ("logit_bias", {"x": 1.0}, "logit_bias"),
        ("logit_bias", {"-1": 1.0}, "logit_bias"),
        ("allowed_token_ids", [10**6], "allowed_token_ids"),
        ("n", 2, "n"),
        ("stop", [""], "stop"),
    ],
)
async def test_what_is_not_served_is_a_400_that_names_it(
    tiny: Tiny, field: str, value: Any, param: str
) -> None:
    body = {
        "request_id": "x",
        "token_ids": [5, 6],
        "sampling_params": {"max_tokens": 2, field: value},
        "output_mode": "text",
    }
    answer = await post(tiny.server.url, "/inference/v1/generate", body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert len(answer.content) < 1000


async def test_banned_words_and_allowed_ids_bind_the_reply(tiny: Tiny, engine: HttpEngine) -> None:
    allowed = (30, 31, 32)
    reply = await collect(engine, _prompt(5), Sampling(max_tokens=20, allowed_token_ids=allowed))
    assert set(reply.ids) <= set(allowed)
    greedy = Sampling(temperature=0.0, max_tokens=1)
    for seed in range(20):  # until the likeliest token is a whole piece of text
        prompt = _prompt(5, seed)
        favourite = await collect(engine, prompt, greedy)
        if tiny.tokenizer.encode(favourite.text, add_special_tokens=False) == [*favourite.ids]:
            break
    without = replace(greedy, bad_words=(favourite.text,))
    assert (await collect(engine, prompt, without)).ids != favourite.ids


async def test_prompt_logprobs_are_those_of_a_plain_forward_pass(
    tiny: Tiny, engine: HttpEngine
) -> None:
    ids = list(_prompt(40).token_ids)
    body = {
        "request_id": "probe",
        "token_ids": ids,
        "sampling_params": {"temperature": 0.0, "max_tokens": 1, "prompt_logprobs": 0},
        "output_mode": "text",
    }
    answer = (await post(tiny.server.url, "/inference/v1/generate", body)).json()
    found = [
        e[str(i)]["logprob"] for i, e in zip(ids[1:], answer["prompt_logprobs"][1:], strict=True)
    ]
    truth = score(tiny.models[0], ids)[1:]
    assert max(abs(a - b) for a, b in zip(found, truth, strict=True)) < TOLERANCE


async def test_half_a_surrogate_pair_is_refused(tiny: Tiny) -> None:
    raw = b'{"messages":[{"role":"user","content":"\\ud83d"}]}'
    async with httpx.AsyncClient(base_url=tiny.server.url, trust_env=False) as plain:
        answer = await plain.post("/v1/chat/completions/render", content=raw)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_unicode")


async def test_tools_for_a_template_without_tools_are_refused(engine: HttpEngine) -> None:
    with pytest.raises(EngineRefused) as caught:
        await engine.render(user("hello"), tools=[{"type": "function"}])
    assert caught.value.param == "tools"


# -- tied embeddings ----------------------------------------------------------------------------


async def test_a_changed_embedding_of_a_tied_model_shows_at_input_and_output(
    tmp_path: Path,
) -> None:
    tied = _make(tmp_path, tied=True)
    token = 50
    import torch

    changed = make_model(len(tied.tokenizer), seed=10, tied=True)
    torch.manual_seed(4)
    changed.model.embed_tokens.weight[token].normal_(0.0, 3.0 / 8)
    tied.models[1] = changed
    version = write_version(tmp_path / "changed", changed, tied.tokenizer, 1)
    at_input, at_output = [7, 8, token, 9, 10], [7, 8, 9, token]
    info = wire.UpdateInfo(path=version.path, version=1, sha256=version.sha256)
    async with in_process(tied.versions[0]) as engine:
        before = [await engine.score(ids) for ids in (at_input, at_output)]
        await engine.update(info)
        await engine.finish("1")
        after = [await engine.score(ids) for ids in (at_input, at_output)]
    for ids, found, model in zip(
        [at_input, at_output] * 2,
        [*before, *after],
        [tied.models[0]] * 2 + [changed] * 2,
        strict=True,
    ):
        truth = score(model, ids)[1:]
        assert max(abs(a - b) for a, b in zip(found, truth, strict=True)) < TOLERANCE
    assert abs(before[0][3] - after[0][3]) > 0.01  # the token as context
    assert abs(before[1][2] - after[1][2]) > 0.01  # the token as what is predicted


# -- the process ----------------------------------------------------------------------------------


async def test_the_engines_death_in_mid_stream_is_unavailable(tmp_path: Path) -> None:
    arguments = ("online_sao.engines.scripted", "--tokens-per-s", "20")
    with serve(tmp_path / "log", *arguments) as server:
        async with client(server.url) as engine:
            reading = asyncio.create_task(collect(engine, _prompt(9), Sampling(seed=1)))
            await asyncio.sleep(0.15)
            server.process.kill()
            with pytest.raises(EngineUnavailable):
                await reading
            with pytest.raises(EngineUnavailable):
                await engine.status()


async def test_sigterm_is_a_clean_end_with_replies_in_flight(tmp_path: Path) -> None:
    made = _make(tmp_path, tied=False)
    with serve(tmp_path / "log", *embedded_args(made.versions[0].path, 0)) as server:
        async with client(server.url) as engine:
            asked = Sampling(max_tokens=1500)
            reading = [asyncio.create_task(collect(engine, _prompt(9), asked)) for _ in range(8)]
            await asyncio.sleep(0.3)
            server.process.terminate()
            assert await asyncio.to_thread(server.process.wait, 15) == 0
            ends = await asyncio.gather(*reading, return_exceptions=True)
            # A fast machine ends some within the grace time; the others are told, none hangs.
            assert all(isinstance(end, Collected | EngineUnavailable) for end in ends)


def test_a_folder_that_is_not_whole_is_one_clear_line_and_code_2(tmp_path: Path) -> None:
    command = [sys.executable, "-m", *embedded_args(tmp_path, 0), "--port", str(free_port())]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 2
    assert ended.stderr.splitlines()[-1] == f"error: {tmp_path} has no manifest.json: not whole"
    assert "Traceback" not in ended.stderr


def test_an_engine_whose_parent_dies_ends_too(tmp_path: Path) -> None:
    port = free_port()
    inner = [sys.executable, "-m", "online_sao.engines.scripted", "--port", str(port)]
    script = (
        "import subprocess, sys, time\n"
        f"child = subprocess.Popen({inner!r})\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    try:
        child = int(parent.stdout.readline())
        wait_until_healthy(f"http://127.0.0.1:{port}", parent, tmp_path / "none")
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and _alive(child):
        time.sleep(0.1)
    assert not _alive(child)


def _alive(pid: int) -> bool:
    import psutil

    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
