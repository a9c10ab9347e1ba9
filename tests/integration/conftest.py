"""A whole service on the scripted engine and the scripted trainer."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import SCRIPTED

from online_sao.running import RunningService


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return tmp_path / "data"


@pytest.fixture
def service(data: Path) -> Iterator[RunningService]:
    with RunningService(data, env=SCRIPTED, start_timeout_s=60) as running:
        yield running
