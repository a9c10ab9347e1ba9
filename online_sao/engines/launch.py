"""How to start our engines: argument lists for a supervisor. Nothing is started here."""

from __future__ import annotations

import sys
from pathlib import Path

from online_sao.config import Settings


def embedded_command(
    settings: Settings, model_dir: Path, version: int, port: int, threads: int
) -> list[str]:
    """The embedded engine, serving `model_dir` as policy `version` on loopback."""
    return [
        *(sys.executable, "-m", "online_sao.engines.embedded"),
        *("--model", str(model_dir)),
        *("--version", str(version)),
        *("--host", "127.0.0.1"),
        *("--port", str(port)),
        *("--dtype", settings.engine.dtype),
        *("--max-num-seqs", str(settings.engine.max_num_seqs)),
        *("--max-model-len", str(settings.policy.max_model_len)),
        *("--threads", str(threads)),
        *("--silence-s", str(settings.engine.silence_s)),
        *("--served-name", settings.policy.served_name),
    ]


def scripted_command(
    settings: Settings, model_dir: Path, version: int, port: int, threads: int
) -> list[str]:
    """The scripted engine; it needs no model and no threads of its own."""
    return [
        *(sys.executable, "-m", "online_sao.engines.scripted"),
        *("--version", str(version)),
        *("--host", "127.0.0.1"),
        *("--port", str(port)),
        *("--max-model-len", str(settings.policy.max_model_len)),
        *("--silence-s", str(settings.engine.silence_s)),
        *("--served-name", settings.policy.served_name),
    ]
