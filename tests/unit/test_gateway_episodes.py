"""Tool episodes over HTTP: declared, joined by chats, closed."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence

import pytest
from gateway_support import Bench, HandEngine, bench, error_of, reply_of

from online_sao.types import (
    EPISODE_PREFIX,
    JSON,
    JUDGEMENT_PREFIX,
    Judgement,
    JudgementState,
    LedgerState,
    Message,
    RenderedPrompt,
    new_id,
    parse_id,
    utc_now,
)


class GrowingChat(HandEngine):
    """Renders each chat as the ids of the one before, its reply's, and one more."""

    def __init__(self) -> None:
        super().__init__(reply_of("A", "b", version=0))
        self._ids: tuple[int, ...] = (1,)

    async def render(
        self, messages: Sequence[Message], *, tools: Sequence[JSON] = ()
    ) -> RenderedPrompt:
        prompt = RenderedPrompt((*self._ids, 2))
        self._ids = (*prompt.token_ids, 10, 11)
        return prompt


async def declared(b: Bench[HandEngine]) -> str:
    answer = await b.client.post("/v1/episodes")
    assert answer.status_code == 201
    return str(answer.json()["id"])


async def test_a_declared_episode_is_open_and_has_no_replies() -> None:
    async with bench() as b:
        before = time.time()
        answer = await b.client.post("/v1/episodes", content=b"{}")
        assert answer.status_code == 201
        body = answer.json()
        assert parse_id(body["id"], EPISODE_PREFIX).version == 7
        assert int(before) <= body.pop("created_at") <= time.time()
        assert body == {
            "id": body["id"],
            "object": "episode",
            "closed_at": None,
            "status": "open",
            "rewards": None,
            "replies": 0,
            "counts": {state.value: 0 for state in LedgerState},
        }
        shown = await b.client.get(f"/v1/episodes/{body['id']}")
        assert (shown.status_code, shown.json()["status"]) == (200, "open")


@pytest.mark.parametrize("way", ["header", "sao", "metadata"])
async def test_a_chat_joins_the_episode_it_names(way: str) -> None:
    async with bench() as b:
        episode_id = await declared(b)
        body = {"model": "online-sao", "messages": [{"role": "user", "content": "Hi"}]}
        more = {"sao": {"sao": {"episode_id": episode_id}},
                "metadata": {"metadata": {"episode_id": episode_id}}}.get(way, {})  # fmt: skip
        headers = {"x-episode-id": episode_id} if way == "header" else {}
        answer = await b.client.post(
            "/v1/chat/completions", content=json.dumps({**body, **more}), headers=headers
        )
        assert answer.status_code == 200
        rollout = await b.only_rollout()
        assert rollout.request.episode_id == rollout.request.session_id == episode_id
        assert (rollout.state, rollout.reason) == (LedgerState.AWAITING_JUDGEMENT, "episode")


async def test_closing_counts_the_replies_and_may_be_repeated() -> None:
    async with bench() as b:
        episode_id = await declared(b)
        for _ in range(2):
            await b.chat(sao={"episode_id": episode_id, "session_id": "mine"})
        await b.chat(sao={"episode_id": episode_id}, temperature=0)
        first = await b.client.post(f"/v1/episodes/{episode_id}/close")
        again = await b.client.post(f"/v1/episodes/{episode_id}/close", content=b"{}")
        assert first.status_code == again.status_code == 200
        assert first.json() == again.json()
        body = first.json()
        assert (body["status"], body["replies"], body["rewards"]) == ("closed", 3, "one")
        assert {state: n for state, n in body["counts"].items() if n} == {
            "awaiting_judgement": 2,
            "not_trainable": 1,
        }
        assert {row.session_id for row in b.store.rows.values()} == {"mine", episode_id}


async def test_an_unknown_episode_is_404_and_a_closed_one_409_and_no_row_is_made() -> None:
    async with bench() as b:
        for unknown in (new_id(EPISODE_PREFIX), "nonsense"):
            answers = [
                await b.chat(sao={"episode_id": unknown}),
                await b.client.get(f"/v1/episodes/{unknown}"),
                await b.client.post(f"/v1/episodes/{unknown}/close"),
            ]
            for answer in answers:
                assert answer.status_code == 404
                assert error_of(answer)["code"] == "episode_not_found"
                assert error_of(answer)["param"] == "episode_id"
        episode_id = await declared(b)
        await b.client.post(f"/v1/episodes/{episode_id}/close")
        for stream in (False, True):
            refused = await b.chat(sao={"episode_id": episode_id}, stream=stream)
            assert refused.status_code == 409
            assert error_of(refused)["code"] == "episode_closed"
            assert refused.headers["x-should-retry"] == "false"
        assert b.store.rows == {}
        assert b.engine.seen == []
        ledger = await b.store.ledger()
        assert (ledger.requests, ledger.problems) == (0, ())


async def test_two_different_episodes_in_one_request_are_400() -> None:
    async with bench() as b:
        one, other = await declared(b), await declared(b)
        b.client.headers["x-episode-id"] = one
        answer = await b.chat(sao={"episode_id": other})
        assert answer.status_code == 400
        assert error_of(answer)["code"] == "conflicting_parameters"
        assert error_of(answer)["param"] == "episode_id"
        assert (await b.chat(sao={"episode_id": one})).status_code == 200


@pytest.mark.parametrize("path", ["/v1/episodes", "/v1/episodes/ep_x/close"])
async def test_a_body_says_nothing_that_would_be_ignored(path: str) -> None:
    async with bench() as b:
        answer = await b.client.post(path, content=b'{"reward": 1}')
        assert answer.status_code == 400
        assert error_of(answer)["param"] == "reward"
        assert (await b.client.post(path, content=b"[]")).status_code == 400


async def test_episodes_need_the_key() -> None:
    async with bench() as b:
        del b.client.headers["authorization"]
        for answer in (
            await b.client.post("/v1/episodes"),
            await b.client.get("/v1/episodes/ep_x"),
            await b.client.post("/v1/episodes/ep_x/close"),
        ):
            assert answer.status_code == 401


async def test_a_reply_in_flight_when_its_episode_is_closed_still_belongs_to_it() -> None:
    engine = HandEngine(reply_of("A", "b", "c"), delay=0.05)
    async with bench(engine) as b:
        episode_id = await declared(b)
        chat = asyncio.create_task(b.chat(sao={"episode_id": episode_id}))
        while not b.store.rows:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        closed = (await b.client.post(f"/v1/episodes/{episode_id}/close")).json()
        assert (closed["counts"]["in_flight"], closed["rewards"]) == (1, None)
        assert (await chat).status_code == 200
        ended = (await b.client.get(f"/v1/episodes/{episode_id}")).json()
        assert (ended["counts"]["awaiting_judgement"], ended["rewards"]) == (1, "one")


async def test_chats_whose_ids_extend_each_other_are_one_trajectory_for_the_learner() -> None:
    engine = GrowingChat()
    async with bench(engine) as b:
        rubric = await b.store.put_rubric("r", "a:J", {})
        await b.store.add_base_version("base", "00")
        episode_id = await declared(b)
        replies = [await b.chat(sao={"episode_id": episode_id}) for _ in range(2)]
        await b.client.post(f"/v1/episodes/{episode_id}/close")
        ((last, _),) = await b.store.claim_unjudged("j", limit=9, lease_s=60)
        await b.store.record_judgement(
            Judgement(
                new_id(JUDGEMENT_PREFIX), last.id, utc_now(), rubric.id, "a:J",
                JudgementState.SCORED, 1, 1, 1.0,
            ),
            "j",
        )  # fmt: skip
        (trajectory,) = await b.store.claim_trajectories(
            "l", size=1, lease_s=60, max_lag=8, max_train_tokens=100, skip_cut=False
        )
        assert trajectory.rollout_ids == tuple(reply.json()["id"] for reply in replies)
        assert trajectory.token_ids == (1, 2, 10, 11, 2, 10, 11)
        o, a = False, True
        assert trajectory.action_mask == (o, o, a, a, o, a, a)
        assert trajectory.reward == 1.0
