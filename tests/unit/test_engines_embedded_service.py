"""The embedded engine's updates: every way they can end leaves whole weights serving."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from online_sao.engines.embedded.service import EmbeddedBackend, Options
from online_sao.engines.wire import GenerateBody, UpdateInfo, parse
from online_sao.errors import SwapFailed
from online_sao.manifest import Manifest
from online_sao.types import ProbeTokens

IDS = [5, 6, 7, 8]


def write(folder: Path, seed: int) -> tuple[UpdateInfo, list[float]]:
    """A version of a tiny model; with the log-probabilities of `IDS`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw)
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=256, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=256,
        initializer_range=0.3, bos_token_id=None, eos_token_id=0,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([IDS])).logits[0, :-1].log_softmax(-1)
    scores = logits.gather(1, torch.tensor(IDS[1:])[:, None])[:, 0].tolist()
    manifest = Manifest.describe(folder, ProbeTokens(tuple(IDS), tuple(scores)))
    (folder / "manifest.json").write_text(manifest.to_json())
    return UpdateInfo(path=str(folder), version=seed, sha256=manifest.sha256), scores


class World:
    def __init__(self, root: Path) -> None:
        made = [write(root / f"v{n}", n) for n in (0, 1, 2)]
        self.infos = [info for info, _ in made]
        self.scores = [scores for _, scores in made]
        options = Options(root / "v0", 0, dtype="float32", max_model_len=128, silence_s=0.6)
        self.backend = EmbeddedBackend(options)

    async def serves(self, number: int) -> None:
        """Label, hash, probes and fresh computation all belong to version `number`."""
        facts = self.backend.status()
        assert (facts["version"], facts["sha256"]) == (number, self.infos[number].sha256)
        assert facts["probe"]["logprobs"] == pytest.approx(self.scores[number], abs=1e-4)
        assert await self.backend.score(IDS) == pytest.approx(self.scores[number], abs=1e-4)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncGenerator[World, None]:
    made = World(tmp_path)
    await made.backend.start()
    yield made
    await made.backend.stop()


async def test_stage_update_finish(world: World) -> None:
    await world.backend.stage(world.infos[1])
    await world.serves(0)
    await world.backend.update(world.infos[1])
    await world.serves(1)
    await world.backend.finish("1")
    await world.backend.revert()  # nothing is left to revert
    await world.serves(1)


async def test_an_update_stages_by_itself_and_revert_or_resume_undo_it(world: World) -> None:
    for undo in (world.backend.revert, world.backend.resume):
        await world.backend.update(world.infos[1])
        await world.serves(1)
        await undo()
        await world.serves(0)


async def test_updates_out_of_order_are_refused(world: World) -> None:
    with pytest.raises(SwapFailed, match="no update"):
        await world.backend.finish("1")
    await world.backend.update(world.infos[1])
    with pytest.raises(SwapFailed, match="not finished"):
        await world.backend.update(world.infos[2])
    with pytest.raises(SwapFailed, match="no update"):
        await world.backend.finish("2")
    await world.backend.finish("1")
    await world.serves(1)


async def test_an_update_that_was_given_up_while_it_was_read_never_comes_in(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, go_on = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    original: Callable[..., Any] = world.backend._load

    def slow(*args: Any) -> Any:
        loop.call_soon_threadsafe(reading.set)
        asyncio.run_coroutine_threadsafe(go_on.wait(), loop).result()
        return original(*args)

    monkeypatch.setattr(world.backend, "_load", slow)
    update = asyncio.create_task(world.backend.update(world.infos[1]))
    await reading.wait()
    await world.backend.revert()  # does not wait for the slow disk
    go_on.set()
    with pytest.raises(SwapFailed, match="given up"):
        await update
    await world.serves(0)


async def test_weights_that_do_not_run_are_taken_out_at_once(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = world.backend._measure_probe
    failures = iter([True])

    async def fail_once() -> None:
        if next(failures, False):
            raise RuntimeError("no such kernel")
        await original()

    monkeypatch.setattr(world.backend, "_measure_probe", fail_once)
    with pytest.raises(SwapFailed, match="no such kernel"):
        await world.backend.update(world.infos[1])
    await world.serves(0)


async def test_silence_undoes_an_open_update_and_goes_on(world: World) -> None:
    await world.backend.pause()
    await world.backend.update(world.infos[1])
    body = parse(
        GenerateBody,
        b'{"request_id":"r","token_ids":[5],"sampling_params":{"max_tokens":2,"ignore_eos":true},'
        b'"output_mode":"text"}',
    )
    async with asyncio.timeout(10):
        chunks = [chunk async for chunk in world.backend.generate(body)]
    assert {span.version for span in chunks[-1].version_spans} == {0}
    await world.serves(0)


async def test_a_controller_that_is_heard_keeps_its_pause(world: World) -> None:
    await world.backend.pause()
    for _ in range(5):
        world.backend.touch()
        await asyncio.sleep(0.3)
    assert world.backend.status()["paused"]
    await world.backend.resume()
