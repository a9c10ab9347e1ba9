"""A whole-version swap as its controller: send, prove, finish; on any failure, back.

With an engine of ours the new weights are read and checked before the pause, and a revert puts
the old ones back at once. vLLM takes no weights before the pause and cannot revert: there the
fallback's weights are sent again. Either way the time is bounded, whatever the engine does.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from online_sao.engines.transport import Wire
from online_sao.errors import (
    EngineError,
    EngineRefused,
    SwapFailed,
    VersionFolderError,
    WeightsNotDelivered,
)
from online_sao.manifest import Manifest
from online_sao.types import Delivery, PolicyVersion

logger = logging.getLogger(__name__)

WAY_BACK_SHARE = 0.25
WAY_BACK_MAX_S = 10.0
"""Of the swap's time-out, what is kept for putting the old weights back."""


class Swapper:
    """Loads versions into the engine behind `wire`, one at a time."""

    def __init__(self, wire: Wire, *, swap_timeout_s: float, probe_tolerance: float) -> None:
        self._wire = wire
        self._timeout_s, self._tolerance = swap_timeout_s, probe_tolerance
        self._way_back_s = min(WAY_BACK_MAX_S, WAY_BACK_SHARE * swap_timeout_s)
        self._lock = asyncio.Lock()

    async def swap(self, version: PolicyVersion, fallback: PolicyVersion) -> Delivery:
        """Serve `version`, proved; or SwapFailed / WeightsNotDelivered with `fallback` serving."""
        async with self._lock:
            began = time.monotonic()
            touched = False
            try:
                async with asyncio.timeout(self._timeout_s - self._way_back_s):
                    manifest = await asyncio.to_thread(_read_and_verify, version)
                    stages = await self._stages()
                    touched = True
                    if stages:
                        paused_s, off_by = await self._swap_ours(version, manifest)
                    else:
                        paused_s, off_by = await self._swap_vllm(version, manifest)
            except asyncio.CancelledError:
                if touched:
                    await asyncio.shield(asyncio.ensure_future(self._go_back(fallback)))
                raise
            except (EngineError, VersionFolderError, TimeoutError) as error:
                if touched:
                    await self._go_back(fallback)
                raise _named(version, error) from error
            return Delivery(
                version.number, manifest.sha256, off_by, paused_s, time.monotonic() - began
            )

    # -- an engine of ours ---------------------------------------------------------------------

    async def _swap_ours(self, version: PolicyVersion, manifest: Manifest) -> tuple[float, float]:
        info = _update_info(version)
        await self._post("/start_weight_update", info)
        paused_at = time.monotonic()
        await self._pause()
        await self._post("/update_weights", info)
        facts = await self._get("/weight_info")
        if facts.get("sha256") != manifest.sha256:
            raise WeightsNotDelivered(
                f"the engine read weights of SHA-256 {str(facts.get('sha256'))[:64]}, "
                f"sent were {manifest.sha256}"
            )
        probe = facts.get("probe") or {}
        if tuple(probe.get("token_ids") or ()) != manifest.probes.token_ids:
            raise WeightsNotDelivered("the engine answered for other probe tokens")
        error = self._probe_error(manifest, probe.get("logprobs") or ())
        await self._finish(version)
        await self._post("/resume", None)
        return time.monotonic() - paused_at, error

    # -- a plain vLLM --------------------------------------------------------------------------

    async def _swap_vllm(self, version: PolicyVersion, manifest: Manifest) -> tuple[float, float]:
        paused_at = time.monotonic()
        await self._send_paused(version)
        paused_s = time.monotonic() - paused_at
        body = {
            "request_id": f"probe-{version.number}-{time.time_ns()}",
            "token_ids": list(manifest.probes.token_ids),
            "sampling_params": {"temperature": 0.0, "max_tokens": 1, "prompt_logprobs": 0},
            "output_mode": "text",
        }
        answer = await self._post("/inference/v1/generate", body)
        found = read_prompt_logprobs(answer, manifest.probes.token_ids)
        return paused_s, self._probe_error(manifest, found)

    async def _send_paused(self, version: PolicyVersion) -> None:
        await self._pause()
        await self._post("/start_weight_update", None)
        await self._post("/update_weights", _update_info(version))
        await self._finish(version)
        await self._post("/resume", None)

    # -- both ----------------------------------------------------------------------------------

    def _probe_error(self, manifest: Manifest, found: Sequence[float]) -> float:
        error = probe_error(manifest.probes.logprobs, found)
        if not error <= self._tolerance:
            raise WeightsNotDelivered(
                f"the probe tokens' log-probabilities are off by {error:.3g} nats "
                f"(allowed: {self._tolerance:g})"
            )
        return error

    async def _finish(self, version: PolicyVersion) -> None:
        await self._post("/finish_weight_update", {"weight_version": str(version.number)})
        label = (await self._get("/weight_info")).get("weight_version")
        if label != str(version.number):
            raise WeightsNotDelivered(f"the engine says it serves {str(label)[:40]!r}")

    async def _go_back(self, fallback: PolicyVersion) -> None:
        """Make the engine serve `fallback` and decode; log where even that fails."""
        try:
            async with asyncio.timeout(self._way_back_s):
                try:
                    await self._post("/revert_weight_update", None)
                    await self._post("/resume", None)
                except EngineRefused:  # a vLLM: no such path
                    await self._send_paused(fallback)
                    return
                if (await self._wire.status(timeout_s=self._way_back_s)).version != fallback.number:
                    await self._send_again(fallback)
        except (EngineError, TimeoutError) as error:
            logger.error("action=swap_way_back_failed version=%d %s", fallback.number, error)

    async def _send_again(self, fallback: PolicyVersion) -> None:
        """Load a version that had been finished before the failure showed."""
        info = _update_info(fallback)
        await self._post("/start_weight_update", info)
        await self._post("/update_weights", info)
        await self._finish(fallback)

    async def _stages(self) -> bool:
        try:
            facts = await self._get("/status")
        except EngineRefused:
            return False
        return bool(facts.get("stages"))

    async def _pause(self) -> None:
        await self._wire.post(
            "/pause",
            None,
            timeout_s=self._timeout_s,
            params={"mode": "keep", "clear_cache": "true"},
        )

    async def _post(self, path: str, body: Mapping[str, Any] | None) -> Mapping[str, Any]:
        return await self._wire.post(path, body, timeout_s=self._timeout_s)

    async def _get(self, path: str) -> Mapping[str, Any]:
        return await self._wire.get(path, timeout_s=self._timeout_s)


def _read_and_verify(version: PolicyVersion) -> Manifest:
    folder = Path(version.path)
    manifest = Manifest.read(folder)
    if manifest.sha256 != version.sha256:
        raise VersionFolderError(f"{folder} holds other weights than version {version.number}'s")
    manifest.verify(folder)
    return manifest


def _update_info(version: PolicyVersion) -> Mapping[str, Any]:
    return {
        "update_info": {
            "path": str(Path(version.path).resolve()),
            "version": version.number,
            "sha256": version.sha256,
        }
    }


def _named(version: PolicyVersion, error: Exception) -> SwapFailed:
    if isinstance(error, SwapFailed):
        return error
    reason = "it took too long" if isinstance(error, TimeoutError) else str(error)
    return SwapFailed(f"version {version.number} was not taken: {reason}")


def probe_error(expected: Sequence[float], found: Sequence[float]) -> float:
    """Largest |difference|; infinite where a number is missing or is none."""
    if len(expected) != len(found):
        return math.inf
    differences = [abs(a - b) for a, b in zip(expected, found, strict=True)]
    return math.inf if any(map(math.isnan, differences)) else max(differences, default=0.0)


def read_prompt_logprobs(answer: Mapping[str, Any], token_ids: Sequence[int]) -> list[float]:
    """log p of each prompt token but the first, from vLLM's `prompt_logprobs`."""
    entries = answer.get("prompt_logprobs") or ()
    found = []
    for token, entry in zip(token_ids[1:], entries[1:], strict=False):
        value = (entry or {}).get(str(token)) or {}
        found.append(float(value.get("logprob", math.nan)))
    return found
