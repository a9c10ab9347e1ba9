import asyncio
from collections.abc import AsyncIterator

import pytest
from gateway_support import CHAT, KEY, HandEngine, bench, bench_on, error_of, reply_of

from online_sao.engines.scripted import ScriptedEngine
from online_sao.gateway.auth import Keys


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "Bearer",
        "Bearer ",
        "Bearer wrong",
        f"Basic {KEY}",
        KEY,
        f"Bearer {KEY}x",
        "Bearer é",
    ],
)
async def test_without_the_key_nothing_of_the_api_answers(header: str | None) -> None:
    async with bench() as b:
        b.client.headers.pop("authorization")
        headers = {} if header is None else {"authorization": header.encode("latin-1")}
        for method, path in (
            ("POST", CHAT),
            ("GET", "/v1/models"),
            ("POST", "/v1/feedback"),
            ("GET", "/v1/unknown"),
            ("GET", "/admin/v1/anything"),
        ):
            answer = await b.client.request(method, path, headers=headers)
            assert answer.status_code == 401
            assert error_of(answer)["code"] == "invalid_api_key"
            assert answer.headers["x-request-id"].startswith("req_")
        assert b.store.rows == {}


async def test_the_scheme_is_read_in_any_case() -> None:
    async with bench() as b:
        answer = await b.client.get("/v1/models", headers={"authorization": f"bearer {KEY}"})
    assert answer.status_code == 200


def test_an_empty_admin_key_is_no_key() -> None:
    with pytest.raises(ValueError, match="admin key"):
        Keys("")


def test_one_user_has_one_hash_per_key() -> None:
    assert Keys("a").user_hash("ann") == Keys("a").user_hash("ann")
    assert Keys("a").user_hash("ann") != Keys("b").user_hash("ann")
    assert Keys("a").user_hash(None) is None


async def test_a_wrong_path_and_a_wrong_method_have_openais_shape() -> None:
    async with bench() as b:
        missing = await b.client.get("/v1/nothing")
        method = await b.client.get(CHAT)
    assert (missing.status_code, error_of(missing)["code"]) == (404, "not_found")
    assert (method.status_code, error_of(method)["code"]) == (405, "method_not_allowed")
    assert method.headers["allow"] == "POST"


async def test_a_body_that_declares_too_much_is_refused_unread() -> None:
    pulled: list[int] = []

    async def body() -> AsyncIterator[bytes]:
        for _ in range(200):
            pulled.append(1)
            yield b"x" * 2**20

    async with bench() as b:
        headers = {"content-length": str(200 * 2**20)}
        answer = await b.client.post(CHAT, content=body(), headers=headers)
    assert (answer.status_code, error_of(answer)["code"]) == (413, "request_too_large")
    assert len(pulled) <= 1


@pytest.mark.parametrize("path", [CHAT, "/v1/feedback"])
async def test_a_body_that_grows_too_large_is_refused_at_the_limit(path: str) -> None:
    pulled: list[int] = []

    async def body() -> AsyncIterator[bytes]:
        for _ in range(200):
            pulled.append(1)
            yield b"x" * 2**20

    async with bench() as b:
        answer = await b.client.post(path, content=body())
    assert (answer.status_code, error_of(answer)["code"]) == (413, "request_too_large")
    assert len(pulled) <= 6  # the limit is 4 MiB


async def test_a_body_at_the_limit_is_read() -> None:
    async with bench_on(ScriptedEngine(), max_body_bytes=2000) as b:
        text = "x" * 1900
        fits = await b.chat(text)
        too_large = await b.chat(text + "x" * 100)
    assert (fits.status_code, too_large.status_code) == (200, 413)


async def test_thirty_slow_streams_leave_the_other_endpoints_answering() -> None:
    async with bench(HandEngine(reply_of(*"abcdefghij"), delay=0.1)) as b:
        streams = [asyncio.create_task(b.chat(stream=True)) for _ in range(30)]
        await asyncio.sleep(0.2)
        loop = asyncio.get_running_loop()
        for path in ("/healthz", "/readyz", "/metrics", "/v1/models"):
            began = loop.time()
            assert (await b.client.get(path)).status_code == 200
            assert loop.time() - began < 0.5
        assert b.app.state.services.admission.in_flight == 30
        assert {(await stream).status_code for stream in streams} == {200}
