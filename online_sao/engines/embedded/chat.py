"""The model's own chat template and tokenizer; nobody else renders a chat."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from transformers import AutoTokenizer

from online_sao.engines.embedded.detokenize import Vocabulary
from online_sao.errors import EngineRefused, ModelError

UNBOUNDED = 1 << 30


class Chat:
    """Renders chats, and knows the ids that end a reply."""

    def __init__(self, folder: Path, config: Any) -> None:
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError) as error:
            raise ModelError(f"{folder} has no tokenizer that can be read: {error}") from error
        if not self._tokenizer.chat_template:
            raise ModelError(f"the tokenizer in {folder} has no chat template")
        self.vocabulary = Vocabulary(self._tokenizer)
        text = config.get_text_config()
        self.vocabulary_size: int = text.vocab_size
        self.max_positions: int = getattr(text, "max_position_embeddings", None) or UNBOUNDED
        self.eos_ids = read_eos_ids(folder, text, self._tokenizer)

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None
    ) -> list[int]:
        """Token ids of the chat, the assistant's turn opened. Raises EngineRefused."""
        template = self._tokenizer.chat_template
        if tools and "tools" not in str(template):
            raise EngineRefused(
                "this model's chat template takes no tools",
                param="tools",
                code="unsupported_parameter",
            )
        plain = [{k: v for k, v in m.items() if v is not None} | _content(m) for m in messages]
        try:
            text = self._tokenizer.apply_chat_template(
                plain, tools=tools or None, add_generation_prompt=True, tokenize=False
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            reason = (str(error).splitlines() or [""])[0][:200]
            raise EngineRefused(
                f"the model's chat template refuses these messages: {reason}", param="messages"
            ) from error
        try:
            text.encode()
        except UnicodeEncodeError:
            raise EngineRefused(
                "a message holds half a surrogate pair", param="messages", code="invalid_unicode"
            ) from None
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def banned(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Each word's ids, as the start of a text and after a space."""
        found = {
            tuple(self._tokenizer.encode(form, add_special_tokens=False))
            for word in words
            for form in (word, " " + word.lstrip())
        }
        return tuple(sorted(ids for ids in found if ids))


def _content(message: Mapping[str, Any]) -> dict[str, Any]:
    return {"content": message.get("content") or ""}


def read_eos_ids(folder: Path, config: Any, tokenizer: Any) -> frozenset[int]:
    """Every id that ends a reply: generation_config's, the model's and the tokenizer's."""
    path = folder / "generation_config.json"
    stated = json.loads(path.read_text()).get("eos_token_id") if path.exists() else None
    found: set[int] = set()
    for value in (stated, getattr(config, "eos_token_id", None), tokenizer.eos_token_id):
        found.update(value if isinstance(value, list) else [] if value is None else [value])
    return frozenset(found)
