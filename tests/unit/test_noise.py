"""Noise is looked up by its key: known values, distribution, independence of everything else."""

import itertools
import math

import pytest
import torch

from common.sampling import noise


def test_bits_are_those_of_splitmix64() -> None:
    published = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    found = noise.bits(torch.tensor([1234567]), 5)[0].tolist()
    assert [value % 2**64 for value in found] == published


def test_bits_of_an_id_do_not_depend_on_the_vocabulary_or_on_other_rows() -> None:
    keys = torch.tensor([3, -(2**63), 2**63 - 1])
    whole = noise.bits(keys, 97)
    assert torch.equal(noise.bits(keys[1:2], 31)[0], whole[1, :31])


def test_every_part_of_the_key_changes_it() -> None:
    keys = [
        noise.row_key(seed=seed, choice=choice, position=position, purpose=purpose)
        for seed, choice, position, purpose in itertools.product(range(6), repeat=4)
    ]
    assert len(set(keys)) == 6**4
    assert all(-(2**63) <= key < 2**63 for key in keys)


def test_seed_counts_modulo_two_to_the_64() -> None:
    assert noise.row_key(seed=-1, choice=0, position=0) == noise.row_key(
        seed=2**64 - 1, choice=0, position=0
    )


def test_gumbel_values_have_the_mean_and_variance_of_the_distribution() -> None:
    keys = torch.tensor([noise.row_key(seed=1, choice=0, position=p) for p in range(64)])
    values = noise.gumbel(keys, 4096)
    spread = math.pi / math.sqrt(6)
    assert values.mean().item() == pytest.approx(
        0.5772157, abs=5 * spread / math.sqrt(values.numel())
    )
    assert values.var().item() == pytest.approx(spread**2, rel=0.02)


@pytest.mark.parametrize("extreme", [0, -1], ids=["all zeros", "all ones"])
def test_gumbel_is_finite_at_both_ends_of_the_uniform_number(
    extreme: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(noise, "bits", lambda keys, vocab: torch.full((1, vocab), extreme))
    assert noise.gumbel(torch.tensor([0]), 3).isfinite().all()


@pytest.mark.gpu
def test_bits_are_equal_on_both_devices() -> None:
    keys = torch.tensor([noise.row_key(seed=s, choice=1, position=9) for s in range(5)])
    assert torch.equal(noise.bits(keys.cuda(), 5000).cpu(), noise.bits(keys, 5000))
