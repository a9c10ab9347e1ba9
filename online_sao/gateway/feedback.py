"""`POST /v1/feedback`: what a user says of one reply.

| metric_name | value |
|---|---|
| `thumbs` | true or false |
| `rating` | a number from 1 to 5 |
| `comment` | a text |
"""

from __future__ import annotations

import logging
from datetime import datetime, timedelta
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from online_sao.errors import DatabaseUnavailable, UnknownRecord, VersionConflict
from online_sao.gateway.body import checked, read_object
from online_sao.gateway.problems import ApiError
from online_sao.gateway.services import Services
from online_sao.gateway.wire import FeedbackRequest
from online_sao.types import (
    FEEDBACK_PREFIX,
    ROLLOUT_PREFIX,
    Feedback,
    FeedbackReceipt,
    new_id,
    parse_id,
    utc_now,
    uuid7_time,
)

logger = logging.getLogger(__name__)

RATING_MIN, RATING_MAX = 1, 5
COMMENT_CHARS = 10_000
YOUNG = timedelta(minutes=5)
"""An id this young may belong to a row that is not visible yet (another worker's, say)."""
CLOCK_SKEW = timedelta(seconds=60)
PENDING_DELAYS_S = (0.5, 1.0, 2.0, 4.0, 8.0)
"""When feedback on a young unknown id is tried again; then it is dropped, and counted."""


def feedback_router(services: Services) -> APIRouter:
    """The feedback endpoint."""
    router = APIRouter()

    @router.post("/v1/feedback")
    async def feedback(request: Request) -> Response:
        asked = checked(FeedbackRequest, await read_object(request))
        said = _feedback_of(asked, services)
        try:
            receipt = await services.store.add_feedback(said)
        except UnknownRecord:
            return _unknown(said, services)
        except VersionConflict:
            raise ApiError(
                409,
                "id_reused",
                "`id` was used before for other content.",
                param="id",
                headers={"x-should-retry": "false"},
            ) from None
        services.metrics.feedback.labels(receipt.value).inc()
        shown = said.id
        if receipt is FeedbackReceipt.DUPLICATE:
            shown = await _id_of_first(said, services)
        return JSONResponse(_answer(shown, said.rollout_id, receipt.value))

    return router


def _answer(feedback_id: str, rollout_id: str, status: str) -> dict[str, str]:
    return {
        "id": feedback_id,
        "object": "feedback",
        "inference_id": rollout_id,
        "status": status,
    }


def _feedback_of(asked: FeedbackRequest, services: Services) -> Feedback:
    """The record of it. Raises ApiError 400 or 404."""
    now = utc_now()
    value = checked_value(asked.metric_name, asked.value)
    _check_id(asked.inference_id, now)
    return Feedback(
        id=new_id(FEEDBACK_PREFIX),
        rollout_id=asked.inference_id,
        created_at=now,
        metric=asked.metric_name,
        value=value,
        comment=asked.comment,
        user_hash=services.keys.user_hash(asked.user),
        client_id=asked.id,
    )


def checked_value(metric: str, value: Any) -> bool | float | str:
    """`value` as the metric wants it: no number for a boolean, no boolean for a number."""
    if metric == "thumbs":
        if isinstance(value, bool):
            return value
        raise _bad_value("`value` of `thumbs` is true or false.")
    if metric == "rating":
        # A comparison with NaN is false, and infinity lies outside.
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number and RATING_MIN <= value <= RATING_MAX:
            return float(value)
        raise _bad_value(f"`value` of `rating` is a number from {RATING_MIN} to {RATING_MAX}.")
    if metric == "comment":
        if isinstance(value, str) and 0 < len(value) <= COMMENT_CHARS:
            return value
        raise _bad_value(f"`value` of `comment` is a text of 1 to {COMMENT_CHARS} characters.")
    raise ApiError(
        404, "unknown_metric", "Metrics are `thumbs`, `rating`, `comment`.", param="metric_name"
    )


def _bad_value(message: str) -> ApiError:
    return ApiError(400, "invalid_value", message, param="value")


def _check_id(inference_id: str, now: datetime) -> None:
    """Raise ApiError 400 for what is no reply's id, or one from the future."""
    try:
        made_at = uuid7_time(parse_id(inference_id, ROLLOUT_PREFIX))
    except (ValueError, OverflowError):
        raise ApiError(
            400,
            "invalid_value",
            "`inference_id` is the `id` of a reply: `chatcmpl-` and a UUIDv7.",
            param="inference_id",
        ) from None
    if made_at > now + CLOCK_SKEW:
        message = "`inference_id` lies in the future."
        raise ApiError(400, "invalid_value", message, param="inference_id")


def _unknown(said: Feedback, services: Services) -> Response:
    """202 for a young id whose feedback is kept and tried again; 404 otherwise."""
    age = said.created_at - uuid7_time(parse_id(said.rollout_id, ROLLOUT_PREFIX))
    if age < YOUNG and services.later.add(
        said.id, lambda: _try_again(said, services), PENDING_DELAYS_S
    ):
        services.metrics.feedback.labels("pending").inc()
        return JSONResponse(_answer(said.id, said.rollout_id, "pending"), status_code=202)
    raise ApiError(
        404, "inference_not_found", "There is no reply with this id.", param="inference_id"
    )


async def _try_again(said: Feedback, services: Services) -> bool:
    try:
        receipt = await services.store.add_feedback(said)
    except (UnknownRecord, DatabaseUnavailable):
        return False
    except VersionConflict:
        logger.error("action=feedback_conflict id=%s rollout=%s", said.id, said.rollout_id)
        return True
    services.metrics.feedback.labels(receipt.value).inc()
    return True


async def _id_of_first(said: Feedback, services: Services) -> str:
    """The id of the row that a duplicate repeats."""
    for earlier in await services.store.list_feedback(said.rollout_id):
        if earlier.client_id == said.client_id:
            return earlier.id
    return said.id
