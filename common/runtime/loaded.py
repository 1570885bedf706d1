"""The model a settings file names: its facts and prints, and the text model on its device."""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import dataclass
from pathlib import Path

import torch

from common.cache.layout import wire_layout
from common.config.checkpoint import load_spec
from common.config.settings import Settings
from common.config.spec import ModelSpec
from common.contract.regions import print_of
from common.model.text import TextModel
from common.ops.select import choose, fitted_experts, printed, takes_packed
from common.ops.table import Ops
from common.weights import load_text as load_weights
from common.weights import weight_identity
from common.weights.shares import WHOLE, Shard
from common.weights.tree import MoeWeights, TextWeights

logger = logging.getLogger("baton.loading")


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What every room of a deployment agrees on."""

    directory: Path
    spec: ModelSpec
    dtype: torch.dtype
    device: torch.device
    model_print: str
    layout_print: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """The same with the text model."""

    spec: ModelSpec
    dtype: torch.dtype
    device: torch.device
    model_print: str
    layout_print: str
    model: TextModel


def load_facts(settings: Settings) -> Facts:
    """Read a checkpoint's configuration and identity, no tensor.

    On a CPU the process is limited to one torch thread: rooms share the cores, and spinning
    threads of several processes slow each other down by far more than they gain.
    """
    directory = Path(settings.model.path)
    spec = load_spec(directory)
    dtype: torch.dtype = getattr(torch, settings.model.dtype)
    device = torch.device(settings.model.device)
    if device.type == "cpu":
        torch.set_num_threads(1)
    use_device(device)
    return Facts(
        directory=directory,
        spec=spec,
        dtype=dtype,
        device=device,
        model_print=print_of(
            {
                "spec": dataclasses.asdict(spec),
                "dtype": settings.model.dtype,
                "weights": weight_identity(directory),
            }
        ),
        layout_print=print_of(wire_layout(spec.text, dtype)),
    )


def use_device(device: torch.device) -> None:
    """Launch what the calling thread launches on this device; a new thread begins with the first.

    A kernel launched on another device than its memory's reads what it may not.
    """
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)


def load_text(settings: Settings) -> Loaded:
    """Read the text model's weights, with a progress bar, and choose the bodies of its ops.

    On a CPU, and with `model.exact`, rows are multiplied in fixed tiles, so that a row's bits are
    its own.
    """
    facts = load_facts(settings)
    ops, table = choose(
        settings.model.ops,
        facts.spec.text,
        quantization=facts.spec.quantization,
        dtype=facts.dtype,
        device=facts.device,
        exact=settings.model.exact,
    )
    if facts.device.type != "cpu":
        logger.info("ops of the text model:\n%s", printed(table))
    weights = read_weights(facts, ops)
    return Loaded(
        spec=facts.spec,
        dtype=facts.dtype,
        device=facts.device,
        model_print=facts.model_print,
        layout_print=facts.layout_print,
        model=TextModel(facts.spec.text, weights, ops=ops, exact=is_exact(settings, facts.device)),
    )


def read_weights(
    facts: Facts, ops: Ops, *, shard: Shard = WHOLE, moves: bool = False
) -> TextWeights:
    """The text model's weights, or a shard's, as the bodies of its ops take them."""
    return fitted(
        load_weights(
            facts.directory,
            facts.spec,
            dtype=facts.dtype,
            device=facts.device,
            packed=takes_packed(ops),
            shard=shard,
        ),
        ops,
        moves=moves,
    )


def fitted(weights: TextWeights, ops: Ops, *, moves: bool = False) -> TextWeights:
    """The weights with each layer's experts as their body takes them, a layer at a time."""
    layers = list(weights.layers)
    weights = dataclasses.replace(weights, layers=())  # or the old experts would be kept alive
    for at, layer in enumerate(layers):
        if isinstance(layer.ffn, MoeWeights):
            experts = fitted_experts(ops, layer.ffn.experts, moves=moves)
            layers[at] = dataclasses.replace(
                layer, ffn=dataclasses.replace(layer.ffn, experts=experts)
            )
            del layer
    return dataclasses.replace(weights, layers=tuple(layers))


def is_exact(settings: Settings, device: torch.device) -> bool:
    """Whether a row's bits are its own: always on a CPU."""
    return settings.model.exact or device.type == "cpu"
