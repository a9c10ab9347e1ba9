"""What the gateway's endpoints work with; made once per app and handed in."""

from __future__ import annotations

from dataclasses import dataclass

from online_sao.config import Settings
from online_sao.gateway.admission import Admission
from online_sao.gateway.auth import Keys
from online_sao.gateway.later import Later
from online_sao.gateway.metrics import Metrics
from online_sao.gateway.probe import EngineProbe
from online_sao.interfaces import Engine, Store


@dataclass(frozen=True, slots=True)
class Services:
    """The parts an endpoint may use."""

    engine: Engine
    store: Store
    settings: Settings
    keys: Keys
    admission: Admission
    metrics: Metrics
    probe: EngineProbe
    later: Later
