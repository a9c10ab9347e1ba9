"""The model's own chat template, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedTokenizerFast

from online_sao.engines.embedded.chat import Chat
from online_sao.errors import EngineRefused, ModelError

PLAIN = "{% for m in messages %}{{ m['role'][0] + m['content'] }}{% endfor %}{{ '>' }}"
STRICT = "{% if messages[0]['role'] == 'assistant' %}{{ raise_exception('user first') }}{% endif %}"
TOOLS = "{% for t in tools %}{{ t['name'] }}{% endfor %}"


def chat(folder: Path, template: str | None) -> Chat:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return Chat(
        folder, LlamaConfig(vocab_size=256, max_position_embeddings=77, eos_token_id=[3, 4])
    )


def test_a_chat_becomes_the_ids_of_the_templates_text(tmp_path: Path) -> None:
    made = chat(tmp_path, PLAIN)
    ids = made.render([{"role": "user", "content": "h\u00e9 \U0001f600"}], None)
    assert made.vocabulary.decode(ids) == "uh\u00e9 \U0001f600>"
    assert (made.eos_ids, made.max_positions, made.vocabulary_size) == ({3, 4}, 77, 256)


def test_a_token_of_half_a_character_has_its_own_bytes(tmp_path: Path) -> None:
    made = chat(tmp_path, PLAIN)
    ids = made.render([{"role": "u", "content": "\U0001f600"}], None)
    raw = b"".join(bytes(made.vocabulary.token(i)[1]) for i in ids)
    assert raw == "u\U0001f600>".encode()


@pytest.mark.parametrize(
    ("template", "messages", "word"),
    [
        (STRICT, [{"role": "assistant", "content": "x"}], "user first"),
        (PLAIN, [{"content": "no role"}], "role"),
        (PLAIN, [{"role": "user", "content": [{"type": "text"}]}], ""),
        ("{{ messages[9]['role'] }}", [{"role": "user", "content": "x"}], ""),
    ],
)
def test_what_a_template_cannot_take_is_refused(
    tmp_path: Path, template: str, messages: list[dict[str, object]], word: str
) -> None:
    with pytest.raises(EngineRefused, match=f"chat template refuses.*{word}") as caught:
        chat(tmp_path, template).render(messages, None)
    assert caught.value.param == "messages"


def test_tools_go_to_a_template_that_knows_them_and_are_refused_by_others(tmp_path: Path) -> None:
    tool = {"name": "clock"}
    message = [{"role": "user", "content": "x"}]
    knowing = chat(tmp_path / "a", TOOLS)
    assert knowing.vocabulary.decode(knowing.render(message, [tool])) == "clock"
    with pytest.raises(EngineRefused, match="takes no tools"):
        chat(tmp_path / "b", PLAIN).render(message, [tool])


def test_half_a_surrogate_pair_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EngineRefused) as caught:
        chat(tmp_path, PLAIN).render([{"role": "user", "content": "\ud83d"}], None)
    assert caught.value.code == "invalid_unicode"


def test_banned_words_are_banned_with_and_without_a_space_before(tmp_path: Path) -> None:
    made = chat(tmp_path, PLAIN)
    assert {made.vocabulary.decode(ids) for ids in made.banned(["no"])} == {"no", " no"}


def test_a_tokenizer_without_a_template_is_no_chat_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no chat template"):
        chat(tmp_path, None)
