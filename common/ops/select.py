"""Choose a body for every op, once, at start: from the setting, the device and the model's shapes.

`reference` is torch everywhere. `triton` is our own kernels wherever they exist and raises where
one cannot take the model's shapes. `auto` is the fastest known of each op, the table says why; on a
CPU `reference`. `fp8` is `auto` with experts rounded to FP8. Nothing is tried or decided later.
Longer than 300 lines because what is chosen, refused and captured is read against one table.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch

from common.config.spec import TextSpec, VisionSpec
from common.errors import BackendUnsupported, ConfigError
from common.ops.moe.reference import is_unasking
from common.ops.moe.stack import ExpertStack
from common.ops.table import REFERENCE, Ops

SETTINGS = ("auto", "reference", "triton", "fp8")
HOPPER = (9, 0)
UNTILED = ("residual_read",)  # refused only where the model has none


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One line of the table."""

    op: str
    backend: str
    why: str = ""


def choose(
    wanted: str,
    spec: TextSpec,
    *,
    quantization: str | None,
    dtype: torch.dtype,
    device: torch.device,
    exact: bool = False,
) -> tuple[Ops, tuple[Choice, ...]]:
    """Bodies for a model on a device, and the table to print.

    Args:
        wanted: one of `SETTINGS`.
        spec: the model's shapes.
        quantization: of the experts: "mxfp4" or another name, or None.
        dtype: of weights and activations.
        device: where the model runs.
        exact: take only bodies whose bits for a row do not depend on the others.

    Raises:
        ConfigError: the setting is unknown.
        BackendUnsupported: `triton` was asked for and cannot run here, or not with these shapes; or
            `exact`, and some op has no such body here.
    """
    if wanted not in SETTINGS:
        raise ConfigError(f"model.ops is {wanted!r}; use one of {', '.join(SETTINGS)}")
    names = [f.name for f in dataclasses.fields(Ops)]
    if wanted == "reference" or (wanted == "auto" and device.type == "cpu"):
        if exact and device.type != "cpu":
            raise BackendUnsupported(
                "model.exact is on, but only Triton has fixed tiles on this device; set model.ops "
                "to 'auto'"
            )
        return REFERENCE, tuple(Choice(op=name, backend="reference") for name in names)
    if reason := _unusable(device):
        raise BackendUnsupported(f"model.ops is {wanted!r}, but {reason}; set it to 'reference'")
    refused = _refusals(spec, quantization, dtype)
    if exact and (missing := {op: why for op, why in refused.items() if op not in UNTILED}):
        told = "; ".join(f"{op}: {why}" for op, why in missing.items())
        raise BackendUnsupported(
            f"model.exact is on, but some ops have no body with fixed tiles ({told}); turn it off"
        )
    if wanted == "triton" and refused:
        told = "; ".join(f"{op}: {why}" for op, why in refused.items())
        raise BackendUnsupported(
            f"model.ops is 'triton', but some ops cannot take this model ({told}); set it to 'auto'"
        )
    bodies = {op: body for op, body in _triton().items() if op not in refused}
    table = {op: Choice(op=op, backend="triton") for op in bodies}
    if wanted == "fp8":
        from common.ops.moe.deepgemm import ready

        sides = (spec.moe.latent or spec.hidden, spec.moe.width)
        bodies["experts"] = ready(sides, device, exact=exact)
        table["experts"] = Choice(op="experts", backend="deepgemm", why="rounded to FP8, as asked")
    if wanted in ("auto", "fp8") and not exact:
        table |= _flashinfer(bodies, spec, dtype, device)
    lines = tuple(
        table.get(name, Choice(op=name, backend="reference", why=refused.get(name, _why(name))))
        for name in names
    )
    return dataclasses.replace(REFERENCE, **bodies), lines


def uncapturable(ops: Ops, stack: ExpertStack | None = None, top: int = 1) -> str | None:
    """Why a step with these bodies cannot be captured, or None: the definitions ask the host.

    Args:
        ops: the bodies.
        stack: the experts of a layer, where the model has some.
        top: how many of them a row chooses, as `experts` is told.
    """
    asking = [
        name
        for name in ("mla_steps", "write_steps", "kda_mix")
        if getattr(ops, name) in (getattr(REFERENCE, name), None)
    ]
    if stack is not None and not takes_packed(ops) and not is_unasking(stack, top):
        asking.append("experts")
    if not asking:
        return None
    return f"{', '.join(asking)} run by their definitions, which ask the host"


def takes_packed(ops: Ops) -> bool:
    """Whether the experts' body reads them as the checkpoint packs them."""
    return ops.experts is not REFERENCE.experts


def choose_vision(
    wanted: str, spec: VisionSpec, *, dtype: torch.dtype, device: torch.device
) -> Ops:
    """Bodies for a vision tower on a device; the setting is `choose`'s.

    Raises:
        ConfigError: the setting is unknown.
        BackendUnsupported: `triton` was asked for and cannot run here, or not with these shapes.
    """
    if wanted not in SETTINGS:
        raise ConfigError(f"model.ops is {wanted!r}; use one of {', '.join(SETTINGS)}")
    if wanted == "reference" or (wanted == "auto" and device.type == "cpu"):
        return REFERENCE
    dim, reason = spec.qkv_width // spec.num_heads, _unusable(device)
    if reason is None and not (_is_power(dim) and dim >= 16):
        reason = f"the tower's heads are {dim} wide, not a power of two from 16"
    if reason is None and dtype not in (torch.bfloat16, torch.float32):
        reason = f"{dtype} is neither bfloat16 nor float32"
    if reason and wanted == "triton":
        raise BackendUnsupported(f"model.ops is 'triton', but {reason}; set it to 'reference'")
    if reason:
        return REFERENCE
    from common.ops.norm import triton as norm
    from common.ops.vit import triton as vit

    return dataclasses.replace(
        REFERENCE, rms_norm=norm.rms_norm, vit_rotate=vit.rotate, vit_attend=vit.attend
    )


def fitted_experts(ops: Ops, stack: ExpertStack, *, moves: bool = False) -> ExpertStack:
    """Loaded experts as the chosen body takes them; reads every scale once. Experts that change
    ranks stay as the checkpoint packs them: what is derived of them does not travel. Raises
    BackendUnsupported where the body cannot serve the stack.
    """
    if not takes_packed(ops):
        return stack
    from common.ops.moe.deepgemm import Fp8Experts, to_fp8
    from common.ops.moe.triton import unsupported
    from common.ops.moe.triton_split import based

    if isinstance(ops.experts, Fp8Experts):
        if moves:
            told = "experts that change ranks cannot be FP8; set model.ops to 'auto'"
            raise BackendUnsupported(told)
        return to_fp8(stack)
    if why := unsupported(stack):
        raise BackendUnsupported(
            f"the experts cannot be served by Triton: {why}; set model.ops to 'reference'"
        )
    return stack if moves else based(stack) or stack


def printed(choices: Sequence[Choice]) -> str:
    """The table as text, one op a line."""
    width = max(len(choice.op) for choice in choices)
    rows = (
        f"{choice.op:{width}}  {choice.backend:10}  {choice.why}".rstrip() for choice in choices
    )
    return "\n".join(rows)


def _unusable(device: torch.device) -> str | None:
    """Why no Triton body can run on a device, or None."""
    if device.type != "cuda":
        return f"the device is {device.type}"
    if find_spec("triton") is None:
        return "Triton is not installed"
    return None


def _refusals(spec: TextSpec, quantization: str | None, dtype: torch.dtype) -> dict[str, str]:
    """Why an op's Triton body cannot take a model's shapes, by op; ops without a reason can."""
    if dtype not in (torch.bfloat16, torch.float32):
        return dict.fromkeys(_OPS, f"{dtype} is neither bfloat16 nor float32")
    return _kda_refusals(spec) | _other_refusals(spec, quantization)


def _kda_refusals(spec: TextSpec) -> dict[str, str]:
    refused: dict[str, str] = {}
    kda = spec.kda
    if kda.conv_taps != 4:
        refused["conv_chunks"] = f"{kda.conv_taps} taps, not 4"
    if not _is_power(kda.head_dim) or kda.head_dim < 32:
        refused["kda_chunks"] = f"heads of {kda.head_dim}, not a power of two from 32"
    elif kda.gate_lower_bound is None:
        refused["kda_chunks"] = "the gate has no lower bound"
    if why := refused.get("kda_chunks", refused.get("conv_chunks")):
        refused["kda_mix"] = why
    if not _is_power(kda.head_dim):
        refused["gated_rms_norm"] = f"heads of {kda.head_dim}, not a power of two"
    return refused


def _other_refusals(spec: TextSpec, quantization: str | None) -> dict[str, str]:
    refused: dict[str, str] = {}
    moe, rank, rope = spec.moe, spec.mla.kv_lora_rank, spec.mla.rope_dim
    if not (_is_power(rank) and _is_power(rope) and min(rank, rope) >= 16):
        refused["mla_steps"] = f"latents of {rank} + {rope}, not powers of two from 16"
    widths = (spec.mla.nope_dim, spec.mla.v_dim, rope)
    if not all(_is_power(x) and x >= 16 for x in widths):
        refused["mla_chunks"] = f"head widths of {widths}, not powers of two from 16"
    if moe.num_groups != 1:
        refused["route"] = f"{moe.num_groups} groups of experts, not one"
    latent = moe.latent or spec.hidden
    if quantization != "mxfp4":
        refused["experts"] = "the experts are not packed as MXFP4"
    elif latent % 128 or moe.width % 128:
        refused["experts"] = f"experts of {latent} x {moe.width}, not multiples of 128"
    if spec.residual_block is None:
        refused["residual_read"] = "the model has no attention residuals"
    return refused


_OPS = (
    "linear", "widened", "write_steps", "rms_norm", "gated_rms_norm", "activate", "residual_read",
    "conv_chunks", "kda_chunks", "kda_mix", "mla_steps", "mla_chunks", "route", "experts",
    "write_chunks")  # fmt: skip


_VISION = ("vit_rotate", "vit_attend")


def _triton() -> dict[str, Callable[..., Any]]:
    """Every Triton body by op; the only place that imports them."""
    from common.ops.act import triton as act
    from common.ops.attnres import triton as attnres
    from common.ops.conv import triton as conv
    from common.ops.kda import triton as kda
    from common.ops.kda import triton_chunk
    from common.ops.mla import triton as mla
    from common.ops.mla import triton_chunk as mla_chunk
    from common.ops.moe import triton as moe
    from common.ops.moe import triton_route
    from common.ops.norm import triton as norm
    from common.ops.paging import triton as paging
    from common.ops.rows import triton as rows

    bodies = (
        rows.linear, rows.widened, paging.write_steps, norm.rms_norm, norm.gated_rms_norm,
        act.activate, attnres.read, conv.conv_chunks, triton_chunk.chunks, kda.mix,
        mla.attend_steps, mla_chunk.attend_chunks, triton_route.route, moe.experts,
        paging.write_chunks,
    )  # fmt: skip
    return dict(zip(_OPS, bodies, strict=True))


def _flashinfer(
    bodies: dict[str, Callable[..., Any]], spec: TextSpec, dtype: torch.dtype, device: torch.device
) -> dict[str, Choice]:
    """FlashInfer where it is faster: measured, docs/benchmarks.md. Says why it is not, where so."""
    mla = spec.mla
    why = ""
    if torch.cuda.get_device_capability(device) != HOPPER:
        why = "FlashInfer was measured on Hopper only"
    elif find_spec("flashinfer") is None:
        why = "flashinfer is not installed"
    elif (mla.kv_lora_rank, mla.rope_dim, dtype) != (512, 64, torch.bfloat16):
        why = "FlashInfer takes latents of 512 + 64 in bfloat16"
    if why:
        ops = [op for op in ("mla_steps", "mla_chunks") if op in bodies]
        return {op: Choice(op=op, backend="triton", why=why) for op in ops}
    chosen: list[str] = []
    if "mla_steps" in bodies:
        from common.ops.mla.flashinfer import FlashInferSteps

        body = FlashInferSteps(device, mla, dtype)
        bodies["mla_steps"], bodies["plan_steps"] = body, body.schedule
        chosen += ["mla_steps", "plan_steps"]
    if "mla_chunks" in bodies and (mla.nope_dim, mla.v_dim) == (128, 128):
        from common.ops.mla.flashinfer_chunk import FlashInferChunks

        bodies["mla_chunks"] = FlashInferChunks(device)
        chosen.append("mla_chunks")
    return {op: Choice(op=op, backend="flashinfer") for op in chosen}


def _why(op: str) -> str:
    return "of the vision tower, which chooses its own" if op in _VISION else "no other body"


def _is_power(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0
