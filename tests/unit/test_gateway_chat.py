import asyncio
import time

import httpx
import pytest
from gateway_support import (
    CHAT,
    Bench,
    FaultyStore,
    HandEngine,
    bench,
    error_of,
    reply_of,
)

from online_sao.types import (
    LedgerState,
    Outcome,
)

BODY = b'{"model":"online-sao","messages":[{"role":"user","content":"Hi"}]%s}'

LONG = [f"t{i} " for i in range(200)]


class LeavingClient:
    """An ASGI client that sends one chat and leaves after so many body messages, or seconds."""

    def __init__(self, b: Bench[HandEngine], body: bytes) -> None:
        self._b = b
        self._body: list[bytes] = [body]
        self.gone = asyncio.Event()
        self.received: list[bytes] = []
        self.status = 0

    async def run(self, leave_after_chunks: int | None = None) -> None:
        async def receive() -> dict[str, object]:
            if self._body:
                return {"type": "http.request", "body": self._body.pop(), "more_body": False}
            await self.gone.wait()
            return {"type": "http.disconnect"}

        async def send(message) -> None:  # type: ignore[no-untyped-def]
            if message["type"] == "http.response.start":
                self.status = message["status"]
            elif message.get("body"):
                self.received.append(message["body"])
            if len(self.received) == leave_after_chunks:
                self.gone.set()

        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "path": CHAT,
            "raw_path": CHAT.encode(),
            "query_string": b"",
            "root_path": "",
            "scheme": "http",
            "headers": [(b"authorization", b"Bearer test-key")],
        }
        await self._b.app(scope, receive, send)


async def test_a_client_that_leaves_after_three_chunks_aborts_the_engine_within_a_second() -> None:
    async with bench(HandEngine(reply_of(*LONG), delay=0.02)) as b:
        client = LeavingClient(b, BODY % b',"stream":true')
        began = time.monotonic()
        await client.run(leave_after_chunks=3)
        assert time.monotonic() - began < 1.0
        assert len(b.engine.closed) == 1
        rollout = await b.only_rollout()
    assert len(client.received) == 3
    assert rollout.completion is not None
    assert rollout.completion.outcome is Outcome.ABORTED
    assert rollout.completion.text == "t0 t1 t2 "
    assert (rollout.state, rollout.reason) == (LedgerState.NOT_TRAINABLE, "client_disconnected")


async def test_a_client_that_leaves_an_unstreamed_chat_aborts_the_engine_too() -> None:
    async with bench(HandEngine(reply_of(*LONG), delay=0.02)) as b:
        client = LeavingClient(b, BODY % b"")
        running = asyncio.create_task(client.run())
        await asyncio.sleep(0.1)
        client.gone.set()
        await asyncio.wait_for(running, 1.0)
        assert len(b.engine.closed) == 1
        rollout = await b.only_rollout()
    assert client.received == []
    assert rollout.reason == "client_disconnected"


async def test_a_client_that_leaves_while_the_row_is_inserted_leaves_no_row_open() -> None:
    store = FaultyStore()
    store.delay = 0.1
    async with bench(store=store) as b:
        client = LeavingClient(b, BODY % b"")
        running = asyncio.create_task(client.run())
        await asyncio.sleep(0.02)
        client.gone.set()
        await running
        rollout = await b.only_rollout()
        assert b.engine.seen == []
    assert rollout.reason == "client_disconnected"


async def test_a_client_that_leaves_while_the_record_is_written_finds_the_reply_completed() -> None:
    store = FaultyStore()
    async with bench(HandEngine(delay=0.01), store) as b:
        client = LeavingClient(b, BODY % b',"stream":true')
        inner = store.complete_rollout

        async def slow_complete(completion) -> None:  # type: ignore[no-untyped-def]
            client.gone.set()
            await asyncio.sleep(0.05)
            await inner(completion)

        store.complete_rollout = slow_complete  # type: ignore[method-assign]
        await client.run()
        rollout = await b.only_rollout()
    assert rollout.state is LedgerState.AWAITING_JUDGEMENT


async def test_a_server_that_stops_in_mid_reply_records_the_chat_as_failed() -> None:
    async with bench(HandEngine(reply_of(*LONG), delay=0.02)) as b:
        client = LeavingClient(b, BODY % b',"stream":true')
        running = asyncio.create_task(client.run())
        await asyncio.sleep(0.1)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        rollout = await b.only_rollout()
        assert b.app.state.services.admission.in_flight == 0
    assert (rollout.state, rollout.reason) == (LedgerState.FAILED, "shutdown")


async def test_a_server_whose_send_fails_means_that_the_client_left() -> None:
    async with bench(HandEngine(delay=0.01)) as b:
        client = LeavingClient(b, BODY % b',"stream":true')
        app = b.app

        async def breaking(scope, receive, send) -> None:  # type: ignore[no-untyped-def]
            async def broken(message) -> None:  # type: ignore[no-untyped-def]
                raise OSError("broken pipe")

            await app(scope, receive, broken)

        b.app = breaking  # type: ignore[assignment]
        await client.run()
        rollout = await b.only_rollout()
    assert rollout.reason == "client_disconnected"


async def test_the_finish_chunk_comes_after_the_record_is_durable() -> None:
    async with bench(HandEngine(delay=0.01)) as b:
        seen: list[tuple[bool, bool]] = []
        client = LeavingClient(b, BODY % b',"stream":true')
        app = b.app

        async def watching(scope, receive, send) -> None:  # type: ignore[no-untyped-def]
            async def look(message) -> None:  # type: ignore[no-untyped-def]
                finished = b'"finish_reason":"stop"' in message.get("body", b"")
                seen.append((finished, bool(b.store.ends)))
                await send(message)

            await app(scope, receive, look)

        b.app = watching  # type: ignore[assignment]
        await client.run()
    assert seen[-1] == (True, True)
    assert all(durable is False for finished, durable in seen if not finished)


async def test_a_full_house_answers_429_and_a_closing_one_503() -> None:
    async with bench(HandEngine(reply_of(*LONG[:20]), delay=0.02), max_in_flight=2) as b:
        running = [asyncio.create_task(b.chat()) for _ in range(2)]
        await asyncio.sleep(0.05)
        full = await b.chat()
        admission = b.app.state.services.admission
        assert admission.in_flight == 2
        admission.draining = True
        closing = await b.chat(stream=True)
        ready = await b.client.get("/readyz")
        await asyncio.wait_for(admission.idle(), 10)
        assert [(await task).status_code for task in running] == [200, 200]
    assert (full.status_code, error_of(full)["code"]) == (429, "queue_full")
    assert (closing.status_code, error_of(closing)["code"]) == (503, "draining")
    assert full.headers["retry-after"] == closing.headers["retry-after"] == "2"
    assert (ready.status_code, ready.json()["error"]["code"]) == (503, "draining")
    assert len(b.store.rows) == 2


async def test_sessions_and_users_are_kept_as_said_and_users_only_as_hashes() -> None:
    async with bench() as b:
        await b.chat(user="ann@example.org", sao={"session_id": "s-1"})
        await b.chat(user="ann@example.org", metadata={"session_id": "s-2"})
        await b.client.post(
            CHAT,
            json={"model": "online-sao", "messages": [{"role": "user", "content": "x"}]},
            headers={"x-session-id": "s-3", "x-sao-train": "false"},
        )
        await b.chat()
        await b.chat()
        rows = list(b.store.rows.values())
    assert [row.session_id for row in rows[:3]] == ["s-1", "s-2", "s-3"]
    assert rows[2].train is False
    assert rows[3].session_id != rows[4].session_id
    assert rows[0].user_hash == rows[1].user_hash
    assert rows[0].user_hash is not None
    assert "ann" not in rows[0].user_hash
    assert len(rows[0].user_hash) == 64
    assert rows[3].user_hash is None


@pytest.mark.parametrize(
    ("fields", "headers", "param"),
    [
        ({"sao": {"session_id": "a"}}, {"x-session-id": "b"}, "session_id"),
        ({"sao": {"train": True}}, {"x-sao-train": "false"}, "train"),
        ({"metadata": {"train": "true"}, "sao": {"train": False}}, {}, "train"),
    ],
)
async def test_one_thing_said_twice_with_two_values_is_refused(
    fields: dict[str, object], headers: dict[str, str], param: str
) -> None:
    body = {"model": "online-sao", "messages": [{"role": "user", "content": "x"}], **fields}
    async with bench() as b:
        answer: httpx.Response = await b.client.post(CHAT, json=body, headers=headers)
        assert b.store.rows == {}
    assert answer.status_code == 400
    assert error_of(answer)["code"] == "conflicting_parameters"
    assert error_of(answer)["param"] == param
