"""The additive digest: vectors, sensitivity, shards, finiteness."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from common.ops.digest import MASK, Signature, digest_words, splitmix64
from common.transfer.digest import digest_embeds, digest_latents, digest_slot


def by_definition(data: bytes, first: int = 0) -> int:
    words = np.frombuffer(data, dtype="<u4").tolist()
    return sum((w + 1) * (splitmix64(i) | 1) for i, w in enumerate(words, start=first)) & MASK


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("first", [0, 5, (1 << 22) - 8, 1 << 33])
def test_torch_agrees_with_plain_integers(dtype, first):
    values = torch.randn(3, 4, 10, generator=torch.Generator().manual_seed(1)).to(dtype)
    sums, finite = digest_words(values, first)
    expected = [
        by_definition(row.contiguous().view(torch.uint8).numpy().tobytes(), first) for row in values
    ]
    assert [value & MASK for value in sums.tolist()] == expected
    assert finite.all()


def test_zeros_do_not_digest_to_zero_and_a_shift_shows():
    zeros = torch.zeros(1, 8)
    moved = torch.tensor([[1.0, 0, 0, 0, 0, 0, 0, 0], [0, 1.0, 0, 0, 0, 0, 0, 0]])
    assert digest_words(zeros)[0].item() != 0
    assert len({digest_words(zeros)[0].item(), *digest_words(moved)[0].tolist()}) == 3


def test_every_single_bit_matters():
    values = torch.zeros(1, 4, dtype=torch.float32)
    clean = digest_words(values)[0].item()
    bits = values.view(torch.int32)
    for word in range(4):
        for bit in range(32):
            bits[0, word] ^= -(1 << 31) if bit == 31 else 1 << bit
            assert digest_words(values)[0].item() != clean
            bits[0, word] ^= -(1 << 31) if bit == 31 else 1 << bit


def test_head_shards_add_up_to_the_layer():
    state, conv = torch.randn(2, 4, 8, 8), torch.randn(2, 4, 3, 3, 8).bfloat16()
    whole = digest_slot(state, conv, (1, 5))
    parts = digest_slot(state[:, :1].contiguous(), conv[:, :1].contiguous(), (1, 5))
    parts = parts + digest_slot(
        state[:, 1:].contiguous(), conv[:, 1:].contiguous(), (1, 5), first_head=1
    )
    assert parts == whole
    assert set(whole.sums) == {"state:1", "state:5", "conv:1", "conv:5"}


def test_pages_add_up_by_position_and_cover_only_the_requests_tokens():
    pages = torch.randn(3, 2, 64, 16).bfloat16()
    whole = digest_latents(pages, (0, 3), 130)
    parts = digest_latents(pages[:1], (0, 3), 64) + digest_latents(
        pages[1:], (0, 3), 66, first_page=1
    )
    assert parts == whole
    pages[2, :, 2:] = float("nan")
    assert digest_latents(pages, (0, 3), 130) == whole
    pages[[0, 1]] = pages[[1, 0]]
    assert digest_latents(pages, (0, 3), 130).sums != whole.sums


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_value_that_is_not_finite_names_its_layer(value, dtype):
    state, conv = torch.zeros(2, 1, 4, 4), torch.zeros(2, 1, 3, 3, 4, dtype=dtype)
    conv[1, 0, 2, 1, 3] = value
    assert digest_slot(state, conv, (0, 2)).unsound == ("conv:2",)
    assert digest_embeds(conv[1, 0, :, 1])[1] is False


def test_a_row_that_is_no_whole_number_of_words_is_refused():
    with pytest.raises(ValueError, match="multiple of 4 bytes"):
        digest_words(torch.zeros(1, 3, dtype=torch.bfloat16))


def test_signatures_join_different_names_and_add_equal_ones():
    one, two = Signature(sums={"a:0": MASK}), Signature(sums={"b:0": 1}, unsound=("b:0",))
    assert (one | two).sums == {"a:0": MASK, "b:0": 1}
    assert (one + Signature(sums={"a:0": 2})).sums == {"a:0": 1}
    with pytest.raises(ValueError, match="signed twice"):
        one | one
    with pytest.raises(ValueError, match="different layers"):
        one + two


def vectors():
    text = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text()
    rows = re.findall(
        r"^\| ([`0-9a-f ]*)\| (\d+) \| `([0-9a-f]{16})` \|$", text, flags=re.MULTILINE
    )
    return [
        (words.strip("` ").split(), int(first), int(digest, 16)) for words, first, digest in rows
    ]


@pytest.mark.parametrize(("words", "first", "digest"), vectors())
def test_the_documents_vectors_hold(words, first, digest):
    data = b"".join(int(word, 16).to_bytes(4, "little") for word in words)
    assert by_definition(data, first) == digest
    if words:
        values = torch.frombuffer(bytearray(data), dtype=torch.float32)[None]
        assert digest_words(values, first)[0].item() & MASK == digest


def test_the_document_has_nine_vectors():
    assert len(vectors()) == 9
