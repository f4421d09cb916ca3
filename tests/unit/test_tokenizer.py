"""Tokenizers against `transformers`, chat templates with their errors, and text streams that never take back."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import models, normalizers, pre_tokenizers, trainers

from stagemesh.shared.errors import Rejected
from stagemesh.shared.model.chat_template import ChatTemplate
from stagemesh.shared.model.hf_config import read_json
from stagemesh.shared.model.source import GgufSource, open_model
from stagemesh.shared.model.tokenizer import Tokenizer
from tests.support.tiny_gguf import write_gguf
from tests.support.tiny_models import BOS_ID, CORPUS, EOS_ID, make_tiny

TEXTS = (
    "",
    " ",
    "\n\n\t  two lines\r\n   and  spaces   ",
    "The quick baker sells bread in 2024 for $3.50, or 1,000,000 at once.",
    "def f(x):\n    return [y**2 for y in x if y != 0]  # squares\n",
    "naïve café — “quotes”… ½ €",
    "漢字かな交じり文、한국어 텍스트, العربية, हिन्दी",
    "👩‍👩‍👧‍👦 family, flags 🇫🇷🇯🇵, skin 👍🏽",
    "<s>not a start</s> <|turn|>user <|im_start|>",
    "it's we'll they've I'd DON'T",
    "\u0000\u200b\ufffd\u2028",
)
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny"), num_layers=1, dtype="float32")


@pytest.fixture(scope="module")
def tiny(directory: Path) -> Tokenizer:
    return open_model(str(directory)).tokenizer()


def train_sentencepiece() -> Backend:
    """Byte-fallback BPE over text with "\u2581" for spaces, as Llama 2 has."""
    backend = Backend(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    backend.pre_tokenizer = pre_tokenizers.Split("\u2581", "merged_with_next")
    special = ["<unk>", "<s>", "</s>", *BYTES]
    trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=special, show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    return backend


@pytest.fixture(scope="module")
def sentencepiece(directory: Path) -> tuple[Backend, Tokenizer]:
    """A trained tokenizer, and ours from its tokens and scores alone."""
    backend = train_sentencepiece()
    content = json.loads(backend.to_str())["model"]
    tokens = sorted(content["vocab"], key=content["vocab"].__getitem__)
    rank = {left + right: number for number, (left, right) in reversed([*enumerate(content["merges"])])}
    overrides = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [-float(rank.get(token, 10_000)) for token in tokens],
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * (len(tokens) - 259),
        "tokenizer.ggml.merges": None,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.chat_template": None,
    }
    path = write_gguf(directory, directory / "sentencepiece.gguf", overrides=overrides)
    return backend, open_model(str(path)).tokenizer()


def streamed(tokenizer: Tokenizer, ids: Sequence[int], skip_special_tokens: bool = True) -> list[str]:
    stream = tokenizer.stream(skip_special_tokens)
    return [*map(stream.push, ids), stream.finish()]


@pytest.mark.parametrize("text", TEXTS)
def test_a_directory_encodes_and_decodes_as_transformers_does(directory: Path, tiny: Tokenizer, text: str) -> None:
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(directory)
    assert tiny.encode(text) == reference.encode(text)
    ids = tiny.encode(text, add_special_tokens=False)
    assert ids == reference.encode(text, add_special_tokens=False)
    for skip in (True, False):
        assert tiny.decode(ids, skip) == reference.decode(ids, skip_special_tokens=skip)


def test_chat_is_rendered_as_transformers_renders_it(directory: Path, tiny: Tokenizer) -> None:
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(directory)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Wie geht's? 你好"}]
    for prompted in (True, False):
        expected = reference.apply_chat_template(messages, add_generation_prompt=prompted, return_dict=False)
        assert tiny.apply_chat(messages, add_generation_prompt=prompted) == expected
    assert tiny.has_chat_template
    assert (tiny.vocab_size, tiny.bos_token_id, tiny.eos_token_id) == (320, BOS_ID, EOS_ID)


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ([], "must not be empty"),
        ([{"role": "user"}], "message 0 must have a text 'content'"),
        ([{"role": "user", "content": "a"}, {"role": 3, "content": "b"}], "message 1 must have a text 'role'"),
        ([{"role": "robot", "content": "a"}], "refuses them: unknown role"),
    ],
)
def test_messages_that_cannot_be_rendered_are_refused(tiny: Tokenizer, messages: list[Any], problem: str) -> None:
    with pytest.raises(Rejected, match=problem) as caught:
        tiny.apply_chat(messages)
    assert caught.value.field == "messages"


def test_templates_have_the_usual_helpers_and_no_others() -> None:
    message = [{"role": "user", "content": "<ü>"}]
    rendered = {
        "{{ messages[0] | tojson }}": '{"role": "user", "content": "<ü>"}',
        "{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}": "01",
        "{% generation %}{{ messages[0].content }}{% endgeneration %}": "<ü>",
        "{{ tools is none }} {{ documents is none }} {{ bos_token }}{{ absent }}": "True True <s>",
        "  {% if true %}\nx\n  {% endif %}\ny": "x\ny",
    }
    for source, expected in rendered.items():
        assert ChatTemplate(source, {"bos_token": "<s>"}).render(message, add_generation_prompt=True) == expected
    assert len(ChatTemplate("{{ strftime_now('%Y') }}", {}).render(message, add_generation_prompt=True)) == 4
    for source in ("{{ ().__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ 'a' + 1 }}", "{{ 1 // 0 }}"):
        with pytest.raises(Rejected):
            ChatTemplate(source, {}).render(message, add_generation_prompt=True)
    with pytest.raises(Rejected, match="the chat template is broken"):
        ChatTemplate("{% if %}", {})


def copy_tokenizer(directory: Path, target: Path, changes: dict[str, Any]) -> Path:
    """The tokenizer and the config of a model, with `changes` in the tokenizer's settings; None removes a key."""
    for name in ("config.json", "tokenizer.json"):
        (target / name).write_bytes((directory / name).read_bytes())
    content = {**read_json(directory / "tokenizer_config.json"), **changes}
    left = {key: value for key, value in content.items() if value is not None}
    (target / "tokenizer_config.json").write_text(json.dumps(left))
    return target


def test_templates_are_found_where_they_may_be(directory: Path, tmp_path: Path) -> None:
    message = [{"role": "user", "content": "x"}]
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "{{ messages[0].content }}"}]
    target = copy_tokenizer(directory, tmp_path, {"chat_template": named})
    tokenizer = open_model(str(target)).tokenizer()
    assert tokenizer.decode(tokenizer.apply_chat(message)) == "x"
    (target / "chat_template.jinja").write_text("file")
    tokenizer = open_model(str(target)).tokenizer()
    assert tokenizer.decode(tokenizer.apply_chat(message)) == "file"


def test_without_settings_special_tokens_come_from_the_config(directory: Path, tmp_path: Path) -> None:
    target = copy_tokenizer(directory, tmp_path, {})
    (target / "tokenizer_config.json").unlink()
    tokenizer = open_model(str(target)).tokenizer()
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (BOS_ID, EOS_ID)
    with pytest.raises(Rejected, match="has no chat template"):
        tokenizer.apply_chat([{"role": "user", "content": "x"}])


def test_a_missing_or_broken_tokenizer_is_named(directory: Path, tmp_path: Path) -> None:
    target = copy_tokenizer(directory, tmp_path, {})
    (target / "tokenizer.json").write_text("{}")
    with pytest.raises(Rejected, match=r"tokenizer\.json: cannot be used"):
        open_model(str(target)).tokenizer()
    (target / "tokenizer.json").unlink()
    with pytest.raises(Rejected, match=r"tokenizer\.json: is missing"):
        open_model(str(target)).tokenizer()


@given(ids=st.lists(st.integers(0, 330), max_size=60), skip=st.booleans())
@settings(max_examples=300, deadline=None)
def test_pieces_join_to_the_whole_for_any_byte_level_ids(tiny: Tokenizer, ids: list[int], skip: bool) -> None:
    whole = tiny._backend.decode(ids, skip_special_tokens=skip)
    assert "".join(streamed(tiny, ids, skip)) == whole == tiny.decode(ids, skip)


@given(text=st.text(max_size=40))
@settings(max_examples=200, deadline=None)
def test_pieces_of_any_text_are_whole_characters(
    tiny: Tokenizer, sentencepiece: tuple[Backend, Tokenizer], text: str
) -> None:
    for tokenizer in (tiny, sentencepiece[1]):
        pieces = streamed(tokenizer, tokenizer.encode(text, add_special_tokens=False))
        assert "".join(pieces) == text.replace("\u2581", "\u2581" if tokenizer is tiny else " ")
        assert "\ufffd" in text or not any("\ufffd" in piece for piece in pieces)


@given(ids=st.lists(st.one_of(st.integers(0, 430), st.integers(3, 258)), max_size=40))
@settings(max_examples=300, deadline=None)
def test_pieces_join_to_the_whole_for_any_byte_fallback_ids(
    sentencepiece: tuple[Backend, Tokenizer], ids: list[int]
) -> None:
    tokenizer = sentencepiece[1]
    joined = "".join(streamed(tokenizer, ids))
    assert joined == tokenizer.decode(ids)
    plain = tokenizer._backend.decode(ids)
    assert "\ufffd" in plain or joined == plain


def test_half_a_character_waits_and_a_broken_one_is_shown_at_the_end(tiny: Tokenizer) -> None:
    ids = tiny.encode("é", add_special_tokens=False)
    assert len(ids) == 2
    stream = tiny.stream()
    assert [stream.push(ids[0]), stream.push(EOS_ID), stream.push(ids[1]), stream.finish()] == ["", "", "é", ""]
    stream = tiny.stream()
    assert [stream.push(ids[0]), stream.finish(), stream.finish()] == ["", "\ufffd", ""]


def test_sentencepiece_merges_follow_from_scores(sentencepiece: tuple[Backend, Tokenizer]) -> None:
    backend, ours = sentencepiece
    for text in (*TEXTS, *CORPUS):
        if "<s>" not in text:
            assert ours.encode(text, add_special_tokens=False) == backend.encode(text, add_special_tokens=False).ids
    assert ours.encode("hi")[0] == BOS_ID
    assert ours.decode(ours.encode("  hi there ")) == "  hi there "


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        ({"tokenizer.ggml.pre": "tekken"}, "tokenizer.ggml.pre: 'tekken' is not supported"),
        ({"tokenizer.ggml.model": "bert"}, "tokenizer.ggml.model: 'bert' is not supported"),
        ({"tokenizer.ggml.model": None}, "has no tokenizer"),
        ({"tokenizer.ggml.model": "llama"}, "tokenizer.ggml.scores: must hold one score a token"),
    ],
)
def test_unknown_kinds_of_gguf_tokenizer_are_refused(
    directory: Path, tmp_path: Path, overrides: dict[str, Any], problem: str
) -> None:
    path = write_gguf(directory, tmp_path / "model.gguf", overrides=overrides)
    with pytest.raises(Rejected, match=problem):
        open_model(str(path)).tokenizer()


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "llama-bpe", "qwen2"])
def test_a_converted_tokenizer_is_the_same(directory: Path, tiny: Tokenizer, tmp_path: Path, pre: str) -> None:
    path = write_gguf(directory, tmp_path / "model.gguf", overrides={"tokenizer.ggml.pre": pre})
    ours = open_model(str(path)).tokenizer()
    for text in TEXTS:
        ids = ours.encode(text)
        assert ours.decode(ids, skip_special_tokens=False) == text
        assert pre != "gpt-2" or ids == tiny.encode(text)
    message = [{"role": "user", "content": "x"}]
    assert pre != "gpt-2" or ours.apply_chat(message) == tiny.apply_chat(message)


def test_threads_may_share_a_tokenizer(tiny: Tokenizer) -> None:
    message = [{"role": "user", "content": CORPUS[0]}]
    with ThreadPoolExecutor(4) as pool:
        encoded = [*pool.map(tiny.encode, CORPUS * 20)]
        chats = [*pool.map(tiny.apply_chat, [message] * 40)]
    assert encoded == [tiny.encode(text) for text in CORPUS] * 20
    assert chats == [tiny.apply_chat(message)] * 40


@pytest.mark.slow
def test_smollm2_tokenizes_as_transformers_does_from_the_same_file() -> None:
    from transformers import AutoTokenizer

    source = open_model("smollm2")
    assert isinstance(source, GgufSource)
    path = source._file.path
    ours, reference = source.tokenizer(), AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    for text in (*TEXTS, *CORPUS):
        ids = ours.encode(text)
        # The reference ignores that this model cuts before every numeral, which shows where one is no digit.
        assert ids == reference.encode(text) or "½" in text
        assert ours.decode(ids, False) == reference.decode(ids, skip_special_tokens=False) == text
        assert "".join(streamed(ours, ids, False)) == text
    assert [ours.decode([token_id]) for token_id in ours.encode(" ½ 24")[:1]] == [" "]
    messages = [{"role": "user", "content": "What is 2 + 2?"}]
    expected = reference.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert ours.apply_chat(messages) == expected
    assert (ours.vocab_size, ours.bos_token_id, ours.eos_token_id) == (49152, 1, 2)
