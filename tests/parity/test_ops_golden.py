"""Every op against the golden results of other implementations."""

from __future__ import annotations

import functools
import json

import pytest
import torch

from common.ops import attnres, kda, moe, quant
from common.ops.act import situ
from common.ops.plan import Chunks
from tests.support.golden import GOLDEN, tensors


@functools.cache
def facts(name: str) -> dict:
    return json.loads((GOLDEN / f"{name}.json").read_text())


def cases(name: str, prefix: str = "") -> list[str]:
    return [case for case in facts(name) if case.startswith(prefix)]


def grid(length: int) -> Chunks:
    """One share of `length` tokens from the start, in slot 0."""
    count = -(-length // 64)
    return Chunks(
        slots=torch.tensor([0]),
        first=torch.tensor([0, count]),
        starts=torch.tensor([0]),
        lengths=torch.tensor([min(64, length - 64 * i) for i in range(count)]),
        tables=torch.arange(count).unsqueeze(0),
    )


def run_kda(case: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The golden case through gate and chunked form: g, o and the final state [H, V, K]."""
    info, data = facts("kda_ops")[case], tensors("kda_ops")
    names = ("q", "k", "v", "gate_logits", "beta_logits", "A_log", "dt_bias")
    x = {key: data[f"{case}.{key}"] for key in names}
    length, heads, dim = x["q"].shape
    bias = x["dt_bias"].view(heads, -1)
    g = kda.gate(x["gate_logits"], x["A_log"].exp(), bias, info["lower_bound"])
    state = torch.zeros(1, 1, heads, x["v"].shape[-1], dim)
    if info["has_initial_state"]:
        state[0, 0] = data[f"{case}.initial_state"].transpose(1, 2)
    rows = [
        torch.cat([value, value.new_full((-length % 64, *value.shape[1:]), 7.0)])
        for value in (x["q"], x["k"], x["v"], g, torch.sigmoid(x["beta_logits"]))
    ]
    o = kda.chunks(*(value.unflatten(0, (-1, 64)) for value in rows), state, 0, grid(length))
    return g, o.flatten(0, 1)[:length], state[0, 0]


@pytest.mark.parametrize("case", cases("kda_ops"))
def test_kda_equals_the_naive_recurrence(case: str) -> None:
    data = tensors("kda_ops")
    g, o, state = run_kda(case)
    torch.testing.assert_close(g, data[f"{case}.g"], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(o, data[f"{case}.o"], rtol=0, atol=2e-5)
    final = data[f"{case}.final_state"].transpose(1, 2)
    torch.testing.assert_close(state, final, rtol=0, atol=2e-5)


@pytest.mark.parametrize("case", cases("ops", "attn_res"))
def test_the_residual_read_equals_both_engines(case: str) -> None:
    info = facts("ops")[case]
    x = {
        k.removeprefix(f"{case}."): v for k, v in tensors("ops").items() if k.startswith(f"{case}.")
    }
    bank = x["bank"].clone()
    out, prefix = attnres.read(
        x["prefix"],
        bank,
        info["readable_blocks"],
        x["score_norm"] * x["score_proj"],
        eps=info["eps"],
        pending=x.get("pending"),
        norm=x.get("output_norm"),
        write_row=None if info["write_row"] < 0 else info["write_row"],
    )
    torch.testing.assert_close(out, x["output"], rtol=0, atol=2e-6)
    torch.testing.assert_close(prefix, x["prefix_after"], rtol=0, atol=1e-6)
    if "bank_row_after" in x:
        torch.testing.assert_close(
            bank[:, info["write_row"]], x["bank_row_after"], rtol=0, atol=1e-6
        )


@pytest.mark.parametrize("case", cases("ops", "situ"))
def test_situ_equals_the_engine(case: str) -> None:
    info, x = facts("ops")[case], tensors("ops")
    out = situ(
        x[f"{case}.gate"], x[f"{case}.up"], beta=info["beta"], linear_beta=info["linear_beta"]
    )
    expected = x[f"{case}.output"]
    if case.endswith("f32"):
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=0)
    else:  # equal, or one unit in the last place
        assert (out.view(torch.int16).int() - expected.view(torch.int16).int()).abs().max() <= 1


@pytest.mark.parametrize("case", cases("ops", "router"))
def test_the_router_chooses_and_weighs_like_the_engine(case: str) -> None:
    info, x = facts("ops")[case], tensors("ops")
    ids, weights = moe.route(
        x[f"{case}.logits"],
        x[f"{case}.bias"],
        top_k=info["top_k"],
        num_groups=info["groups"],
        top_groups=info["top_groups"],
        renormalize=info["renormalize"],
        scaling=info["scaling"],
    )
    assert torch.equal(ids, x[f"{case}.ids_sorted"].long())
    torch.testing.assert_close(weights, x[f"{case}.weights"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("case", sorted({key.split(".")[0] for key in tensors("mxfp4")}))
def test_mxfp4_bytes_and_values_are_equal(case: str) -> None:
    x = tensors("mxfp4")
    packed, scale = x[f"{case}.weight_packed"], x[f"{case}.weight_scale"]
    values = quant.unpack_mxfp4(packed, scale, torch.float32)
    assert torch.equal(values, x[f"{case}.dequantised"])
    if f"{case}.weight" in x:
        again, scale_again = quant.pack_mxfp4(x[f"{case}.weight"])
        assert torch.equal(again, packed) and torch.equal(scale_again, scale)
