"""`GET /v1/models`: the one model that is served, under the name clients ask for."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter

from online_sao.gateway.problems import ApiError
from online_sao.gateway.services import Services


def models_router(services: Services) -> APIRouter:
    """The model list and the single model."""
    router = APIRouter()
    created = int(time.time())

    async def model() -> dict[str, Any]:
        status = await services.probe.fresh()
        return {
            "id": services.settings.policy.served_name,
            "object": "model",
            "created": created,
            "owned_by": "online-sao",
            "sao": {
                "policy_version": status.version if status is not None else None,
                "max_model_len": status.max_model_len if status is not None else None,
            },
        }

    @router.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [await model()]}

    @router.get("/v1/models/{model_id:path}")
    async def one_model(model_id: str) -> dict[str, Any]:
        if model_id != services.settings.policy.served_name:
            raise ApiError(404, "model_not_found", "There is no such model.", param="model")
        return await model()

    return router
