"""What clients may send: OpenAI's chat request as far as it is served, and feedback.

Strict: no number from a string or a boolean, no NaN, no unknown field.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints
from pydantic_core import PydanticCustomError

from online_sao.gateway.body import checked, printable
from online_sao.gateway.problems import ApiError
from online_sao.types import Message, Sampling

MAX_LOGIT_BIAS = 1024
_TOKEN_ID = re.compile(r"[0-9]{1,10}")
_SEED_LIMIT = 2**63
_COUNT_LIMIT = 2**31


class Wire(BaseModel):
    """Base of what comes over the wire."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


def _text_of(content: Any) -> Any:
    """A content's text: a string as it is, text parts joined by newlines."""
    if not isinstance(content, list):
        return content
    texts: list[str] = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str):
            raise PydanticCustomError("invalid_value", "each part is an object with a `type`")
        if kind != "text":
            raise PydanticCustomError(
                "unsupported_content",
                "parts of type {kind} are not served; send text",
                {"kind": printable(kind)},
            )
        if not isinstance(part.get("text"), str) or len(part) != 2:
            raise PydanticCustomError("invalid_value", "a text part is a `type` and a `text`")
        texts.append(part["text"])
    return "\n".join(texts)


def _bias_of(value: Any) -> Any:
    """logit_bias with its keys as token ids."""
    if not isinstance(value, dict):
        return value
    if len(value) > MAX_LOGIT_BIAS or not all(_TOKEN_ID.fullmatch(key) for key in value):
        raise PydanticCustomError(
            "invalid_value", f"must map at most {MAX_LOGIT_BIAS} token ids to numbers"
        )
    return {int(key): bias for key, bias in value.items()}


def _stops_of(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


ShortText = Annotated[str, StringConstraints(min_length=1, max_length=128)]
StopText = Annotated[str, StringConstraints(min_length=1, max_length=512)]


class WireFunction(Wire):
    """The function an earlier reply called."""

    name: ShortText
    arguments: str


class WireToolCall(Wire):
    """A call an earlier reply made."""

    id: ShortText
    type: Literal["function"]
    function: WireFunction


class WireMessage(Wire):
    """One message. An assistant's may come back as an SDK gave it: empty extras are neutral."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str | None, BeforeValidator(_text_of)] = None
    name: ShortText | None = None
    tool_call_id: ShortText | None = None
    tool_calls: list[WireToolCall] | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None

    def to_message(self) -> Message:
        """The record of it; `developer` is OpenAI's newer word for `system`."""
        return Message(
            role="system" if self.role == "developer" else self.role,
            content=self.content,
            name=self.name,
            tool_call_id=self.tool_call_id,
            tool_calls=tuple(call.model_dump() for call in self.tool_calls or ()),
        )


class WireStreamOptions(Wire):
    """What a stream is to carry besides the reply."""

    include_usage: bool = False
    include_obfuscation: Literal[False] = False


class WireSao(Wire):
    """Our own extension of the request."""

    session_id: ShortText | None = None
    episode_id: ShortText | None = None
    train: bool | None = None


class ChatRequest(Wire):
    """A chat request, null fields dropped and fields that we do not serve refused before."""

    model: str
    messages: list[WireMessage] = Field(min_length=1)
    stream: bool = False
    stream_options: WireStreamOptions | None = None
    temperature: float = Field(1.0, ge=0.0, le=2.0)
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    top_k: int = Field(0, ge=-1, le=1_000_000)
    min_p: float = Field(0.0, ge=0.0, le=1.0)
    max_tokens: int | None = Field(None, ge=1, lt=_COUNT_LIMIT)
    max_completion_tokens: int | None = Field(None, ge=1, lt=_COUNT_LIMIT)
    stop: Annotated[list[StopText], BeforeValidator(_stops_of), Field(max_length=4)] = []
    seed: int | None = Field(None, ge=-_SEED_LIMIT, lt=_SEED_LIMIT)
    presence_penalty: float = Field(0.0, ge=-2.0, le=2.0)
    frequency_penalty: float = Field(0.0, ge=-2.0, le=2.0)
    repetition_penalty: float = Field(1.0, gt=0.0, le=10.0)
    logit_bias: Annotated[
        dict[int, Annotated[float, Field(ge=-100.0, le=100.0)]], BeforeValidator(_bias_of)
    ] = {}
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=20)
    user: Annotated[str, StringConstraints(min_length=1, max_length=512)] | None = None
    metadata: Annotated[
        dict[
            Annotated[str, StringConstraints(max_length=64)],
            Annotated[str, StringConstraints(max_length=512)],
        ],
        Field(max_length=16),
    ] = {}
    store: bool = True
    sao: WireSao = WireSao()

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk of usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    def to_sampling(self) -> Sampling:
        """How the reply is sampled."""
        return Sampling(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=max(self.top_k, 0),
            min_p=self.min_p,
            max_tokens=self.max_tokens or self.max_completion_tokens,
            stop=tuple(self.stop),
            seed=self.seed,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=tuple(self.logit_bias.items()),
            top_logprobs=self.top_logprobs,
        )


_NEUTRAL: dict[str, Callable[[Any], bool]] = {
    "n": lambda value: value == 1 and value is not True,
    "response_format": lambda value: value == {"type": "text"},
    "tools": lambda value: value == [],
    "functions": lambda value: value == [],
    "tool_choice": lambda value: value == "none",
    "function_call": lambda value: value == "none",
    "parallel_tool_calls": lambda value: isinstance(value, bool),
    "modalities": lambda value: value == ["text"],
    "service_tier": lambda value: value in ("auto", "default"),
    "prompt_cache_key": lambda value: isinstance(value, str),
    "safety_identifier": lambda value: isinstance(value, str),
    "audio": lambda value: False,
    "prediction": lambda value: False,
    "reasoning_effort": lambda value: value == "none",
    "verbosity": lambda value: value == "medium",
    "web_search_options": lambda value: False,
    "prompt_cache_retention": lambda value: False,
}
"""OpenAI's fields that are not served, each with the values that ask for nothing."""


def parse_chat(document: dict[str, Any]) -> ChatRequest:
    """The request in a JSON object. Raises ApiError 400 naming the field."""
    served: dict[str, Any] = {}
    for name, value in document.items():
        if name in _NEUTRAL:
            if value is not None and not _NEUTRAL[name](value):
                raise ApiError(
                    400, "unsupported_parameter", f"`{name}` is not served yet.", param=name
                )
        elif value is not None or name not in ChatRequest.model_fields:
            served[name] = value
    request = checked(ChatRequest, served)
    _check_together(request)
    return request


def _check_together(request: ChatRequest) -> None:
    """Raise ApiError 400 for fields that contradict each other."""
    both = (request.max_tokens, request.max_completion_tokens)
    if None not in both and both[0] != both[1]:
        raise _conflict("max_tokens", "`max_tokens` and `max_completion_tokens` differ.")
    if request.stream_options is not None and not request.stream:
        raise _conflict("stream_options", "`stream_options` needs `stream`: true.")
    if request.top_logprobs and not request.logprobs:
        raise _conflict("top_logprobs", "`top_logprobs` needs `logprobs`: true.")
    for i, message in enumerate(request.messages):
        if message.content is None and not (message.role == "assistant" and message.tool_calls):
            raise ApiError(
                400, "missing_field", "A message needs content.", param=f"messages[{i}].content"
            )


def _conflict(param: str, message: str) -> ApiError:
    return ApiError(400, "conflicting_parameters", message, param=param)


class FeedbackRequest(Wire):
    """Feedback on one reply; `value` is checked by its metric."""

    inference_id: Annotated[str, StringConstraints(max_length=128)]
    metric_name: Annotated[str, StringConstraints(max_length=128)]
    value: Any
    comment: Annotated[str, StringConstraints(max_length=10_000)] | None = None
    user: Annotated[str, StringConstraints(min_length=1, max_length=512)] | None = None
    id: ShortText | None = None


class EpisodeRequest(Wire):
    """Declares or closes a tool episode: there is nothing to say yet, and nothing is ignored."""
