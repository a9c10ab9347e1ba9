"""Tool episodes: `POST /v1/episodes`, `POST /v1/episodes/{id}/close`, `GET /v1/episodes/{id}`.

A client declares an episode, sends each chat of it with the header `x-episode-id` (or the field
`sao.episode_id`), and closes it when the task is done; one that nobody closes is closed by itself
after `judging.episode_idle_s`. Its replies are judged after that, and trained together or not at
all. A chat that is in flight when the episode is closed still belongs to it.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from online_sao.errors import UnknownRecord
from online_sao.gateway.body import checked, printable, read_object
from online_sao.gateway.problems import ApiError
from online_sao.gateway.services import Services
from online_sao.gateway.wire import EpisodeRequest
from online_sao.types import EPISODE_PREFIX, Episode, LedgerState, new_id


def episodes_router(services: Services) -> APIRouter:
    """The three endpoints."""
    router = APIRouter()
    store = services.store

    @router.post("/v1/episodes")
    async def declare(request: Request) -> Response:
        """201 with the episode's id. The body is empty, or an empty object."""
        await _check_body(request)
        return JSONResponse(shown(await store.open_episode(new_id(EPISODE_PREFIX))), 201)

    @router.post("/v1/episodes/{episode_id}/close")
    async def close(request: Request, episode_id: str) -> Response:
        """No chat joins it any more; doing it again changes nothing."""
        await _check_body(request)
        try:
            return JSONResponse(shown(await store.close_episode(episode_id)))
        except UnknownRecord:
            raise unknown_episode(episode_id) from None

    @router.get("/v1/episodes/{episode_id}")
    async def show(episode_id: str) -> Response:
        """Where it stands."""
        try:
            return JSONResponse(shown(await store.get_episode(episode_id)))
        except UnknownRecord:
            raise unknown_episode(episode_id) from None

    return router


async def _check_body(request: Request) -> None:
    if await request.body():
        checked(EpisodeRequest, await read_object(request))


def shown(episode: Episode) -> dict[str, Any]:
    """An episode on the wire; times in Unix seconds, replies counted by where they stand."""
    closed = episode.closed_at
    return {
        "id": episode.id,
        "object": "episode",
        "created_at": int(episode.created_at.timestamp()),
        "closed_at": None if closed is None else int(closed.timestamp()),
        "status": "open" if closed is None else "closed",
        "rewards": None if episode.rewards is None else episode.rewards.value,
        "replies": sum(episode.counts.values()),
        "counts": {state.value: episode.counts.get(state, 0) for state in LedgerState},
    }


def unknown_episode(episode_id: str) -> ApiError:
    """404, naming the episode."""
    message = f"There is no episode `{printable(episode_id)}`."
    return ApiError(404, "episode_not_found", message, param="episode_id")


def closed_episode(episode_id: str) -> ApiError:
    """409: declare a new one."""
    return ApiError(
        409,
        "episode_closed",
        f"The episode `{printable(episode_id)}` is closed; declare a new one.",
        param="episode_id",
        headers={"x-should-retry": "false"},
    )
