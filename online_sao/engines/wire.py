"""The wire between the service and its engine: vLLM's token-in, token-out protocol as JSON.

Both ends of it that are ours live on this page's functions: `HttpEngine` writes requests with
`sampling_to_wire`; our own servers read them with `parse` and write replies with `chunk_to_wire`.
NaN and Infinity pass in both directions: a record is what happened.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from online_sao.errors import EngineRefused
from online_sao.types import ReplyChunk, Sampling, TokenText

MAX_PROBLEMS = 10
MAX_PROBLEM_CHARS = 200
MAX_TOP_LOGPROBS = 20


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class SamplingBody(_Body):
    """vLLM's sampling parameters, as far as our servers serve them; others are refused."""

    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1)
    min_p: float = Field(0.0, ge=0, le=1)
    max_tokens: int | None = Field(None, ge=1)
    min_tokens: int = Field(0, ge=0)
    stop: str | list[str] | None = None
    seed: int | None = None
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    repetition_penalty: float = Field(1.0, gt=0)
    logit_bias: dict[str, float] | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    prompt_logprobs: int | None = Field(None, ge=0, le=0)
    """0 alone: the prompt's own tokens, no alternatives."""
    ignore_eos: bool = False
    n: Literal[1] = 1
    detokenize: Literal[True] = True
    skip_special_tokens: Literal[True] = True

    def to_sampling(self) -> Sampling:
        """The same as our own record."""
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        if "" in stop:
            raise EngineRefused("stop holds an empty string", param="stop")
        try:
            bias = tuple((int(key), value) for key, value in (self.logit_bias or {}).items())
        except ValueError:
            raise EngineRefused("logit_bias: a key is no token id", param="logit_bias") from None
        return Sampling(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=max(0, self.top_k),
            min_p=self.min_p,
            max_tokens=self.max_tokens,
            min_tokens=self.min_tokens,
            stop=stop,
            seed=self.seed,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=bias,
            bad_words=tuple(self.bad_words or ()),
            allowed_token_ids=tuple(self.allowed_token_ids or ()),
            top_logprobs=self.logprobs or 0,
        )


class StreamOptions(_Body):
    """Which usage a stream carries."""

    include_usage: bool = False
    continuous_usage_stats: Literal[False] = False


class GenerateBody(_Body):
    """`POST /inference/v1/generate`."""

    request_id: str = Field(min_length=1, max_length=256)
    token_ids: list[int] = Field(min_length=1)
    sampling_params: SamplingBody
    output_mode: Literal["text"]
    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
    """Accepted: our servers keep no cache between requests, so there is nothing to salt."""


class ChatBody(_Body):
    """`POST /v1/chat/completions/render`."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    model: str | None = None
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: Literal[True] = True


class UpdateInfo(_Body):
    """Which weights to take: a version folder, its number, and the hash its bytes must have."""

    path: str
    version: int = Field(ge=0)
    sha256: str = Field(min_length=64, max_length=64)


class UpdateBody(_Body):
    """`POST /start_weight_update` and `POST /update_weights`."""

    update_info: UpdateInfo


class FinishBody(_Body):
    """`POST /finish_weight_update`."""

    weight_version: str


class AbortBody(_Body):
    """`POST /inference/v1/abort_requests`."""

    request_ids: list[str]


BodyT = TypeVar("BodyT", bound=BaseModel)


def parse(kind: type[BodyT], raw: bytes) -> BodyT:
    """The request body. Raises EngineRefused naming each bad field, never echoing its value."""
    try:
        data = json.loads(raw)
    except (ValueError, RecursionError):
        raise EngineRefused("the body is not valid JSON", code="invalid_json") from None
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise _explain(error) from None


def _explain(error: ValidationError) -> EngineRefused:
    problems = error.errors(include_url=False, include_input=False)[:MAX_PROBLEMS]
    names = [
        ".".join(str(part) for part in problem["loc"]).removeprefix("sampling_params.") or "body"
        for problem in problems
    ]
    lines = [
        f"{name}: {problem['msg']}"[:MAX_PROBLEM_CHARS]
        for name, problem in zip(names, problems, strict=True)
    ]
    unknown = problems[0]["type"] == "extra_forbidden"
    return EngineRefused(
        "; ".join(lines),
        param=names[0].partition(".")[0],
        code="unsupported_parameter" if unknown else "invalid_value",
    )


def sampling_to_wire(sampling: Sampling) -> dict[str, Any]:
    """vLLM's `sampling_params`; the sampled token's own log-probability is always asked for."""
    wire: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "min_tokens": sampling.min_tokens,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "logprobs": sampling.top_logprobs,
    }
    optional: dict[str, Any] = {
        "max_tokens": sampling.max_tokens,
        "stop": list(sampling.stop) or None,
        "seed": sampling.seed,
        "logit_bias": {str(key): value for key, value in sampling.logit_bias} or None,
        "bad_words": list(sampling.bad_words) or None,
        "allowed_token_ids": list(sampling.allowed_token_ids) or None,
    }
    return wire | {key: value for key, value in optional.items() if value is not None}


def chunk_to_wire(request_id: str, chunk: ReplyChunk, *, logprobs: bool) -> dict[str, Any]:
    """One streamed chunk (or the whole reply) as vLLM writes it."""
    choice: dict[str, Any] = {
        "index": 0,
        "text": chunk.text,
        "token_ids": list(chunk.token_ids),
        "logprobs": {"content": _content(chunk)} if logprobs else None,
        "finish_reason": chunk.finish_reason,
        "stop_reason": None,
    }
    if chunk.finish_reason is not None:
        choice["weight_versions"] = [
            {"version": str(span.version), "start": span.start, "end": span.end}
            for span in chunk.version_spans
        ]
    return {"request_id": request_id, "output_mode": "text", "choices": [choice]}


def _content(chunk: ReplyChunk) -> list[dict[str, Any]]:
    texts: Sequence[TokenText] = chunk.tokens or tuple(TokenText("") for _ in chunk.token_ids)
    return [
        {
            "token": text.token,
            "logprob": logprob,
            "bytes": None if text.bytes is None else list(text.bytes),
            "top_logprobs": [
                {
                    "token": top.token,
                    "logprob": top.logprob,
                    "bytes": None if top.bytes is None else list(top.bytes),
                }
                for top in text.top
            ],
        }
        for text, logprob in zip(texts, chunk.logprobs, strict=False)
    ]


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    """OpenAI's usage object."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def error_to_wire(message: str, *, kind: str, param: str | None, code: str) -> Mapping[str, Any]:
    """OpenAI's error object."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def dumps(data: Mapping[str, Any]) -> bytes:
    """Compact JSON; NaN and Infinity stay what they are."""
    return json.dumps(data, separators=(",", ":")).encode()


def sse(data: Mapping[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + dumps(data) + b"\n\n"


SSE_DONE = b"data: [DONE]\n\n"


def merge(chunks: Sequence[ReplyChunk]) -> ReplyChunk:
    """Consecutive chunks of one reply as one."""
    if len(chunks) == 1:
        return chunks[0]
    last = chunks[-1]
    return ReplyChunk(
        text="".join(chunk.text for chunk in chunks),
        token_ids=tuple(i for chunk in chunks for i in chunk.token_ids),
        logprobs=tuple(value for chunk in chunks for value in chunk.logprobs),
        tokens=tuple(text for chunk in chunks for text in chunk.tokens),
        finish_reason=last.finish_reason,
        version_spans=last.version_spans,
        completion_tokens=last.completion_tokens,
    )
