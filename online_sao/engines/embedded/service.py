"""The embedded engine behind its HTTP face: requests in, replies out, whole versions swapped.

The state of an update: nothing -> staged (new weights read, hashed, built beside the old) ->
in place (decoding would use them; the old ones are kept) -> finished (the old ones are freed).
`revert`, `resume` before `finish`, and the watchdog all lead back to the old weights at once.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from online_sao.engines import wire
from online_sao.engines.embedded import weights as loading
from online_sao.engines.embedded.chat import Chat
from online_sao.engines.embedded.decoder import make_decoder
from online_sao.engines.embedded.reply import Reply
from online_sao.engines.embedded.scheduler import Event, Scheduler
from online_sao.engines.embedded.weights import Weights
from online_sao.errors import EngineRefused, ModelError, SwapFailed, VersionFolderError
from online_sao.types import ReplyChunk

logger = logging.getLogger(__name__)

MAX_SCORED_TOKENS = 512
WATCH_S = 0.25
CROWD, CROWD_WAIT_S = 8, 0.05
"""From so many replies in a step on, decoding waits for their writing, at most so long (s)."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Options:
    """How the engine was started."""

    model: Path
    version: int
    served_name: str = "online-sao"
    dtype: str = "auto"
    max_num_seqs: int = 32
    max_model_len: int = 2048
    threads: int = 1
    silence_s: float = 30.0


class EmbeddedBackend:
    """See the module's text. Construct, then `start` inside the event loop."""

    def __init__(self, options: Options) -> None:
        torch.set_num_threads(options.threads)
        self._options = options
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._dtype = loading.choose_dtype(options.dtype, self._device)
        self._serving = self._load(options.model, options.version)
        self._chat = Chat(options.model, self._serving.model.config)
        self._max_model_len = min(options.max_model_len, self._chat.max_positions)
        decoder = make_decoder(
            self._serving.model,
            slots=options.max_num_seqs,
            capacity=self._max_model_len,
            sample=(self._serving.probes.token_ids or tuple(range(8))) * 4,
        )
        self._scheduler = Scheduler(
            decoder,
            options.version,
            max_rows=options.max_num_seqs,
            threads=options.threads,
            deliver=self._deliver,
        )
        self._boot_id = f"embedded-{uuid.uuid4().hex[:12]}"
        self._probe: list[float] = []
        self._staged: Weights | None = None
        self._previous: Weights | None = None
        self._attempt = 0
        """Counts given-up updates, so that one that was given up cannot be staged any more."""
        self._staging, self._updating = asyncio.Lock(), asyncio.Lock()
        self._heard = time.monotonic()
        self._watch: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start decoding and the watchdog."""
        self._loop = asyncio.get_running_loop()
        self._scheduler.start()
        await self._measure_probe()
        self._watch = asyncio.create_task(self._watchdog())

    async def stop(self) -> None:
        """End; replies in flight end with an error."""
        if self._watch is not None:
            self._watch.cancel()
        await asyncio.to_thread(self._scheduler.stop)

    # -- facts -------------------------------------------------------------------------------

    def status(self) -> Mapping[str, Any]:
        """What this process is and serves."""
        return {
            "boot_id": self._boot_id,
            "version": self._serving.version,
            "sha256": self._serving.sha256,
            "probe": {
                "token_ids": list(self._serving.probes.token_ids),
                "logprobs": self._probe,
            },
            "paused": self._scheduler.paused,
            "model": self._options.served_name,
            "max_model_len": self._max_model_len,
            "in_flight": self._scheduler.in_flight(),
            "stages": True,
            "dtype": str(self._dtype).removeprefix("torch."),
        }

    # -- replies -----------------------------------------------------------------------------

    def render(self, chat: wire.ChatBody) -> list[int]:
        """The prompt's ids. Raises EngineRefused."""
        ids = self._chat.render(chat.messages, chat.tools)
        self._check_length(len(ids), "messages")
        return ids

    def check(self, body: wire.GenerateBody) -> None:
        """Raises EngineRefused where a request cannot be served."""
        sampling, asked = body.sampling_params.to_sampling(), body.sampling_params
        vocabulary = self._chat.vocabulary_size
        self._check_length(len(body.token_ids), "token_ids")
        ids_of = {
            "token_ids": body.token_ids,
            "logit_bias": [token for token, _ in sampling.logit_bias],
            "allowed_token_ids": list(sampling.allowed_token_ids),
        }
        for name, ids in ids_of.items():
            if any(not 0 <= token < vocabulary for token in ids):
                raise EngineRefused(
                    f"{name} holds a token id outside the vocabulary of {vocabulary}", param=name
                )
        room = self._max_model_len - len(body.token_ids)
        for name, count in (
            ("max_tokens", sampling.max_tokens or 1),
            ("min_tokens", sampling.min_tokens),
        ):
            if count > room:
                raise EngineRefused(
                    f"{name} is {count}, but the context of {self._max_model_len} tokens leaves "
                    f"{room} after a prompt of {len(body.token_ids)}",
                    param=name,
                    code="context_length_exceeded",
                )
        if asked.prompt_logprobs is not None and (
            body.stream or not 2 <= len(body.token_ids) <= MAX_SCORED_TOKENS
        ):
            raise EngineRefused(
                f"prompt_logprobs takes 2 to {MAX_SCORED_TOKENS} tokens and no stream",
                param="prompt_logprobs",
            )

    async def generate(self, body: wire.GenerateBody) -> AsyncGenerator[ReplyChunk, None]:
        """One reply; closing the generator drops the work."""
        sampling = body.sampling_params.to_sampling()
        inbox: asyncio.Queue[ReplyChunk | Exception] = asyncio.Queue()
        room = self._max_model_len - len(body.token_ids)
        reply = Reply(
            request_id=body.request_id,
            prompt_ids=tuple(body.token_ids),
            sampling=sampling,
            max_tokens=min(sampling.max_tokens or room, room),
            eos_ids=self._chat.eos_ids,
            vocabulary=self._chat.vocabulary,
            sink=inbox.put_nowait,
            ignore_eos=body.sampling_params.ignore_eos,
            banned=self._chat.banned(sampling.bad_words),
        )
        self._scheduler.submit(reply)
        done = False
        try:
            while not done:
                items = [await inbox.get()]
                while not inbox.empty():
                    items.append(inbox.get_nowait())
                chunks = [item for item in items if isinstance(item, ReplyChunk)]
                done = bool(chunks) and chunks[-1].finish_reason is not None
                if chunks:
                    yield wire.merge(chunks)
                for item in items:
                    if isinstance(item, Exception):
                        done = True
                        raise item
        finally:
            if not done:
                self._scheduler.abort(reply)

    async def score(self, token_ids: list[int]) -> list[float]:
        """log p of every token but the first."""
        return await self._between_steps(lambda: self._scheduler.score(token_ids))

    def abort(self, request_ids: list[str]) -> None:
        """Drop these requests."""
        self._scheduler.abort_named(frozenset(request_ids))

    # -- control -----------------------------------------------------------------------------

    def touch(self) -> None:
        """A controller was heard."""
        self._heard = time.monotonic()

    async def pause(self) -> None:
        """Hold decoding, keep what is in flight."""
        await self._between_steps(self._scheduler.pause)
        logger.info("action=engine_paused")

    async def resume(self) -> None:
        """Go on; an update that was not finished is reverted first."""
        await self.revert()
        await self._between_steps(self._scheduler.resume)
        logger.info("action=engine_resumed version=%d", self._serving.version)

    async def stage(self, info: wire.UpdateInfo) -> None:
        """Read, hash and build new weights while decoding goes on. Raises SwapFailed."""
        attempt = self._attempt
        async with self._staging:
            try:
                weights = await asyncio.to_thread(self._load_aside, info)
            except (ModelError, VersionFolderError) as error:
                raise SwapFailed(str(error)) from error
        self.touch()
        problem = None
        if weights.sha256 != info.sha256:
            problem = f"version {info.version} has SHA-256 {weights.sha256}, not {info.sha256}"
        elif attempt != self._attempt:
            problem = f"the update to version {info.version} was given up meanwhile"
        if problem is not None:
            loading.retire(weights.model)
            raise SwapFailed(problem)
        self._drop_staged()
        self._staged = weights
        logger.info("action=weights_staged version=%d", info.version)

    async def update(self, info: wire.UpdateInfo) -> None:
        """Put the staged weights in place between two steps. Raises SwapFailed."""
        if self._staged is None or self._staged.sha256 != info.sha256:
            await self.stage(info)
        async with self._updating:
            if self._staged is None or self._previous is not None:
                raise SwapFailed("another update is not finished")
            staged, self._staged = self._staged, None
            staged.version = info.version
            self._previous = self._serving
            try:
                await self._put_in_place(staged)
            except Exception as error:
                # Whatever refused the new weights, the old ones must serve.
                await self._restore()
                raise SwapFailed(f"version {info.version} does not run: {error}") from error
        self.touch()

    async def finish(self, label: str) -> None:
        """The update is good: free the old weights. Raises SwapFailed."""
        async with self._updating:
            if self._previous is None or label != str(self._serving.version):
                raise SwapFailed(f"no update to {label[:40]!r} is in place")
            previous, self._previous = self._previous, None
            await asyncio.to_thread(loading.retire, previous.model)
        logger.info("action=weights_live version=%d", self._serving.version)

    async def revert(self) -> None:
        """Put the old weights back, drop what was staged; never waits for a slow disk."""
        self._attempt += 1
        self._drop_staged()
        if self._previous is not None:
            async with self._updating:
                await self._restore()

    # -- inside ------------------------------------------------------------------------------

    def _load(
        self, folder: Path, version: int, shapes: Mapping[str, tuple[int, ...]] | None = None
    ) -> Weights:
        return loading.load_weights(
            folder, version, dtype=self._dtype, device=self._device, shapes=shapes
        )

    def _load_aside(self, info: wire.UpdateInfo) -> Weights:
        torch.set_num_threads(1)  # in this helper thread alone: decoding keeps its cores
        return self._load(Path(info.path), info.version, self._serving.shapes)

    async def _put_in_place(self, weights: Weights) -> None:
        self._serving = weights
        await self._between_steps(lambda: self._scheduler.swap(weights.model, weights.version))
        await self._measure_probe()

    async def _restore(self) -> None:
        previous, self._previous = self._previous, None
        if previous is None:
            return
        failed = self._serving
        await self._put_in_place(previous)
        await asyncio.to_thread(loading.retire, failed.model)
        logger.warning("action=weights_reverted from=%d to=%d", failed.version, previous.version)

    async def _measure_probe(self) -> None:
        ids = self._serving.probes.token_ids
        self._probe = await self.score(list(ids)) if len(ids) > 1 else []

    def _drop_staged(self) -> None:
        if self._staged is not None:
            loading.retire(self._staged.model)
            self._staged = None

    def _check_length(self, count: int, param: str) -> None:
        if count >= self._max_model_len:
            raise EngineRefused(
                f"this model's context is {self._max_model_len} tokens, and the prompt is {count} "
                "tokens; a reply needs at least one more",
                param=param,
                code="context_length_exceeded",
            )

    async def _between_steps(self, work: Callable[[], T]) -> T:
        return await asyncio.wrap_future(self._scheduler.call(work))

    def _deliver(self, events: Sequence[Event]) -> None:
        """From the decode thread: one hop into the event loop for a whole step.

        With many replies it waits until they are written out: the interpreter runs one thread at
        a time, and changing over at every write costs more than standing back for once.
        """
        if not events or self._loop.is_closed():
            return
        written = threading.Event()
        self._loop.call_soon_threadsafe(self._hand_out, events, written)
        if len(events) >= CROWD:
            written.wait(CROWD_WAIT_S)

    def _hand_out(self, events: Sequence[Event], written: threading.Event) -> None:
        for reply, event in events:
            reply.sink(event)
        # The replies' tasks run in the loop's next turns: read, then write.
        self._loop.call_soon(self._loop.call_soon, self._loop.call_soon, written.set)

    async def _watchdog(self) -> None:
        """A controller that falls silent must not leave the engine paused or half updated."""
        while True:
            await asyncio.sleep(WATCH_S)
            open_update = self._staged is not None or self._previous is not None
            silent = time.monotonic() - self._heard > self._options.silence_s
            if silent and not self._updating.locked() and (self._scheduler.paused or open_update):
                logger.error("action=controller_silent detail=going on with the old weights")
                self.touch()
                await self.resume()
