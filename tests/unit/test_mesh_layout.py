"""The mesh as plain data: coordinates, groups, what each rank reads; and what is refused."""

from __future__ import annotations

import pytest
import torch

from common.config.checkpoint import load_spec, parse_spec
from common.config.release import RELEASE
from common.errors import ConfigError
from common.parallel.mesh import Mesh, narrowed
from common.parallel.placement import Placement, even, routes
from common.weights import load_text
from common.weights.build import build_text
from common.weights.index import stored
from common.weights.load import is_read, sizes
from common.weights.match import Matcher
from common.weights.shares import shard_of
from common.weights.shelf import Shelf
from tests.support.golden import write_eight_headed

K3 = parse_spec(RELEASE)
MESHES = [
    Mesh(tensor=t, data=d, expert=e)
    for t in (1, 2, 4, 8)
    for d in (1, 2, 4, 8)
    for e in (1, 2, 4, 8, 16)
    if e <= t * d <= 16
]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_every_axis_divides_the_ranks_into_groups_of_its_size(mesh) -> None:
    sizes_of = {"tensor": mesh.tensor, "data": mesh.data, "expert": mesh.expert}
    for axis, size in sizes_of.items():
        groups = mesh.groups(axis)
        assert sorted(rank for group in groups for rank in group) == list(range(mesh.world))
        assert {len(group) for group in groups} == {size}


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_an_expert_group_holds_every_expert_once_and_each_lane_sends_every_row_once(mesh) -> None:
    for group in mesh.groups("expert"):
        seats = [mesh.seat(rank) for rank in group]
        assert [seat.expert for seat in seats] == list(range(mesh.expert))
        assert len({seat.width for seat in seats}) == 1
    for lane in mesh.groups("tensor"):
        cuts = sorted((mesh.seat(r).part, mesh.seat(r).width) for r in lane)
        assert cuts == [(p, w) for p in range(mesh.parts) for w in range(mesh.widths)]


def test_layouts_that_leave_a_rank_without_a_place_are_refused() -> None:
    for axes in ({"tensor": 0}, {"data": 2, "expert": 3}, {"tensor": 2, "data": 2, "expert": 8}):
        with pytest.raises(ConfigError):
            Mesh(**axes)
    with pytest.raises(ConfigError, match="96 KDA heads cannot be cut over 5"):
        Mesh(tensor=5).check(K3.text)
    with pytest.raises(ConfigError, match="896 experts cannot be shared 1024 ways"):
        Mesh(data=1024, expert=1024).check(K3.text)
    with pytest.raises(ConfigError, match="rank 4 is not one of the 4"):
        Mesh(tensor=4).seat(4)


def test_a_rank_sees_its_own_heads_and_everything_else_whole() -> None:
    own = narrowed(K3.text, Mesh(tensor=8))
    assert (own.kda.num_heads, own.mla.num_heads, own.kda.inner) == (12, 12, 1536)
    assert (own.vocab, own.moe, own.hidden) == (K3.text.vocab, K3.text.moe, 7168)


def test_ranks_read_their_own_bytes_alone(tmp_path) -> None:
    directory = write_eight_headed(tmp_path, "k3")
    spec = load_spec(directory)

    def read_by(mesh: Mesh, rank: int) -> dict[str, int]:
        shelf = Shelf(torch.float32, torch.device("meta"))
        build_text(spec, shelf, shard=shard_of(mesh, rank, spec.text))
        found = Matcher(shelf.places, spec, vision=False).run(stored(directory))
        return {m.main.name: sum(sizes(m)) for m in found if is_read(m)}

    whole = read_by(Mesh(), 0)
    for mesh in (Mesh(tensor=4), Mesh(data=3, expert=3), Mesh(tensor=2, data=2, expert=4)):
        ranks = [read_by(mesh, rank) for rank in range(mesh.world)]
        for name, size in whole.items():
            together = sum(rank.get(name, 0) for rank in ranks)
            if ".experts." in name:
                assert together == size
            elif any(rank[name] < size for rank in ranks):
                assert together == size * mesh.data  # each lane has the cut parts once
    expert = [n for n in whole if ".experts." in n]
    assert sum(read_by(Mesh(data=4, expert=4), 1).get(n, 0) for n in expert) * 4 == sum(
        whole[n] for n in expert
    )


def test_a_rank_takes_its_own_heads_of_the_padded_decay_rates(tmp_path) -> None:
    directory = write_eight_headed(tmp_path, "k3")  # A_log is stored with 64 values for 8 heads
    spec, mesh = load_spec(directory), Mesh(tensor=4)
    whole = load_text(directory, spec, dtype=torch.float32).layers[0].mixer.rate
    for rank in range(4):
        shard = shard_of(mesh, rank, spec.text)
        own = load_text(directory, spec, dtype=torch.float32, shard=shard).layers[0].mixer.rate
        assert torch.equal(own, whole[2 * rank : 2 * rank + 2])


def test_a_width_cut_too_small_is_padded_with_zeros(tmp_path) -> None:
    directory = write_eight_headed(tmp_path, "k3")  # experts are 128 wide: 16 a rank of eight
    spec, mesh = load_spec(directory), Mesh(tensor=8)
    last = load_text(directory, spec, dtype=torch.float32, shard=shard_of(mesh, 7, spec.text))
    stack = last.layers[1].ffn.experts
    assert stack.w13.shape[1] == 2 * 32 and stack.w2.shape[2] == 32
    assert not stack.w13.any() and not stack.w2.any()  # four ranks hold all 128


def test_even_shares_differ_by_one_expert_at_most() -> None:
    shares = even(896, 72).shares
    assert {len(share) for share in shares} == {12, 13} and sum(map(len, shares)) == 896


def test_copies_of_an_expert_are_used_in_turn() -> None:
    table = routes(Placement(((0, 1), (1, 2))), 3, "cpu")
    ids = torch.tensor([[1], [1], [1], [0]])
    share, local = table.find(ids, torch.arange(4).unsqueeze(1))
    assert share.flatten().tolist() == [0, 1, 0, 0] and local.flatten().tolist() == [1, 0, 1, 0]


@pytest.mark.parametrize("shares", [((0, 1),), ((0, 0, 1, 2),), ((0, 1, 2, 3),)])
def test_a_placement_that_is_not_one_is_refused(shares) -> None:
    with pytest.raises(ConfigError):
        Placement(shares).check(3)
