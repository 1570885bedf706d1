"""Planning a deployment: memory by hand, sensible choices, and sentences for the impossible."""

from __future__ import annotations

from dataclasses import replace

import pytest

from common.config import geometry
from common.config.checkpoint import load_spec, parse_spec
from common.config.plan import GPUS, RESERVE, Wish, active_values, plan
from common.config.ranks import GIB, rank_memory, share_bytes, text_bytes
from common.config.release import RELEASE
from common.errors import ConfigError
from services.cli import main
from tests.support.golden import NANO

K3 = parse_spec(RELEASE)
BF16 = "bfloat16"
WISH = Wish(gpus=64, gpu="h200", context=131_072, users=500, typical=8192, answer=512)


def test_one_rank_holds_all_weights_and_ranks_together_no_less() -> None:
    sizes = geometry.weights(K3, BF16)
    assert text_bytes(K3, BF16, tensor=1) == sizes.text
    assert share_bytes(K3, BF16, tensor=1, data=1, expert=1) == sizes.experts
    for tensor in (2, 4, 8):
        assert sizes.text < tensor * text_bytes(K3, BF16, tensor=tensor) < 2 * sizes.text
        assert share_bytes(K3, BF16, tensor=tensor, data=2, expert=2) == sizes.experts // (
            2 * tensor
        )
        assert share_bytes(K3, BF16, tensor=tensor, data=2, expert=2 * tensor) == sizes.experts // (
            2 * tensor
        )


def test_active_values_are_those_of_the_release() -> None:
    assert round(active_values(K3) / 1e9, 1) == 104.2


def test_a_rank_that_is_too_full_is_refused_with_the_numbers() -> None:
    fits = rank_memory(
        K3, BF16, tensor=8, data=2, expert=16, slots=64, pages=4096, available=139 * GIB
    )
    fits.check()
    assert fits.total == sum((fits.text, fits.experts, fits.slots, fits.pages))
    full = rank_memory(K3, BF16, tensor=8, data=1, expert=8, available=139 * GIB)
    with pytest.raises(ConfigError, match=r"190\.97 .*its device has 139\.00; give more tensor"):
        full.check()
    replace(full, available=0).check()  # unknown memory is not judged
    assert any("total" in line for line in full.lines())


def test_a_plan_keeps_to_its_gpus_and_their_memory_and_serves_its_users() -> None:
    for gpus in (48, 64, 128):
        found = plan(K3, replace(WISH, gpus=gpus))
        used = found.prefill.world * found.prefill_replicas
        used += found.decode.world * found.decode_replicas
        assert used <= gpus and found.decode.requests * found.decode_replicas >= WISH.users
        for layout in (found.prefill, found.decode):
            assert layout.memory.total <= GPUS["h200"].memory
            assert layout.memory.reserve == RESERVE
        assert found.step_s > 0 and found.prefill_rate > 0


def test_more_gpus_never_finish_fewer_requests() -> None:
    rates = []
    for gpus in (48, 64, 96):
        found = plan(K3, replace(WISH, gpus=gpus))
        decode = WISH.users / found.step_s / WISH.answer
        rates.append(min(decode, found.prefill_rate / (WISH.typical - WISH.answer)))
    assert rates == sorted(rates)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"gpus": 8}, "do not fit 8 x h200: weights take 1,453 GiB of 1,112"),
        ({"gpus": 24}, "24 x h200 are too few: a prefill replica alone takes 16"),
        ({"gpus": 32}, "500 users of 8,192 tokens do not fit 32 x h200: at most"),
        ({"gpu": "abacus"}, "'abacus' is unknown"),
        ({"gpus": -4}, "gpus is -4; it must be at least 1"),
        ({"users": 0}, "users is 0; it must be at least 1"),
        ({"context": 1 << 21}, "beyond the model's 1048576"),
    ],
)
def test_the_impossible_is_refused_with_its_reason(change, sentence) -> None:
    with pytest.raises(ConfigError, match=sentence):
        plan(K3, replace(WISH, **change))


def test_a_small_model_needs_two_gpus() -> None:
    wish = replace(WISH, gpus=2, users=8, context=2048, typical=1024)
    found = plan(load_spec(NANO), wish)
    assert (found.prefill.world, found.decode.world) == (1, 1)


def test_the_command_prints_a_plan_or_a_reason(capsys) -> None:
    asked = ["plan", "--gpu", "h200", "--context", "128k", "--gpus"]
    assert main([*asked, "64", "--users", "500"]) == 0
    assert "decode     1 x" in capsys.readouterr().out
    assert main([*asked, "32", "--users", "500"]) == 1
    assert "at most" in capsys.readouterr().err
    assert main(["plan", "--gpus", "64", "--users", "1", "--context", "12q"]) == 1
    assert "write 8192 or 8k" in capsys.readouterr().err
