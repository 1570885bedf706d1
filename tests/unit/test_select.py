"""The choice of op bodies: one table, made once, that never hides a refusal."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from common.config.checkpoint import load_spec
from common.config.spec import ModelSpec
from common.errors import BackendUnsupported, ConfigError
from common.ops import select
from common.ops.moe.stack import ExpertStack
from common.ops.table import REFERENCE, Ops

NANO = Path(__file__).parents[2] / "checkpoints" / "nano"
OPS = {field.name for field in dataclasses.fields(Ops)}


@pytest.fixture
def spec() -> ModelSpec:
    return load_spec(NANO)


def choose(
    spec: ModelSpec, wanted: str, device: str, exact: bool = False
) -> tuple[Ops, tuple[select.Choice, ...]]:
    return select.choose(
        wanted,
        spec.text,
        quantization=spec.quantization,
        dtype=torch.float32,
        device=torch.device(device),
        exact=exact,
    )


@pytest.mark.parametrize("wanted", ["auto", "reference"])
def test_a_cpu_runs_the_reference_and_the_table_names_every_op(
    spec: ModelSpec, wanted: str
) -> None:
    ops, table = choose(spec, wanted, "cpu")
    assert ops is REFERENCE
    assert {choice.op for choice in table} == OPS
    assert {choice.backend for choice in table} == {"reference"}


def test_triton_on_a_cpu_is_refused_with_the_remedy(spec: ModelSpec) -> None:
    with pytest.raises(BackendUnsupported, match=r"the device is cpu; set it to 'reference'"):
        choose(spec, "triton", "cpu")


def test_fp8_without_its_library_or_device_is_refused_with_the_remedy(
    spec: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    monkeypatch.setattr(select, "_unusable", lambda device: None)
    with pytest.raises(BackendUnsupported, match=r"the device is cpu; set it to 'auto'"):
        choose(spec, "fp8", "cpu")


def test_a_towers_bodies_follow_the_same_setting(spec: ModelSpec) -> None:
    assert spec.vision is not None
    cpu, kind = torch.device("cpu"), torch.float32
    assert select.choose_vision("auto", spec.vision, dtype=kind, device=cpu) is REFERENCE
    with pytest.raises(BackendUnsupported, match=r"the device is cpu; set it to 'reference'"):
        select.choose_vision("triton", spec.vision, dtype=kind, device=cpu)
    with pytest.raises(ConfigError, match=r"model.ops is 'fast'"):
        select.choose_vision("fast", spec.vision, dtype=kind, device=cpu)


def test_an_unknown_setting_is_an_error_that_lists_the_known_ones(spec: ModelSpec) -> None:
    with pytest.raises(ConfigError, match=r"'fast'; use one of auto, reference, triton"):
        choose(spec, "fast", "cpu")


def test_triton_refuses_a_model_that_one_of_its_bodies_cannot_take(
    spec: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(select, "_unusable", lambda device: None)
    kda = dataclasses.replace(spec.text.kda, gate_lower_bound=None)
    text = dataclasses.replace(spec.text, kda=kda)
    softplus = dataclasses.replace(spec, text=text)
    with pytest.raises(BackendUnsupported, match=r"kda_mix: the gate has no lower bound"):
        choose(softplus, "triton", "cuda")


def test_the_printed_table_gives_the_reason_for_every_op_left_to_torch() -> None:
    choices = (
        select.Choice(op="rms_norm", backend="triton"),
        select.Choice(op="experts", backend="reference", why="the experts are not packed"),
    )
    assert select.printed(choices).splitlines() == [
        "rms_norm  triton",
        "experts   reference   the experts are not packed",
    ]


def test_exact_on_a_device_refuses_definitions_and_says_which_op_has_no_fixed_tiles(
    spec: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(BackendUnsupported, match=r"set model.ops to 'auto'"):
        choose(spec, "reference", "cuda", exact=True)
    monkeypatch.setattr(select, "_unusable", lambda device: None)
    with pytest.raises(BackendUnsupported, match=r"experts of 128 x 96.*turn it off"):
        choose(spec, "auto", "cuda", exact=True)
    assert choose(spec, "auto", "cpu", exact=True)[0] is REFERENCE


def test_only_bodies_that_ask_nothing_of_the_host_can_be_captured() -> None:
    why = select.uncapturable(REFERENCE)
    assert why is not None and "mla_steps, write_steps, kda_mix run by their definitions" in why

    def body() -> None: ...

    ops = dataclasses.replace(REFERENCE, mla_steps=body, write_steps=body, kda_mix=body)
    assert select.uncapturable(ops) is None
    many = ExpertStack(w13=torch.empty(40, 2, 1), w2=torch.empty(40, 1, 1))
    assert select.uncapturable(ops, many, 5) is None  # all of them, on every row
    assert "experts run by their definitions" in (select.uncapturable(ops, many, 4) or "")
    packed = dataclasses.replace(many, w13_scale=many.w2, w2_scale=many.w2)
    assert "experts run by their definitions" in (select.uncapturable(ops, packed, 5) or "")
    assert select.uncapturable(dataclasses.replace(ops, experts=body), packed, 5) is None
    assert not select.takes_packed(ops)
    assert select.takes_packed(dataclasses.replace(ops, experts=body))
