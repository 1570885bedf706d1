"""Every layout of up to eight ranks computes what one rank computes."""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from common.parallel.mesh import Mesh
from tests.support.golden import write_eight_headed
from tests.support.models import alone, load
from tests.support.team import PROMPTS, finish, following, prompt_of, start

WAYS = (1, 2, 4, 8)
MESHES = [
    Mesh(tensor=t, data=d, expert=e)
    for t in WAYS
    for d in WAYS
    for e in WAYS
    if 1 < t * d <= 8 and e <= t * d
]
OTHERS = [Mesh(tensor=2, data=2, expert=4), Mesh(tensor=8, data=1, expert=2)]
SPREAD = [
    Mesh(tensor=2, expert=2, spread=True),
    Mesh(tensor=4, data=2, expert=8, spread=True),
]
UNEVEN = Mesh(tensor=1, data=3, expert=3)
REPEATED = {"shares": [list(range(9)), [0, 1, *range(9, 16)]]}  # experts 0 and 1 are held twice


def entry(mesh: Mesh, variant: str = "k3", **more) -> dict:
    axes = asdict(mesh)
    name = f"{variant}-{mesh.tensor}.{mesh.data}.{mesh.expert}" + "".join(sorted(more))
    name += "spread" * mesh.spread
    return {"name": name, "variant": variant, "mesh": axes, **more}


RECORDED = [
    entry(Mesh(tensor=2)),
    entry(Mesh(data=2, expert=2), "k3-mxfp4", packed=True),
    entry(Mesh(tensor=2, data=2, expert=4)),
]


def recorded(layout: dict, by: str) -> dict:
    """A layout whose requests are fed as steps, and those recorded: as graphs, or to run again."""
    return layout | {"recorded": by, "name": f"{layout['name']}-{by}"}


LAYOUTS = [
    *map(entry, MESHES),
    *(entry(mesh, variant) for mesh in OTHERS for variant in ("linear", "k3-mxfp4")),
    entry(OTHERS[0], "k3-mxfp4", packed=True),
    entry(UNEVEN),
    entry(Mesh(data=2, expert=2), **REPEATED),
    *(entry(mesh, variant) for mesh in SPREAD for variant in ("k3", "linear")),
    *(recorded(layout, "eager") for layout in RECORDED),
]


def results_of(root: Path, layout: dict) -> list[dict[str, torch.Tensor]]:
    """What the lanes of a layout computed."""
    lanes = range(layout["mesh"]["data"])
    return [load_file(root / f"{layout['name']}.{lane}.safetensors") for lane in lanes]


def run_team(root: Path, layouts: list[dict], world: int, **more) -> dict:
    """Run layouts on `world` processes; the logits one rank gives, by variant, whether
    requests are fed as steps alone, and request."""
    tiny = {
        variant: write_eight_headed(root / variant, variant)
        for variant in {layout["variant"] for layout in layouts}
    }
    job = {
        "checkpoints": {variant: str(path) for variant, path in tiny.items()},
        "layouts": layouts,
        "out": str(root),
        "store": str(root / "store"),
        "world": world,
        **more,
    }
    (root / "job.json").write_text(json.dumps(job))
    finish(start(root / "job.json", world), within_s=150)
    models = {variant: load(path) for variant, path in tiny.items()}
    return {
        (variant, stepwise, n): alone(model, prompt_of(n, stepwise), following(n))
        for variant, model in models.items()
        for stepwise in {"recorded" in layout for layout in layouts}
        for n in PROMPTS
    }


def check(expected: dict, layout: dict, lanes: list[dict], atol: float) -> None:
    """Every request's logits are near those of one rank."""
    found = {int(n): rows for lane in lanes for n, rows in lane.items()}
    assert found.keys() == PROMPTS.keys()
    for number, logits in found.items():
        one = expected[layout["variant"], "recorded" in layout, number]
        torch.testing.assert_close(logits, one, rtol=0, atol=atol)
        assert torch.equal(logits.argmax(-1), one.argmax(-1))


@pytest.fixture(scope="module")
def team(tmp_path_factory):
    """Runs every layout once; what one rank computes, and a function to the layouts' results."""
    root = tmp_path_factory.mktemp("team")
    return run_team(root, LAYOUTS, 8), partial(results_of, root)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout["name"])
def test_logits_are_those_of_one_rank(team, layout) -> None:
    expected, results = team
    check(expected, layout, results(layout), 2e-4)


@pytest.mark.parametrize("data", [2, 4, 8])
def test_without_tensor_ranks_not_a_bit_changes(team, data) -> None:
    expected, results = team
    for lane in results(entry(Mesh(data=data, expert=data))):
        for number, logits in lane.items():
            assert torch.equal(logits, expected["k3", False, int(number)])


def loads_of(root: Path, layout: dict) -> list[torch.Tensor]:
    """What every rank of a layout counted."""
    ranks = range(Mesh(**layout["mesh"]).world)
    paths = [root / f"{layout['name']}.load{rank}.safetensors" for rank in ranks]
    return [load_file(path)["load"] for path in paths]


def test_load_counts_every_token_once_and_no_padding(team) -> None:
    _, results = team
    (root,) = results.args
    tokens = sum(PROMPTS.values()) + len(PROMPTS) * len(following(0))
    counts = []
    meshes = (Mesh(tensor=2), Mesh(tensor=2, data=2, expert=4), Mesh(data=8, expert=8), SPREAD[1])
    for mesh in meshes:
        load_of = torch.stack(loads_of(root, entry(mesh))).sum(0)
        assert load_of.sum(1).tolist() == [4 * tokens] * 4  # four experts a token, four layers
        counts.append(load_of)
    assert all(torch.equal(counts[0], other) for other in counts[1:])


@pytest.mark.gpu
def test_ranks_that_share_one_device_compute_what_one_rank_does(tmp_path) -> None:
    layouts = [entry(mesh) for mesh in (Mesh(tensor=2, expert=2), Mesh(tensor=2, data=2, expert=4))]
    expected = run_team(tmp_path, layouts, 4, device="cuda")
    for layout in layouts:
        check(expected, layout, results_of(tmp_path, layout), 2e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", RECORDED, ids=lambda layout: layout["name"])
def test_captured_steps_of_a_group_are_bit_for_bit_what_they_recorded(tmp_path, layout) -> None:
    graphs, eager = recorded(layout, "cuda"), recorded(layout, "eager")
    expected = run_team(tmp_path, [graphs, eager], Mesh(**layout["mesh"]).world, device="cuda")
    check(expected, graphs, results_of(tmp_path, graphs), 2e-3)
    lanes = zip(results_of(tmp_path, graphs), results_of(tmp_path, eager), strict=True)
    for one, other in lanes:
        assert one.keys() == other.keys()
        assert all(torch.equal(one[number], other[number]) for number in one)


@pytest.mark.multigpu
@pytest.mark.parametrize("layout", RECORDED[:2], ids=lambda layout: layout["name"])
def test_captured_steps_of_two_devices_compute_what_one_rank_does(tmp_path, layout) -> None:
    graphs = recorded(layout, "cuda")
    expected = run_team(tmp_path, [graphs], 2, backend="nccl")
    check(expected, graphs, results_of(tmp_path, graphs), 2e-3)


@pytest.mark.multigpu
def test_two_devices_compute_what_one_rank_does_over_nccl(tmp_path) -> None:
    layouts = [entry(mesh) for mesh in MESHES if mesh.world == 2]
    expected = run_team(tmp_path, layouts, 2, backend="nccl")
    for layout in layouts:
        check(expected, layout, results_of(tmp_path, layout), 2e-3)
