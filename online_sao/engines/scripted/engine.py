"""The double in process: the `Engine` seam without a wire."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from online_sao.engines import wire
from online_sao.engines.scripted.backend import Faults, ScriptedBackend
from online_sao.errors import (
    EngineRefused,
    EngineUnavailable,
    SwapFailed,
    WeightsNotDelivered,
)
from online_sao.types import (
    JSON,
    Delivery,
    EngineStatus,
    Message,
    PolicyVersion,
    RenderedPrompt,
    ReplyChunk,
    Sampling,
)


class ScriptedEngine:
    """The double in process: the `Engine` seam over a `ScriptedBackend`."""

    def __init__(
        self,
        *,
        version: int = 0,
        tokens_per_s: float = 0.0,
        replies: Sequence[str] = (),
        model: str = "online-sao",
        max_model_len: int = 2048,
        swap_timeout_s: float = 30.0,
        probe_tolerance: float = 0.35,
    ) -> None:
        self.backend = ScriptedBackend(
            version=version,
            tokens_per_s=tokens_per_s,
            replies=replies,
            model=model,
            max_model_len=max_model_len,
        )
        self._swap_timeout_s, self._tolerance = swap_timeout_s, probe_tolerance

    @property
    def faults(self) -> Faults:
        """What goes wrong; change it at any time."""
        return self.backend.faults

    async def render(
        self, messages: Sequence[Message], *, tools: Sequence[JSON] = ()
    ) -> RenderedPrompt:
        """Token ids of a chat."""
        plain = [{"role": m.role, "content": m.content} for m in messages]
        if not plain:
            raise EngineRefused("messages is empty", param="messages")
        return RenderedPrompt(tuple(self.backend.render(wire.ChatBody(messages=plain))))

    async def generate(
        self, prompt: RenderedPrompt, sampling: Sampling, *, request_id: str
    ) -> AsyncGenerator[ReplyChunk, None]:
        """One reply, a token per chunk."""
        body = wire.parse(
            wire.GenerateBody,
            wire.dumps(
                {
                    "request_id": request_id,
                    "token_ids": list(prompt.token_ids),
                    "sampling_params": wire.sampling_to_wire(sampling),
                    "output_mode": "text",
                }
            ),
        )
        self.backend.check(body)
        async with aclosing(self.backend.generate(body)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def load_version(self, version: PolicyVersion, fallback: PolicyVersion) -> Delivery:
        """Swap as a real controller does; the folder's manifest is checked where there is one."""
        began = time.monotonic()
        try:
            async with asyncio.timeout(self._swap_timeout_s):
                paused_s, error = await self._swap(version)
        except (SwapFailed, TimeoutError) as failure:
            await self.backend.resume()
            if isinstance(failure, SwapFailed):
                raise
            raise SwapFailed(f"version {version.number} was not taken: {failure}") from failure
        total = time.monotonic() - began
        return Delivery(version.number, version.sha256, error, paused_s, total)

    async def _swap(self, version: PolicyVersion) -> tuple[float, float]:
        info = wire.UpdateInfo(path=version.path, version=version.number, sha256=version.sha256)
        await self.backend.stage(info)
        paused_at = time.monotonic()
        await self.backend.pause()
        await self.backend.update(info)
        served = self.backend.status()
        if served["sha256"] != version.sha256:
            raise WeightsNotDelivered("scripted: the engine serves other weights than were sent")
        error = abs(self.faults.probe_offset)
        if not error <= self._tolerance:
            raise WeightsNotDelivered(f"the probe tokens are off by {error:.3g} nats")
        await self.backend.finish(str(version.number))
        await self.backend.resume()
        return time.monotonic() - paused_at, error

    async def status(self) -> EngineStatus:
        """What is served now."""
        if self.faults.unavailable:
            raise EngineUnavailable("scripted: the engine is not there")
        facts = self.backend.status()
        return EngineStatus(
            boot_id=facts["boot_id"],
            version=facts["version"],
            paused=facts["paused"],
            model=facts["model"],
            max_model_len=facts["max_model_len"],
            in_flight=facts["in_flight"],
        )

    async def recover(self) -> None:
        """Resume if some dead controller left it paused."""
        if self.backend.status()["paused"]:
            await self.backend.resume()

    async def aclose(self) -> None:
        """Nothing to close."""
