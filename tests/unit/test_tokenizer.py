from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import CheckpointError
from router.prompt.detokenize import Detokenizer
from router.prompt.tokenizer import LONGEST_RUN, Tokenizer
from tests.support.nano import ROOT, nano_tokenizer

TOKENIZER = nano_tokenizer()
EMOJI = "👩‍👧 日本 ď"


def test_named_slots_are_those_of_the_checkpoint():
    config = json.loads((ROOT / "checkpoints/nano/tokenizer_config.json").read_text())
    for token, entry in config["added_tokens_decoder"].items():
        assert TOKENIZER.specials[entry["content"]] == int(token)
        assert TOKENIZER.name(int(token)) == entry["content"]
    assert TOKENIZER.vocab == 1536 and TOKENIZER.end_of_msg == 1282


@given(st.text() | st.sampled_from(list(TOKENIZER.specials)))
def test_text_comes_back_and_never_holds_a_control_token(text):
    ids = TOKENIZER.encode(text)
    assert all(token < TOKENIZER.base for token in ids)
    assert TOKENIZER.decode(ids) == text


def test_markers_become_control_tokens_only_where_asked():
    ids = TOKENIZER.encode_marked("a<|close|>think<|sep|>")
    assert ids[1] == TOKENIZER.close and ids[-1] == TOKENIZER.sep
    assert TOKENIZER.decode(ids) == "a<|close|>think<|sep|>"
    assert TOKENIZER.decode(ids, names=False) == "athink"


@pytest.mark.parametrize("text", ["z" * 60_000, " " * 60_000, "word " * 100_000, "日本" * 20_000])
def test_long_runs_are_cut_without_losing_anything(text):
    ids = TOKENIZER.encode(text)
    assert TOKENIZER.decode(ids) == text


def test_cuts_fall_only_inside_overlong_runs():
    word = "ab" * (LONGEST_RUN // 2)
    assert list(TOKENIZER.encode(word + " tail")) == [
        *TOKENIZER.encode(word),
        *TOKENIZER.encode(" tail"),
    ]


def test_threads_may_share_a_tokenizer():
    texts = [f"request {i} says {'hello ' * i}" for i in range(50)]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(TOKENIZER.encode, texts)) == [TOKENIZER.encode(t) for t in texts]


@pytest.mark.parametrize("content", ["not base64", "YQ== 5\n", "YQ==\n"])
def test_a_broken_file_is_refused(tmp_path, content):
    path = tmp_path / "tiktoken.model"
    path.write_text(content)
    with pytest.raises(CheckpointError):
        Tokenizer(path)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="does not exist"):
        Tokenizer(tmp_path / "tiktoken.model")


def fed(ids):
    text = Detokenizer(TOKENIZER)
    pieces = [text.feed(token) for token in ids]
    return [*pieces, text.flush()]


def byte_tokens(text: str) -> list[int]:
    return [TOKENIZER.encode(chr(b))[0] if b < 128 else byte_token(b) for b in text.encode()]


def byte_token(value: int) -> int:
    return next(i for i in range(256) if TOKENIZER.piece(i) == bytes([value]))


@given(st.text())
def test_pieces_hold_only_whole_characters_and_join_to_the_text(text):
    pieces = fed(byte_tokens(text))
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in text


def test_a_character_is_let_out_with_its_last_byte():
    assert fed(byte_tokens("🌊")) == ["", "", "", "🌊", ""]


def test_an_unfinished_character_becomes_one_replacement_at_the_end():
    assert fed(byte_tokens("a🌊")[:-1]) == ["a", "", "", "", "\ufffd"]


def test_bytes_that_cannot_become_a_character_are_replaced_at_once():
    assert fed([byte_token(0xF0), *byte_tokens("a")]) == ["", "\ufffda", ""]
    assert fed([byte_token(0xFF), *byte_tokens("a")]) == ["\ufffd", "a", ""]


@given(st.lists(st.integers(0, 1535)))
def test_any_ids_give_the_same_text_piecewise_and_whole(ids):
    assert "".join(fed(ids)) == TOKENIZER.decode(ids, names=False)
