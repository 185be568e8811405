"""Tokenizer, template, incremental text and stop strings, against the library's own whole decode."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import FrameType

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from baton.cluster.adapters import AdapterEntry
from baton.protos.errors import CheckpointError, InvalidRequest
from baton.router.adapters.registry import AdapterRegistry
from baton.router.request.request import ServedModel
from baton.router.text.catalog import ModelCatalog, generation_defaults
from baton.router.text.chat_template import ChatTemplate, load_chat_template
from baton.router.text.detokenize import StopStrings, WindowDetokenizer
from baton.router.text.model import load_text
from baton.router.text.tokenizer import ByteTokenizer, HfTokenizer, token_name


def streamed(tokenizer, ids: list[int], **options) -> str:
    detokenizer = tokenizer.detokenizer(**options)
    return "".join(detokenizer.push(i) for i in ids) + detokenizer.flush()


@given(data=st.data())
def test_streamed_text_is_the_whole_decode_for_any_ids(tokenizer: HfTokenizer, vocab_size: int, data) -> None:
    ids = data.draw(st.lists(st.integers(0, vocab_size - 1), max_size=40))
    assert streamed(tokenizer, ids) == tokenizer.decode(ids)


@given(data=st.data())
def test_pieces_of_several_tokens_join_to_the_same_text(tokenizer: HfTokenizer, vocab_size: int, data) -> None:
    ids = data.draw(st.lists(st.integers(0, vocab_size - 1), max_size=40))
    size = data.draw(st.integers(1, 9))
    detokenizer = tokenizer.detokenizer()
    pieces = [detokenizer.push_all(ids[at : at + size]) for at in range(0, len(ids), size)]
    assert "".join(pieces) + detokenizer.flush() == tokenizer.decode(ids)


@given(text=st.text(max_size=60))
def test_text_survives_the_way_to_ids_and_back_in_pieces(tokenizer: HfTokenizer, text: str) -> None:
    assert streamed(tokenizer, tokenizer.encode(text, False), skip_special_tokens=False) == text
    ids = ByteTokenizer(256).encode(text, False)
    assert streamed(ByteTokenizer(256), ids) == text


def test_a_character_comes_out_whole_or_not_at_all(tokenizer: HfTokenizer) -> None:
    detokenizer = tokenizer.detokenizer()
    byte_ids = [tokenizer._tokenizer.token_to_id(c) for c in "ðŁ¥ł"]  # 🥠 as four byte tokens
    pieces = [detokenizer.push(i) for i in byte_ids]
    assert pieces == ["", "", "", "🥠"]


def test_special_tokens_are_left_out_unless_asked_for(tokenizer: HfTokenizer) -> None:
    ids = [0, *tokenizer.encode("fox", False), 1]
    assert streamed(tokenizer, ids) == "fox"
    assert streamed(tokenizer, ids, skip_special_tokens=False) == "<|begin|>fox<|end|>"


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory) -> HfTokenizer:
    """Returns a tokenizer like Llama 2's: ▁ for spaces, bytes as <0xAB>, a decoder that strips the first space."""
    words = ["<unk>", "▁Hello", "▁world", "!", *(f"<0x{b:02X}>" for b in range(256))]
    tokenizer = Tokenizer(
        models.BPE({w: i for i, w in enumerate(words)}, [], unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    path = tmp_path_factory.mktemp("sp") / "tokenizer.json"
    tokenizer.save(str(path))
    return HfTokenizer(path)


def test_a_stripping_decoder_keeps_the_space_of_a_continuation(sentencepiece: HfTokenizer) -> None:
    assert streamed(sentencepiece, [1, 2, 3]) == "Hello world!"
    assert streamed(sentencepiece, [2, 3], context=[1]) == " world!"


def test_tokens_that_are_skipped_take_no_space_from_the_next_word(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.BPE({"▁a": 0, "<s>": 1}, [], unk_token="<s>"))
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert streamed(HfTokenizer(tmp_path / "tokenizer.json"), [1, 0, *[1] * 20, 0, 1, 0]) == "a a a"


def test_byte_fallback_characters_come_out_whole(sentencepiece: HfTokenizer) -> None:
    detokenizer = sentencepiece.detokenizer()
    pieces = [detokenizer.push(4 + byte) for byte in "é日".encode()]
    assert pieces == ["", "é", "", "", "日"]
    assert sentencepiece.token_bytes(4 + 0xC3) == b"\xc3"
    assert sentencepiece.token_bytes(1) == b" Hello"


@pytest.mark.parametrize("text", ["😂" * 7, "👩‍❤️‍👨👩‍❤️‍👨!", "é€😂é€ world", "日本語のテキスト", "Hello😂 world"])
def test_characters_of_bytes_in_a_row_come_out_whole_wherever_a_text_goes_on(
    sentencepiece: HfTokenizer, text: str
) -> None:
    """A decoder reads bytes that follow each other as one string, and gives up all of it for a wrong one."""
    parts = parts_of(text)
    for at in range(len(parts)):
        before, rest = joined(parts_of("😂") + parts[:at]), joined(parts[at:])
        whole = sentencepiece.decode(before + rest)
        assert sentencepiece.decode(before) + streamed(sentencepiece, rest, context=before) == whole
    assert streamed(sentencepiece, joined(parts)) == sentencepiece.decode(joined(parts))


def test_an_unfinished_character_spoils_none_before_it(sentencepiece: HfTokenizer) -> None:
    two = joined(parts_of("😂😂"))
    assert streamed(sentencepiece, [1, *two[:-2]]) == "Hello😂��"
    assert streamed(sentencepiece, [*two[:-2], 2]) == "😂�� world"


def joined(parts: list[list[int]]) -> list[int]:
    return [token for part in parts for token in part]


def parts_of(text: str) -> list[list[int]]:
    """Returns the ids of each word and character of a text by ``sentencepiece``: bytes, but for its few words."""
    words, parts = {"Hello": 1, " world": 2, "!": 3}, list[list[int]]()
    while text:
        word = next((word for word in words if text.startswith(word)), "")
        parts.append([words[word]] if word else [4 + byte for byte in text[0].encode()])
        text = text[len(word) or 1 :]
    return parts


def test_endless_garbage_is_not_held_for_ever() -> None:
    detokenizer = WindowDetokenizer(lambda ids: "�" * len(ids))
    assert any(detokenizer.push(0) for _ in range(40))


def test_names_of_tokens_that_are_no_text_are_openais() -> None:
    assert token_name(b" fox") == " fox"
    assert token_name(b"\xe4\xbd") == "bytes:\\xe4\\xbd"


@given(
    text=st.text("ab", max_size=30),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    cuts=st.lists(st.integers(0, 30)),
    include=st.booleans(),
)
def test_stop_strings_are_found_wherever_pieces_are_cut(text, stops, cuts, include) -> None:
    finder, out, stopped = StopStrings(stops, include), "", False
    edges = sorted({0, len(text), *(c for c in cuts if c < len(text))})
    for low, high in pairwise(edges):
        piece, stopped = finder.push(text[low:high])
        out += piece
        if stopped:
            break
    out += "" if stopped else finder.flush()
    assert stopped == any(stop in text for stop in stops)
    if not stopped:
        assert out == text
    elif include:
        assert any(out.endswith(stop) for stop in stops)
    else:
        assert text.startswith(out)
        assert any(text.startswith(out + stop) for stop in stops)


def test_a_possible_beginning_of_a_stop_string_is_held_back() -> None:
    finder = StopStrings(["\n\nQ:"])
    assert finder.push("A\n") == ("A", False)
    assert finder.push("\n") == ("", False)
    assert finder.push("B") == ("\n\nB", False)
    assert finder.push("\n\nQ: more") == ("", True)


async def test_long_texts_leave_the_event_loop_free(model_dir: Path) -> None:
    text = load_text(model_dir, 400)
    await text.encode("warm")
    turns = 0
    encoding = asyncio.create_task(text.encode("The quick brown fox " * 40_000))
    while not encoding.done():
        await asyncio.sleep(0.001)
        turns += 1
    assert len(await encoding) > 10_000
    assert turns > 5


def test_templates_have_hugging_faces_dialect(tmp_path: Path) -> None:
    source = (
        "{%- for m in messages %}{% if m.role == 'skip' %}{% continue %}{% endif %}"
        "{% generation %}{{ m | tojson }}{% endgeneration %}{% endfor %}"
        "{{ strftime_now('%Y') | length }}{{ eos_token }}"
    )
    messages = [{"role": "skip"}, {"role": "user", "content": "<é>"}]
    rendered = ChatTemplate(source, {"eos_token": "</s>"}).render(messages)
    assert rendered == '{"role": "user", "content": "<é>"}4</s>'


def test_a_template_has_switches_of_its_own_but_not_over_ours() -> None:
    template = ChatTemplate("{{ messages | length }}{% if not enable_thinking %}<no_think>{% endif %}")
    switches = {"enable_thinking": False, "messages": [1, 2, 3]}
    assert template.render([{"role": "user", "content": "x"}], switches=switches) == "1<no_think>"


def test_templates_are_as_transformers_renders_them(model_dir: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast.from_pretrained(str(model_dir))
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "Hi  there"}]
    ours = load_chat_template(model_dir)
    assert ours is not None
    for prompt in (True, False):
        assert ours.render(messages, prompt) == theirs.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=prompt
        )


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content + 1 }}", "can't render"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "refuses"),
    ],
)
def test_a_refusing_template_is_the_callers_error(source: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as refused:
        ChatTemplate(source).render([{"role": "user", "content": "x"}])
    assert refused.value.param == "messages"


def test_the_template_is_found_in_each_of_its_places(tmp_path: Path) -> None:
    assert load_chat_template(tmp_path) is None
    several = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "two"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": several}))
    assert load_chat_template(tmp_path).render([]) == "two"
    (tmp_path / "chat_template.jinja").write_text("three")
    assert load_chat_template(tmp_path).render([]) == "three"


@pytest.mark.parametrize("in_files", [False, True])
def test_conversations_with_tools_have_the_template_that_the_model_has_for_them(
    tmp_path: Path, in_files: bool
) -> None:
    plain, other = "{{ messages[0].content }}", "{{ tools[0].name }}: {{ messages[0].content }}"
    several = [{"name": "default", "template": plain}, {"name": "tool_use", "template": other}]
    if in_files:
        (tmp_path / "chat_template.jinja").write_text(plain)
        (tmp_path / "additional_chat_templates").mkdir()
        (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text(other)
    else:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": several}))
    template = load_chat_template(tmp_path)
    messages = [{"role": "user", "content": "x"}]
    assert template.render(messages) == "x"
    assert template.render(messages, tools=[{"name": "f"}]) == "f: x"
    assert "tools" in template.names


def test_a_list_of_templates_without_names_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": [{"template": "x"}]}))
    with pytest.raises(CheckpointError, match="a name and a template in each entry"):
        load_chat_template(tmp_path)


def test_text_that_no_utf8_holds_is_the_callers_error(tokenizer: HfTokenizer) -> None:
    with pytest.raises(InvalidRequest, match="no valid text: half a surrogate pair at character 1"):
        tokenizer.encode("a\ud83d", False)


async def test_a_model_without_a_template_refuses_chat(tmp_path: Path, model_dir: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((model_dir / "tokenizer.json").read_bytes())
    with pytest.raises(InvalidRequest, match="/v1/completions"):
        await load_text(tmp_path, 400).encode_chat([{"role": "user", "content": "x"}])


def test_a_damaged_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        load_text(tmp_path, 400)


def test_a_vocabulary_smaller_than_bytes_takes_ids_only() -> None:
    with pytest.raises(InvalidRequest, match="token ids"):
        ByteTokenizer(64).encode("abc", False)


def test_defaults_come_from_the_generation_config(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.6, "top_k": 20, "do_sample": true}')
    assert generation_defaults(tmp_path) == {"temperature": 0.6, "top_k": 20}
    assert generation_defaults(None) == {}


def test_a_model_that_was_seen_stays_known_while_its_workers_restart() -> None:
    served = [ServedModel("a", 64, 300, (1,)), ServedModel("b", 64, 300, ())]
    catalog = ModelCatalog(lambda: served)
    with pytest.raises(InvalidRequest, match="'a', 'b'"):
        catalog.find("")
    served.clear()
    assert catalog.entries() == []
    assert catalog.find("a").model_id == "a"


def test_a_model_that_comes_under_an_adapters_name_changes_none_of_the_adapters_answers(caplog) -> None:
    served = [ServedModel("a", 64, 300, (1,))]
    adapters = AdapterRegistry([AdapterEntry("sql", "a", "team/sql", "1" * 16)])
    catalog = ModelCatalog(lambda: served, adapters=adapters)
    before = catalog.find("sql")
    served.append(ServedModel("sql", 64, 300, (1,)))
    catalog.entries()
    assert [catalog.find("sql") for _ in range(2)] == [before] * 2
    assert (before.model_id, catalog.model_of("sql")) == ("a", "a")
    assert caplog.text.count("it means the adapter; serve the model as another") == 1


def test_a_model_whose_tokenizer_the_router_lacks_is_refused_and_not_answered_in_stand_ins_for_text() -> None:
    served = [ServedModel("a", 64, 300, ()), ServedModel("b", 64, 300, (), has_text=True)]
    catalog = ModelCatalog(lambda: served)
    assert catalog.text(catalog.find("a")).tokenizer.decode([104, 105]) == "hi"
    with pytest.raises(CheckpointError, match=r"no tokenizer of .b.: .*worker\.model"):
        catalog.text(catalog.find("b"))


def test_a_held_tail_is_not_compared_again_with_every_stop_string_for_each_token() -> None:
    """Beside a held kilobyte and fifteen other stop strings a token took 1.7 ms."""
    finder = StopStrings(["a" * 1023 + "b", *(chr(ord("c") + i) * 1024 for i in range(15))])
    finder.push("a" * 1000)
    lines = lines_run(lambda: [finder.push("a") for _ in range(100)])
    assert len(finder.held) == 1023
    assert lines < 100 * 16 * 30, "a few of each stop string's for each token"


def lines_run(call: Callable[[], object]) -> int:
    """Returns how many lines of Python ``call`` runs, which tells what it does whatever else runs."""
    count = 0

    def traced(frame: FrameType, event: str, _: object) -> Callable[..., object]:
        nonlocal count
        count += event == "line"
        return traced

    before = sys.gettrace()
    sys.settrace(traced)
    try:
        call()
    finally:
        sys.settrace(before)
    return count
