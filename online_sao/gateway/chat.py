"""`POST /v1/chat/completions`: from the request to a turn, and the turn to the wire."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from online_sao.gateway.body import read_object
from online_sao.gateway.problems import ApiError
from online_sao.gateway.record import ReplyRecord
from online_sao.gateway.replies import ReplyShape, Streamed, Whole
from online_sao.gateway.services import Services
from online_sao.gateway.turn import Turn
from online_sao.gateway.wire import ChatRequest, parse_chat
from online_sao.types import ROLLOUT_PREFIX, RolloutRequest, new_id, utc_now

T = TypeVar("T")

SESSION_PREFIX = "sess_"
_SESSION_CHARS = 128


def chat_route(services: Services) -> Route:
    """The chat endpoint, as a plain route: it asks nothing of FastAPI, whose own costs 0.3 ms."""

    async def chat(request: Request) -> Response:
        try:
            asked = parse_chat(await read_object(request))
            options = read_options(asked, request.headers)
            _check_against_settings(asked, services)
        except ApiError:
            services.metrics.chats.labels("refused").inc()
            raise
        return ChatReply(services, asked, options)

    return Route("/v1/chat/completions", chat, methods=["POST"])


@dataclass(frozen=True, slots=True)
class Options:
    """What can be said in a header, in `sao` or in `metadata`."""

    session_id: str
    train: bool
    episode_id: str | None = None


def read_options(asked: ChatRequest, headers: Mapping[str, str]) -> Options:
    """Session, episode and opt-out, from wherever they stand. Raises ApiError 400 for two values.

    Without a session id a tool episode's chats are one session, any other chat one of its own.
    """
    told = asked.metadata
    episode = _said_once(
        "episode_id", headers.get("x-episode-id"), asked.sao.episode_id, told.get("episode_id")
    )
    session = _said_once(
        "session_id", headers.get("x-session-id"), asked.sao.session_id, told.get("session_id")
    )
    if session is None:
        session = (episode or new_id(SESSION_PREFIX))[:_SESSION_CHARS]
    if not 0 < len(session) <= _SESSION_CHARS:
        raise ApiError(
            400,
            "invalid_value",
            f"A session id has 1 to {_SESSION_CHARS} characters.",
            param="session_id",
        )
    wishes = [
        _flag(headers.get("x-sao-train"), "X-SAO-Train"),
        asked.sao.train,
        _flag(told.get("train"), "metadata.train"),
    ]
    return Options(session, train=_said_once("train", *wishes) is not False, episode_id=episode)


def _said_once(name: str, *values: T | None) -> T | None:
    """The one value that was given, however often. Raises ApiError 400 for different ones."""
    said = {value for value in values if value is not None}
    if len(said) > 1:
        message = f"`{name}` is given twice (header, `sao`, `metadata`), with different values."
        raise ApiError(400, "conflicting_parameters", message, param=name)
    return said.pop() if said else None


def _flag(text: str | None, name: str) -> bool | None:
    if text is None:
        return None
    if text.lower() not in ("true", "false"):
        raise ApiError(400, "invalid_value", f"`{name}` is `true` or `false`.", param=name)
    return text.lower() == "true"


def _check_against_settings(asked: ChatRequest, services: Services) -> None:
    """Raise ApiError for a model we do not serve (404) and a reply no context could hold (400)."""
    policy = services.settings.policy
    if asked.model != policy.served_name:
        raise ApiError(
            404,
            "model_not_found",
            f"This service serves the model `{policy.served_name}` alone.",
            param="model",
        )


class ChatReply(Response):
    """Runs a turn, and ends it when the client leaves or the server stops."""

    def __init__(self, services: Services, asked: ChatRequest, options: Options) -> None:
        super().__init__()
        self._services = services
        self._asked = asked
        self._options = options

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer; raises ApiError when there is no place."""
        try:
            with self._services.admission.place():
                await self._answer(receive, send)
        except ApiError:
            self._services.metrics.chats.labels("rejected").inc()
            raise

    async def _answer(self, receive: Receive, send: Send) -> None:
        request = self._rollout()
        turn = Turn(self._services, ReplyRecord(request, keep_content=self._asked.store))
        shape = ReplyShape(
            inference_id=request.id,
            created=int(request.created_at.timestamp()),
            model=self._asked.model,
            logprobs=self._asked.logprobs,
            include_usage=self._asked.include_usage,
        )
        sink: Streamed | Whole = Streamed(shape, send) if self._asked.stream else Whole(shape, send)
        work = asyncio.create_task(turn.run(sink))
        watch = asyncio.create_task(_left(receive))
        try:
            while not work.done():
                both = {work, watch}
                done, _ = await asyncio.wait(
                    both, timeout=sink.silence_left_s(), return_when=asyncio.FIRST_COMPLETED
                )
                if watch in done and not work.done():
                    turn.client_left = True
                    work.cancel()
                    await asyncio.wait({work})
                elif not done and sink.silence_left_s() == 0.0:
                    await sink.ping()
        finally:
            watch.cancel()
            work.cancel()
            await asyncio.wait({work, watch})
        if not work.cancelled():
            work.result()

    def _rollout(self) -> RolloutRequest:
        asked, options = self._asked, self._options
        messages = tuple(message.to_message() for message in asked.messages)
        return RolloutRequest(
            id=new_id(ROLLOUT_PREFIX),
            created_at=utc_now(),
            messages=messages,
            sampling=asked.to_sampling(),
            session_id=options.session_id,
            user_hash=self._services.keys.user_hash(asked.user),
            stream=asked.stream,
            train=options.train,
            episode_id=options.episode_id,
        )


async def _left(receive: Receive) -> None:
    """Returns when the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass
