"""Tool episodes through a whole service: declared, judged once, trained together."""

import sqlite3
from pathlib import Path
from typing import Any

import httpx
from harness import SCRIPTED, body, command, ledger, wait_for

from online_sao.running import RunningService


def chat(http: httpx.Client, messages: list[dict[str, str]], episode: str) -> dict[str, Any]:
    """One chat of the episode; the reply."""
    answer = http.post(
        "/v1/chat/completions",
        json={**body(), "messages": messages},
        headers={"x-episode-id": episode},
    )
    assert answer.status_code == 200, answer.text
    reply: dict[str, Any] = answer.json()
    return reply


def rows(data: Path, query: str) -> list[tuple[Any, ...]]:
    with sqlite3.connect(f"file:{data / 'online-sao.db'}?mode=ro", uri=True) as database:
        return database.execute(query).fetchall()


def test_an_episode_is_judged_once_and_one_update_has_all_of_it(
    service: RunningService, data: Path
) -> None:
    """The double's template writes a reply's words as bytes, so that the second prompt's ids do
    not extend the first reply's: the two stay their own, in one batch."""
    assert command(data, "learner", "pause").returncode == 0
    with httpx.Client(base_url=service.url, headers=service.headers, timeout=30) as http:
        episode = http.post("/v1/episodes").json()["id"]
        messages = [{"role": "user", "content": "Look it up."}]
        first = chat(http, messages, episode)
        messages.append({"role": "assistant", "content": first["choices"][0]["message"]["content"]})
        messages.append({"role": "user", "content": "The tool says 42."})
        second = chat(http, messages, episode)
        assert ledger(data)["reasons"]["awaiting_judgement"] == {"episode": 2}
        closed = http.post(f"/v1/episodes/{episode}/close").json()
        assert (closed["replies"], closed["rewards"]) == (2, "one")
        wait_for(lambda: ledger(data)["counts"]["judged"] == 2, "the episode judged")
        late = http.post("/v1/chat/completions", json=body(), headers={"x-episode-id": episode})
        assert late.status_code == 409
        for number in range(6):  # with the episode's two a batch of 8
            assert http.post("/v1/chat/completions", json=body(f"{number}")).status_code == 200
        wait_for(lambda: ledger(data)["counts"]["judged"] == 8, "the others judged")
        assert command(data, "learner", "resume").returncode == 0
        wait_for(lambda: ledger(data)["counts"]["critic_only"] == 8, "the update")
        shown = http.get(f"/v1/episodes/{episode}").json()
        assert {state: n for state, n in shown["counts"].items() if n} == {"critic_only": 2}
    ids = (first["id"], second["id"])
    judged = rows(data, f"SELECT judge, reward FROM judgements WHERE rollout_id = '{ids[1]}'")
    passed = rows(data, f"SELECT judge, reward FROM judgements WHERE rollout_id = '{ids[0]}'")
    assert [judge for judge, _ in judged] == ["judges.rules:RulesJudge"]
    assert passed == [("episode", judged[0][1])]
    members = rows(data, "SELECT rollout_id, update_seq FROM update_members ORDER BY position")
    assert {update for _, update in members} == {members[0][1]}
    assert tuple(rollout for rollout, _ in members[:2]) == ids
    assert len(members) == 8
    book = ledger(data)
    assert book["adds_up"], book["problems"]
    assert book["requests"] == 8


def test_an_episode_that_nobody_closes_is_closed_by_itself(data: Path) -> None:
    env = {**SCRIPTED, "ONLINE_SAO_JUDGING__EPISODE_IDLE_S": "1"}
    with (
        RunningService(data, env=env, start_timeout_s=60) as service,
        httpx.Client(base_url=service.url, headers=service.headers, timeout=30) as http,
    ):
        episode = http.post("/v1/episodes").json()["id"]
        chat(http, [{"role": "user", "content": "Look it up."}], episode)
        wait_for(lambda: ledger(data)["counts"]["judged"] == 1, "closed and judged")
        assert http.get(f"/v1/episodes/{episode}").json()["status"] == "closed"
    assert ledger(data)["adds_up"]
