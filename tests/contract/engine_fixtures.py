"""Engines to run the contract on, and tiny models made on the spot."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx

from online_sao.engines.client import HttpEngine
from online_sao.interfaces import Engine
from online_sao.manifest import Manifest
from online_sao.ports import free_port
from online_sao.types import (
    Message,
    PolicyVersion,
    ProbeTokens,
    ReplyChunk,
    Sampling,
    TokenText,
    VersionSpan,
    VersionState,
)

EOS, END_OF_TURN, START = "<|endoftext|>", "<|im_end|>", "<|im_start|>"
TEMPLATE = (
    "{% if messages[0]['role'] == 'assistant' %}{{ raise_exception('the user comes first') }}"
    "{% endif %}{% for m in messages %}"
    "{% if not loop.first and m['role'] == loop.previtem['role'] %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CORPUS = [
    "the user asks and the assistant answers in a few plain words",
    "system user assistant hello world good morning how are you today",
    "what is the name of the town by the river where the old mill stands",
]


def make_tokenizer() -> Any:
    """A byte-level BPE tokenizer of some 400 tokens with a chat template that can refuse."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=400,
            special_tokens=[EOS, START, END_OF_TURN],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    # The tokenizer's own eos is not what ends a turn: both must end a reply.
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token=EOS, pad_token=EOS)
    tokenizer.add_special_tokens({"additional_special_tokens": [START, END_OF_TURN]})
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def make_model(vocabulary: int, *, seed: int, tied: bool = False, spread: float = 3.0) -> Any:
    """A tiny random Llama whose replies are long: its end tokens are unlikely."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=tied,
        initializer_range=0.08,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config).eval().requires_grad_(False)
    head = model.get_output_embeddings().weight
    head.normal_(0.0, spread / 64**0.5)
    head[:3] = 0.0
    model.generation_config.eos_token_id = [2, 0]
    return model


def write_version(folder: Path, model: Any, tokenizer: Any, number: int) -> PolicyVersion:
    """A version folder with probe tokens computed by a plain forward pass."""
    import torch

    folder.mkdir(parents=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    ids = list(range(5, 21))
    probes = ProbeTokens(tuple(ids), tuple(score(model, ids)[1:]))
    with torch.inference_mode():
        manifest = Manifest.describe(folder, probes)
    (folder / "manifest.json").write_text(manifest.to_json())
    return policy(number, folder, manifest.sha256)


def policy(number: int, folder: Path, sha256: str) -> PolicyVersion:
    return PolicyVersion(
        number=number,
        parent=None if number == 0 else number - 1,
        path=str(folder),
        sha256=sha256,
        state=VersionState.STABLE,
        created_at=datetime.now(UTC),
    )


def score(model: Any, ids: Sequence[int], temperature: float = 1.0) -> list[float]:
    """log p of each token given those before it (NaN for the first), by a plain forward pass."""
    import torch

    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([list(ids)])).logits[0, :-1].float() / temperature
        chosen = logits.log_softmax(-1).gather(1, torch.tensor(list(ids[1:]))[:, None])[:, 0]
    return [float("nan"), *chosen.tolist()]


@dataclass(frozen=True)
class Collected:
    """A whole reply."""

    text: str
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    tokens: tuple[TokenText, ...]
    chunks: tuple[ReplyChunk, ...]
    gaps: tuple[float, ...] = ()

    @property
    def last(self) -> ReplyChunk:
        return self.chunks[-1]

    @property
    def spans(self) -> tuple[VersionSpan, ...]:
        return self.last.version_spans


async def collect(
    engine: Engine, prompt: Any, sampling: Sampling, request_id: str = "r"
) -> Collected:
    chunks, gaps, before = [], [], time.monotonic()
    async for chunk in engine.generate(prompt, sampling, request_id=request_id):
        gaps.append(time.monotonic() - before)
        before = time.monotonic()
        chunks.append(chunk)
    return Collected(
        "".join(c.text for c in chunks),
        tuple(i for c in chunks for i in c.token_ids),
        tuple(p for c in chunks for p in c.logprobs),
        tuple(t for c in chunks for t in c.tokens),
        tuple(chunks),
        tuple(gaps),
    )


def user(text: str) -> list[Message]:
    return [Message("user", text)]


@dataclass(frozen=True)
class UnderTest:
    """One implementation, with what a test needs around it."""

    engine: Engine
    context: int
    vocabulary: int
    new_version: Callable[[], PolicyVersion]
    """A further, different version; not loaded yet."""
    serving: Callable[[], Awaitable[PolicyVersion]]
    """Load a known version and return it."""
    pause: Callable[[], Awaitable[object]]
    url: str = ""


@dataclass(frozen=True)
class Server:
    url: str
    process: subprocess.Popen[bytes]
    log: Path

    def memory_mib(self) -> float:
        import psutil

        return float(psutil.Process(self.process.pid).memory_info().rss) / 2**20


@contextlib.contextmanager
def serve(log: Path, *command: str) -> Generator[Server, None, None]:
    """An engine process; ended at the end of the context."""
    port = free_port()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-W", "error", "-m", *command, "--port", str(port)],
            stdout=output,
            stderr=output,
            env=environment,
        )
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until_healthy(url, process, log)
        yield Server(url, process, log)
    finally:
        process.terminate()
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_until_healthy(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise AssertionError(f"the engine ended with {process.returncode}: {log.read_text()}")
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{url}/health", timeout=2).status_code == 200:
                return
        time.sleep(0.1)
    raise AssertionError(f"the engine does not answer: {log.read_text()}")


def embedded_args(folder: str | Path, version: int, *more: str) -> list[str]:
    return [
        *("online_sao.engines.embedded", "--model", str(folder), "--version", str(version)),
        *("--dtype", "float32", "--threads", "1", *more),
    ]


def real_model(folder: Path) -> PolicyVersion:
    """The small real model as version 0, from the installed package; half a minute."""
    command = ["-m", "online_sao.engines.embedded.prepare", "--out", str(folder)]
    name = "HuggingFaceTB/SmolLM2-135M-Instruct"
    subprocess.run([sys.executable, *command, "--model", name], check=True, timeout=280)
    return policy(0, folder, Manifest.read(folder).sha256)


def nudged(version: PolicyVersion, folder: Path, number: int) -> PolicyVersion:
    """`version` with its last norm scaled a little: other weights, the same names."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(version.path, folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"] * (1 + 0.01 * number)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    old = Manifest.read(Path(version.path))
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    probes = ProbeTokens(old.probes.token_ids, tuple(score(model, old.probes.token_ids)[1:]))
    manifest = Manifest.describe(folder, probes)
    (folder / "manifest.json").write_text(manifest.to_json())
    return policy(number, folder, manifest.sha256)


async def until(condition: Callable[[], Awaitable[bool]], seconds: float) -> float:
    """Seconds until the condition holds; fails after `seconds`."""
    began = time.monotonic()
    while time.monotonic() - began < seconds:
        if await condition():
            return time.monotonic() - began
        await asyncio.sleep(0.02)
    raise AssertionError(f"still not so after {seconds} s")


async def post(url: str, path: str, body: Any = None) -> httpx.Response:
    async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as client:
        return await client.post(path, content=None if body is None else json.dumps(body))


@contextlib.asynccontextmanager
async def client(url: str, **options: Any) -> AsyncGenerator[HttpEngine, None]:
    engine = HttpEngine(url, model="online-sao", **options)
    try:
        yield engine
    finally:
        await engine.aclose()


class ByteVersions:
    """Version folders of one small tensor, for engines that only look at hashes."""

    def __init__(self, root: Path) -> None:
        self._root, self._count = root, 0

    def __call__(self) -> PolicyVersion:
        self._count += 1
        folder = self._root / f"v{self._count}"
        folder.mkdir(parents=True)
        header = b'{"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'
        data = len(header).to_bytes(8, "little") + header + bytes([self._count % 256])
        (folder / "model.safetensors").write_bytes(data)
        manifest = Manifest.describe(folder, ProbeTokens((1, 2, 3), (-1.0, -2.0)))
        (folder / "manifest.json").write_text(manifest.to_json())
        return policy(self._count, folder, manifest.sha256)
