import json
from typing import Any

import pytest
from gateway_support import CHAT, Bench, HandEngine, bench, error_of

from online_sao.gateway.problems import ApiError
from online_sao.gateway.wire import parse_chat
from online_sao.types import Message, Sampling

USER = [{"role": "user", "content": "Hi"}]


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "online-sao", "messages": USER, **fields}


def refusal(**fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse_chat(chat(**fields))
    assert caught.value.status_code == 400
    return caught.value


async def post(b: Bench[HandEngine], body: str | bytes) -> Any:
    return await b.client.post(CHAT, content=body)


def test_a_bare_request_samples_from_the_policys_own_distribution() -> None:
    assert parse_chat(chat()).to_sampling() == Sampling()


def test_every_sampling_field_reaches_the_sampling() -> None:
    request = parse_chat(
        chat(
            temperature=0.5,
            top_p=0.9,
            top_k=7,
            min_p=0.05,
            max_tokens=9,
            stop=["a", "b"],
            seed=-4,
            presence_penalty=0.1,
            frequency_penalty=-0.2,
            repetition_penalty=1.1,
            logit_bias={"15": -3, "2": 1.5},
            logprobs=True,
            top_logprobs=2,
        )
    )
    assert request.to_sampling() == Sampling(
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        min_p=0.05,
        max_tokens=9,
        stop=("a", "b"),
        seed=-4,
        presence_penalty=0.1,
        frequency_penalty=-0.2,
        repetition_penalty=1.1,
        logit_bias=((15, -3.0), (2, 1.5)),
        top_logprobs=2,
    )


def test_vllms_top_k_of_minus_one_is_off_and_a_stop_may_be_one_string() -> None:
    sampling = parse_chat(chat(top_k=-1, stop="END", max_completion_tokens=5)).to_sampling()
    assert (sampling.top_k, sampling.stop, sampling.max_tokens) == (0, ("END",), 5)


def test_text_parts_are_joined_and_developer_is_system() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    request = parse_chat(
        chat(messages=[{"role": "developer", "content": "Be brief"}, {**USER[0], "content": parts}])
    )
    assert [message.to_message() for message in request.messages] == [
        Message("system", "Be brief"),
        Message("user", "one\ntwo"),
    ]


def test_an_assistant_message_as_the_sdk_gives_it_back_is_taken() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    request = parse_chat(
        chat(
            messages=[
                *USER,
                {
                    "role": "assistant",
                    "content": "Hello",
                    "refusal": None,
                    "annotations": [],
                    "audio": None,
                    "function_call": None,
                    "tool_calls": None,
                },
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "content": "4", "tool_call_id": "c1"},
            ]
        )
    )
    messages = [message.to_message() for message in request.messages]
    assert messages[1] == Message("assistant", "Hello")
    assert messages[2] == Message("assistant", None, tool_calls=(call,))
    assert messages[3] == Message("tool", "4", tool_call_id="c1")


@pytest.mark.parametrize(
    "neutral",
    [
        {"n": 1},
        {"response_format": {"type": "text"}},
        {"tools": []},
        {"tool_choice": "none"},
        {"parallel_tool_calls": True},
        {"modalities": ["text"]},
        {"service_tier": "auto"},
        {"temperature": None, "stop": None, "stream_options": None, "tools": None},
    ],
)
def test_what_asks_for_nothing_is_taken(neutral: dict[str, Any]) -> None:
    assert parse_chat(chat(**neutral)).to_sampling() == Sampling()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 2),
        ("n", True),
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("response_format", {"type": "json_object"}),
        ("tool_choice", "auto"),
        ("functions", [{"name": "f"}]),
        ("audio", {"voice": "x"}),
        ("reasoning_effort", "high"),
        ("cache_salt", "x"),
        ("chat_template", "{{ x }}"),
        ("return_token_ids", True),
        ("frobnicate", None),
    ],
)
def test_a_field_that_is_not_served_is_refused_by_name(name: str, value: Any) -> None:
    error = refusal(**{name: value})
    assert (error.code, error.param) == ("unsupported_parameter", name)
    assert f"`{name}`" in error.message


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("max_tokens", -1, ("-1", "1")),
        ("max_tokens", 0, ("0", "1")),
        ("max_tokens", True, ("integer",)),
        ("max_tokens", 1.0, ("integer",)),
        ("max_tokens", "5", ("integer",)),
        ("max_tokens", 10**30, ("1e+30", "2147483648")),
        ("max_completion_tokens", 0, ("0", "1")),
        ("temperature", 2.5, ("2.5", "2")),
        ("temperature", -0.1, ("-0.1", "0")),
        ("temperature", True, ("number",)),
        ("temperature", "1", ("number",)),
        ("temperature", float("inf"), ("finite",)),
        ("temperature", float("nan"), ("finite",)),
        ("top_p", 0, ("0",)),
        ("top_p", 1.1, ("1.1", "1")),
        ("min_p", 2, ("2", "1")),
        ("presence_penalty", 3, ("3", "2")),
        ("repetition_penalty", 0, ("0",)),
        ("top_logprobs", 21, ("21", "20")),
        ("seed", 2**63, ("9.22e+18",)),
        ("stream", "yes", ("boolean",)),
        ("stream", 1, ("boolean",)),
        ("stop", ["a", "b", "c", "d", "e"], ("4",)),
        ("logit_bias", {"x": 1}, ("token ids",)),
        ("logit_bias", {"-1": 1}, ("token ids",)),
        ("messages", [], ("1",)),
        ("user", 5, ("string",)),
    ],
)
def test_a_bad_value_is_refused_naming_the_field(
    name: str, value: Any, said: tuple[str, ...]
) -> None:
    error = refusal(**{name: value})
    assert (error.code, error.param) == ("invalid_value", name)
    assert f"`{name}`" in error.message
    for words in said:
        assert words in error.message


def test_a_place_inside_is_named_as_clients_write_it() -> None:
    error = refusal(messages=[*USER, {"role": "robot", "content": "x"}])
    assert error.param == "messages[1].role"
    assert refusal(logit_bias={"5": 200}).param == "logit_bias[5]"


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file"])
def test_parts_that_are_no_text_are_refused_by_their_type(kind: str) -> None:
    parts = [{"type": "text", "text": "see"}, {"type": kind, kind: {"url": "data:..."}}]
    error = refusal(messages=[{"role": "user", "content": parts}])
    assert error.code == "unsupported_content"
    assert error.param == "messages[0].content"
    assert kind in error.message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"top_logprobs": 2}, "top_logprobs"),
    ],
)
def test_fields_that_contradict_each_other_are_refused(fields: dict[str, Any], param: str) -> None:
    error = refusal(**fields)
    assert (error.code, error.param) == ("conflicting_parameters", param)


@pytest.mark.parametrize("message", [{"role": "user"}, {"role": "assistant", "content": None}])
def test_a_message_without_content_is_refused(message: dict[str, Any]) -> None:
    error = refusal(messages=[message])
    assert (error.code, error.param) == ("missing_field", "messages[0].content")


def test_a_missing_field_is_named() -> None:
    with pytest.raises(ApiError) as caught:
        parse_chat({"model": "online-sao"})
    assert (caught.value.code, caught.value.param) == ("missing_field", "messages")


def test_ten_problems_of_two_hundred_characters_at_most_and_no_echo() -> None:
    secret = "SECRET" * 1000
    error = refusal(messages=[{"role": secret, "content": secret, secret: 1} for _ in range(500)])
    assert "SECRETSECRET" * 20 not in error.message
    assert len(error.message) <= 10 * 202 + 30
    assert error.message.endswith("and 990 more")
    odd = refusal(**{"\x1b[31m<b>": 1})
    assert odd.param == "?[31m?b?"


def test_a_part_type_from_the_input_is_shown_short_and_harmless() -> None:
    error = refusal(messages=[{"role": "user", "content": [{"type": "<script>" * 1000}]}])
    assert "<" not in error.message
    assert len(error.message) <= 200


# -- the body -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[1]",
        b'"text"',
        b"\xff\xfe{}",
        b'{"model": "online-sao", "temperature": NaN}',
        b'{"model": "online-sao", "temperature": Infinity}',
        b"[" * 100_000 + b"]" * 100_000,
        b'{"messages":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
        b'{"seed":' + b"9" * 5000 + b"}",
    ],
)
async def test_what_is_no_json_object_is_a_400(body: bytes) -> None:
    async with bench() as b:
        answer = await post(b, body)
        assert (await b.client.get("/healthz")).status_code == 200
        assert b.store.rows == {}
    assert (answer.status_code, error_of(answer)["code"]) == (400, "invalid_json")
    assert len(answer.text) < 300


async def test_a_number_beyond_floats_is_a_400_naming_the_field() -> None:
    async with bench() as b:
        body = json.dumps(chat()).replace("{", '{"temperature": 1e400, ', 1)
        answer = await post(b, body)
    assert (answer.status_code, error_of(answer)["param"]) == (400, "temperature")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (r'{"messages":[{"role":"user","content":"half \ud83d"}]}', "messages[0].content"),
        (r'{"messages":[{"role":"user","content":"\uDE00 half"}]}', "messages[0].content"),
        (r'{"user":"\ud800"}', "user"),
        (r'{"metadata":{"k\ud800":"v"}}', "metadata"),
    ],
)
async def test_a_lone_surrogate_is_refused_at_the_door(body: str, param: str) -> None:
    async with bench() as b:
        answer = await post(b, body)
        assert b.store.rows == {}
    error = error_of(answer)
    assert (answer.status_code, error["code"], error["param"]) == (400, "invalid_unicode", param)


async def test_a_surrogate_pair_is_an_emoji_and_a_nul_is_kept() -> None:
    async with bench() as b:
        body = (
            r'{"model":"online-sao","messages":[{"role":"user","content":"\ud83d\ude00 \u0000"}]}'
        )
        answer = await post(b, body)
        rollout = await b.only_rollout()
    assert answer.status_code == 200
    assert rollout.request.messages == (Message("user", "\U0001f600 \x00"),)


async def test_another_model_is_a_404() -> None:
    async with bench() as b:
        answer = await b.chat(model="gpt-4o")
    error = error_of(answer)
    assert (answer.status_code, error["code"], error["param"]) == (404, "model_not_found", "model")
