"""Chat -> judged reply -> update -> new version serves, through the command line."""

import os
import signal
import socket
import sqlite3
import subprocess
import sys
from pathlib import Path

import httpx
import psutil
import pytest
from harness import SCRIPTED, body, children, command, ledger, status, wait_for

from online_sao.running import RunningService


def chat(service: RunningService, count: int) -> list[dict[str, object]]:
    with httpx.Client(base_url=service.url, headers=service.headers, timeout=30) as http:
        answers = [http.post("/v1/chat/completions", json=body(f"Go, {i}.")) for i in range(count)]
    assert [answer.status_code for answer in answers] == [200] * count
    return [answer.json() for answer in answers]


def test_24_judged_replies_make_version_1_and_it_serves(
    service: RunningService, data: Path
) -> None:
    first = chat(service, 24)
    assert {reply["sao"]["policy_version"] for reply in first} == {0}  # type: ignore[index]
    wait_for(lambda: status(data)["live_version"] == 1, "version 1 live")
    assert chat(service, 1)[0]["sao"]["policy_version"] == 1  # type: ignore[index]
    wait_for(lambda: ledger(data)["counts"]["trained"] == 8, "8 trained")
    book = ledger(data)
    assert book["adds_up"], book["problems"]
    assert (book["requests"], book["counts"]["critic_only"]) == (25, 16)


def test_sigterm_ends_everything_and_exits_with_0(service: RunningService, data: Path) -> None:
    chat(service, 3)
    family = [psutil.Process(service.pid), *children(service.pid, "online_sao")]
    assert len(family) >= 3
    assert service.stop() == 0
    assert [p.pid for p in family if p.is_running() and p.status() != "zombie"] == []
    assert ledger(data)["adds_up"]


def test_second_service_on_the_same_folder_refuses_in_one_line(
    service: RunningService, data: Path
) -> None:
    second = command(data, "up", "--port", "0", "--engine", "scripted")
    assert second.returncode == 1
    assert f"in use by process {service.pid}" in " ".join(second.stderr.split())
    assert "Traceback" not in second.stderr
    assert httpx.get(f"{service.url}/readyz").status_code == 200


def test_taken_port_is_named_in_one_line(tmp_path: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        refused = command(tmp_path / "data", "up", "--port", str(port), "--engine", "scripted")
    assert refused.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port}" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_database_newer_than_the_code_is_refused_in_one_line(data: Path) -> None:
    with RunningService(data, env=SCRIPTED, start_timeout_s=60):
        pass
    with sqlite3.connect(data / "online-sao.db") as database:
        database.execute("UPDATE alembic_version SET version_num = '9999_future'")
    refused = command(data, "up", "--port", "0", "--engine", "scripted")
    assert refused.returncode == 1
    assert "newer" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_unknown_setting_is_refused_in_one_line(data: Path) -> None:
    environ = {**os.environ, "ONLINE_SAO_LEARNER__SPEED": "9"}
    refused = subprocess.run(
        [sys.executable, "-m", "online_sao", "up", "--data", str(data)],
        capture_output=True, text=True, timeout=60, env=environ, check=False,
    )  # fmt: skip
    assert refused.returncode == 1
    assert "unknown setting `learner.speed`" in refused.stderr


@pytest.mark.parametrize("missing", ["/nowhere/model", "nobody/no-such-model"])
def test_missing_model_is_named_and_the_way_out_too(data: Path, missing: str) -> None:
    environ = {**os.environ, "ONLINE_SAO_POLICY__MODEL": missing, "HF_HUB_OFFLINE": "1"}
    refused = subprocess.run(
        [sys.executable, "-m", "online_sao", "up", "--data", str(data), "--port", "0"],
        capture_output=True, text=True, timeout=120, env=environ, check=False,
    )  # fmt: skip
    assert refused.returncode == 1
    assert missing in refused.stderr
    assert "ONLINE_SAO_POLICY__MODEL" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_paused_learner_records_and_judges_and_does_not_learn(
    service: RunningService, data: Path
) -> None:
    assert command(data, "learner", "pause").returncode == 0
    chat(service, 30)
    wait_for(lambda: ledger(data)["counts"]["judged"] == 30, "30 judged waiting")
    assert status(data)["learner_paused"] is True
    assert status(data)["updates"] == []
    assert command(data, "learner", "resume").returncode == 0
    wait_for(lambda: status(data)["live_version"] == 1, "version 1 live")


def test_restarted_service_goes_on_where_it_stood(data: Path) -> None:
    with RunningService(data, env=SCRIPTED, start_timeout_s=60) as service:
        chat(service, 24)
        wait_for(lambda: status(data)["live_version"] == 1, "version 1 live")
    with RunningService(data, env=SCRIPTED, start_timeout_s=60) as service:
        assert chat(service, 1)[0]["sao"]["policy_version"] == 1  # type: ignore[index]
    assert ledger(data)["adds_up"]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_serving_process_never_maps_torch(service: RunningService) -> None:
    chat(service, 1)
    assert "libtorch" not in Path(f"/proc/{service.pid}/maps").read_text()


def test_thumb_reaches_the_reply_it_names(service: RunningService) -> None:
    reply = chat(service, 1)[0]
    feedback = {"inference_id": reply["id"], "metric_name": "thumbs", "value": True, "id": "t-1"}
    with httpx.Client(base_url=service.url, headers=service.headers) as http:
        assert http.post("/v1/feedback", json=feedback).json()["status"] == "accepted"
        assert http.post("/v1/feedback", json=feedback).json()["status"] == "duplicate"


def test_engine_that_dies_is_back_on_the_live_version(service: RunningService, data: Path) -> None:
    chat(service, 24)
    wait_for(lambda: status(data)["live_version"] == 1, "version 1 live")
    (engine,) = children(service.pid, "online_sao.engines")
    os.kill(engine.pid, signal.SIGKILL)
    wait_for(lambda: children(service.pid, "online_sao.engines") not in ([], [engine]), "restart")
    wait_for(lambda: httpx.get(f"{service.url}/readyz").status_code == 200, "ready again")
    assert chat(service, 1)[0]["sao"]["policy_version"] == 1  # type: ignore[index]
