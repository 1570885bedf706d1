"""FP8 experts around grouped products: on a CPU those are torch's, on Hopper DeepGEMM's."""

# ruff: noqa: I001 - the support module settles how kernels run, so it comes before them.
from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from tests.support.triton_ops import DEVICE, GPU, off_by, randn

from common.config.checkpoint import parse_spec
from common.config.geometry import expert_bytes
from common.config.release import RELEASE
from common.errors import BackendUnsupported
from common.ops import moe, quant
from common.ops.act import Activation
from common.ops.moe.deepgemm import DeepGemm, Fp8Experts, to_fp8, unavailable

SITU = Activation(kind="situ", beta=4.0, linear_beta=25.0)
SILU = Activation(kind="silu")
BOUND = 0.05 if GPU else 0.15  # the interpreter cuts to FP8 where the device rounds
pytestmark = pytest.mark.filterwarnings(  # of the interpreter: numpy scalars, masked overflows
    "ignore::DeprecationWarning", "ignore::RuntimeWarning"
)


def wide(values: Tensor, scale: Tensor) -> Tensor:
    return values.float() * scale.repeat_interleave(128, -1)[..., : values.shape[-1]]


class Slow:
    """Grouped products in torch, that read no row that is not used."""

    def masked(self, a, a_scale, b, b_scale, out, counts, expected) -> None:
        out.fill_(float("nan"))
        for e, count in enumerate(counts.tolist()):
            left = wide(a[e, :count], a_scale[e, :count])
            out[e, :count] = left @ wide(b[e], b_scale[e].repeat_interleave(128, 0)).T

    def contiguous(self, a, a_scale, b, b_scale, out, experts) -> None:
        out.fill_(float("nan"))
        assert len(experts) % 128 == 0
        for tile in range(0, len(experts), 128):
            (e,) = set(experts[tile : tile + 128].tolist())
            if e >= 0:
                left = wide(a[tile : tile + 128], a_scale[tile : tile + 128])
                right = wide(b[e], b_scale[e].repeat_interleave(128, 0))
                out[tile : tile + 128] = left @ right.T


def packed(count: int, inner: int, width: int) -> moe.ExpertStack:
    w13, w13_scale = quant.pack_mxfp4(torch.randn(count, 2 * inner, width) * 0.05)
    w2, w2_scale = quant.pack_mxfp4(torch.randn(count, width, inner) * 0.05)
    parts = [x.to(DEVICE) for x in (w13, w2, w13_scale, w2_scale)]
    return moe.ExpertStack(w13=parts[0], w2=parts[1], w13_scale=parts[2], w2_scale=parts[3])


def random_codes(count: int, inner: int, width: int) -> moe.ExpertStack:
    """Any codes, made where the kernels run: packing so many takes a CPU a minute."""

    def fill(*shape: int, low: int = 0, high: int = 256) -> Tensor:
        return torch.empty(shape, dtype=torch.uint8, device=DEVICE).random_(low, high)

    return moe.ExpertStack(
        w13=fill(count, 2 * inner, width // 2), w2=fill(count, width, inner // 2),
        w13_scale=fill(count, 2 * inner, width // 32, low=116, high=121),
        w2_scale=fill(count, width, inner // 32, low=116, high=121),
    )  # fmt: skip


def choices(rows: int, count: int, top: int) -> Tensor:
    return torch.rand(rows, count, device=DEVICE).topk(top, -1).indices.sort(-1).values


@pytest.mark.parametrize("activation", [SITU, SILU], ids=["situ", "silu"])
@pytest.mark.parametrize("is_masked", [True, False], ids=["masked", "contiguous"])
def test_fp8_experts_are_the_experts_up_to_rounding(activation, is_masked: bool) -> None:
    stack, rows = packed(5, 128, 256), 37
    ids, weights = choices(rows, 5, 2), torch.rand(rows, 2, device=DEVICE)
    ids[:, 0] = ids[:, 0].clamp(min=1)  # one expert gets nothing
    ids = ids.sort(-1).values
    x = randn(rows, 256)
    experts = Fp8Experts(Slow())
    out = experts(x, ids, weights, to_fp8(stack), activation, None, is_masked=is_masked)
    assert off_by(out, moe.experts(x, ids, weights, stack, activation, None)) < BOUND


def test_fp8_experts_take_the_memory_that_is_planned_for_them() -> None:
    spec = parse_spec(RELEASE)
    moe_spec = dataclasses.replace(spec.text.moe, width=128, latent=256)
    text = dataclasses.replace(spec.text, moe=moe_spec)
    spec = dataclasses.replace(spec, text=text, quantization=Fp8Experts(Slow()).held)
    held = to_fp8(packed(5, 128, 256))
    tensors = (held.w13, held.w2, held.w13_scale, held.w2_scale)
    assert sum(t.nbytes for t in tensors if t is not None) == 5 * expert_bytes(spec, "bfloat16")


def test_weights_of_powers_of_two_survive_fp8() -> None:
    """The squares' largest is 448 after scaling, so values a power of two apart are kept."""
    weights = torch.tensor([7.0, -3.5, 1.75, 0.0]).repeat(1, 128, 32)
    stack = moe.ExpertStack(w13=weights, w2=weights)
    fp8 = to_fp8(stack)
    assert torch.equal(fp8.w13.float() * fp8.w13_scale.item(), weights)


def test_what_deepgemm_cannot_do_is_told() -> None:
    assert unavailable(torch.device("cpu")) == "the device is cpu"
    with pytest.raises(BackendUnsupported, match="squares of 128, theirs are 96 x 128"):
        to_fp8(moe.ExpertStack(w13=torch.zeros(1, 96, 128), w2=torch.zeros(1, 128, 48)))
    stack, ids = packed(2, 128, 128), choices(1, 2, 1)
    with pytest.raises(BackendUnsupported, match="these are torch\\.uint8"):
        Fp8Experts(Slow())(randn(1, 128), ids, torch.ones(1, 1), stack, SITU, None)


@pytest.mark.gpu
@pytest.mark.parametrize("is_masked", [True, False], ids=["masked", "contiguous"])
@pytest.mark.parametrize("rows", [1, 100, 900])
def test_fp8_experts_of_the_release_through_deepgemm(rows: int, is_masked: bool) -> None:
    if why := unavailable(DEVICE):
        pytest.skip(why)
    stack = to_fp8(random_codes(56, 3072, 3584))
    ids, weights = choices(rows, 56, 16), torch.rand(rows, 16, device=DEVICE)
    x = randn(rows, 3584, dtype=torch.bfloat16)
    out = Fp8Experts(DeepGemm())(x, ids, weights, stack, SITU, None, is_masked=is_masked)
    wanted = Fp8Experts(Slow())(x, ids, weights, stack, SITU, None, is_masked=is_masked)
    assert off_by(out, wanted) < 1e-2
