"""The controller's side of a swap, above all with a plain vLLM, which cannot stage or revert."""

from __future__ import annotations

import asyncio
import json
import math
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest

from online_sao.engines.client import HttpEngine
from online_sao.engines.swap import probe_error, read_prompt_logprobs
from online_sao.errors import SwapFailed, WeightsNotDelivered
from online_sao.manifest import Manifest
from online_sao.types import PolicyVersion, ProbeTokens, VersionState

PROBES = ProbeTokens((5, 6, 7), (-1.0, -2.0))


def version(root: Path, number: int) -> PolicyVersion:
    folder = root / f"v{number}"
    folder.mkdir()
    header = b'{"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'
    data = len(header).to_bytes(8, "little") + header + bytes([number])
    (folder / "model.safetensors").write_bytes(data)
    manifest = Manifest.describe(folder, PROBES)
    (folder / "manifest.json").write_text(manifest.to_json())
    now = datetime.now(UTC)
    return PolicyVersion(number, None, str(folder), manifest.sha256, VersionState.STABLE, now)


@dataclass
class PlainVllm:
    """A vLLM without our extra paths: labels, pauses, updates; the probes of what it serves."""

    label: str = "0"
    paused: bool = False
    calls: list[str] = field(default_factory=list)
    fail_on: str = ""
    hang_on: str = ""
    probe_off: float = 0.0
    sent: int = 0
    hanging: asyncio.Event = field(default_factory=asyncio.Event)

    async def answer(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        self.calls.append(path)
        if path == self.hang_on:
            self.hanging.set()
            await asyncio.sleep(60)
        if path == self.fail_on:
            self.fail_on = ""
            return httpx.Response(500, json={"error": "scripted"})
        body: dict[str, Any] = json.loads(request.content) if request.content else {}
        if path == "/pause":
            self.paused = True
        elif path == "/resume":
            self.paused = False
        elif path == "/update_weights":
            assert self.paused
            self.sent = body["update_info"]["version"]
        elif path == "/finish_weight_update":
            self.label = body["weight_version"]
        elif path == "/weight_info":
            return httpx.Response(200, json={"weight_version": self.label})
        elif path == "/inference/v1/generate":
            assert not self.paused
            off = self.probe_off if self.sent == 1 else 0.0
            entries = [{str(i): {"logprob": p + off}} for i, p in ((6, -1.0), (7, -2.0))]
            return httpx.Response(200, json={"prompt_logprobs": [None, *entries]})
        elif path != "/start_weight_update":
            return httpx.Response(404, json={"detail": "Not Found"})
        return httpx.Response(200, json={})

    def engine(self, timeout_s: float = 10.0) -> HttpEngine:
        transport = httpx.MockTransport(self.answer)
        return HttpEngine("http://vllm", swap_timeout_s=timeout_s, transport=transport)


async def test_a_plain_vllm_is_paused_updated_labelled_resumed_and_probed(tmp_path: Path) -> None:
    vllm = PlainVllm()
    delivery = await vllm.engine().load_version(version(tmp_path, 1), version(tmp_path, 0))
    assert vllm.calls == [
        "/status", "/pause", "/start_weight_update", "/update_weights", "/finish_weight_update",
        "/weight_info", "/resume", "/inference/v1/generate",
    ]  # fmt: skip
    assert (vllm.label, vllm.paused, delivery.version, delivery.probe_error) == ("1", False, 1, 0.0)


@pytest.mark.parametrize("path", ["/pause", "/start_weight_update", "/update_weights", "/resume"])
async def test_after_a_failure_the_fallback_is_sent_again_before_anything_runs(
    tmp_path: Path, path: str
) -> None:
    vllm = PlainVllm(fail_on=path)
    with pytest.raises(SwapFailed):
        await vllm.engine().load_version(version(tmp_path, 1), version(tmp_path, 0))
    assert (vllm.label, vllm.paused, vllm.sent) == ("0", False, 0)


async def test_weights_that_did_not_arrive_are_found_out_by_the_probes(tmp_path: Path) -> None:
    vllm = PlainVllm(probe_off=0.4)
    with pytest.raises(WeightsNotDelivered, match=r"0\.4 nats"):
        await vllm.engine().load_version(version(tmp_path, 1), version(tmp_path, 0))
    assert (vllm.label, vllm.paused, vllm.sent) == ("0", False, 0)


@pytest.mark.parametrize("path", ["/pause", "/update_weights", "/revert_weight_update"])
async def test_a_swap_never_takes_longer_than_its_time_out(tmp_path: Path, path: str) -> None:
    vllm = PlainVllm(hang_on=path, fail_on="/update_weights" if "revert" in path else "")
    began = time.monotonic()
    with pytest.raises(SwapFailed):
        await vllm.engine(1.0).load_version(version(tmp_path, 1), version(tmp_path, 0))
    assert time.monotonic() - began < 1.5


async def test_a_bad_folder_never_reaches_the_engine(tmp_path: Path) -> None:
    vllm, bad = PlainVllm(), version(tmp_path, 1)
    (Path(bad.path) / "model.safetensors").write_bytes(b"half")
    with pytest.raises(SwapFailed, match="safetensors"):
        await vllm.engine().load_version(bad, version(tmp_path, 0))
    assert vllm.calls == []


async def test_a_cancelled_swap_does_not_leave_the_engine_paused(tmp_path: Path) -> None:
    vllm = PlainVllm(hang_on="/update_weights")
    swap = asyncio.create_task(
        vllm.engine().load_version(version(tmp_path, 1), version(tmp_path, 0))
    )
    await vllm.hanging.wait()
    assert vllm.paused
    vllm.hang_on = ""
    swap.cancel()
    with pytest.raises(asyncio.CancelledError):
        await swap
    assert (vllm.label, vllm.paused, vllm.sent) == ("0", False, 0)


async def test_recover_resumes_only_what_is_paused() -> None:
    calls: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        calls.append(request.url.path)
        return httpx.Response(200, json={"is_paused": len(calls) == 1})

    engine = HttpEngine("http://vllm", transport=httpx.MockTransport(answer))
    await engine.recover()
    await engine.recover()
    assert calls == ["/is_paused", "/resume", "/is_paused"]


@pytest.mark.parametrize(
    ("found", "error"),
    [((-1.0, -2.5), 0.5), ((-1.0,), math.inf), ((-1.0, math.nan), math.inf), ((), math.inf)],
)
def test_the_probes_error_is_the_largest_and_infinite_where_a_number_is_missing(
    found: tuple[float, ...], error: float
) -> None:
    assert probe_error((-1.0, -2.0), found) == error


def test_prompt_logprobs_are_read_by_token_and_missing_ones_are_nan() -> None:
    answer = {"prompt_logprobs": [None, {"6": {"logprob": -1.0}, "9": {"logprob": 0.0}}, {}]}
    first, second = read_prompt_logprobs(answer, (5, 6, 7))
    assert first == -1.0
    assert math.isnan(second)
