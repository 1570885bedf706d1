"""Hidden states for draft models, in both published conventions, against the golden traces."""

from __future__ import annotations

import pytest
import torch

from common.ops.norm import rms_norm
from tests.support.golden import tensors
from tests.support.models import Request, allocate, chunks, steps

LAYERS = tuple(range(9))


def captured(loaded, convention: str):
    memory = allocate(loaded.spec.text, slots=1, pages=1)
    share = Request(0, (0,)).share(tensors("k3_text")["len17.prompt"].tolist())
    return loaded.model.capture(chunks(share), memory, layers=LAYERS, convention=convention)


def test_the_prefix_is_the_sum_of_outputs_since_the_block_began(tiny) -> None:
    _, features = captured(tiny("k3"), "prefix")
    data = tensors("k3_text")
    for layer, state in zip(LAYERS, features.states, strict=True):
        parts = range(layer - layer % 4, layer + 1)
        total = sum(
            data[f"trace.layers.{i}.{half}"] for i in parts for half in ("self_attn", "mlp")
        )
        torch.testing.assert_close(state, total, rtol=0, atol=1e-3)


def test_the_stream_is_what_the_next_reader_norms(tiny) -> None:
    loaded = tiny("k3")
    logits, features = captured(loaded, "stream")
    for layer, state in zip(LAYERS[:-1], features.states, strict=False):
        norm = loaded.weights.layers[layer + 1].input_norm
        golden = tensors("k3_text")[f"trace.layers.{layer + 1}.self_attn.in"]
        ours = rms_norm(state, norm, loaded.spec.text.eps)
        torch.testing.assert_close(ours, golden, rtol=0, atol=3e-4)
    last = rms_norm(features.states[-1], loaded.weights.norm, loaded.spec.text.eps)
    again = (last @ loaded.weights.head.t())[-1]
    torch.testing.assert_close(again, logits[0], rtol=0, atol=1e-4)
    golden = tensors("k3_text")["len17.logits"][:17]
    torch.testing.assert_close(last @ loaded.weights.head.t(), golden, rtol=0, atol=5e-4)


@pytest.mark.parametrize("convention", ["prefix", "stream"])
def test_capturing_changes_neither_logits_nor_memory(tiny, convention) -> None:
    loaded = tiny("k3")
    results = []
    for layers in ((), LAYERS):
        memory = allocate(loaded.spec.text, slots=2, pages=3)
        requests = [Request(0, (0,)), Request(1, (1, 2))]
        shares = [r.share(range(n)) for r, n in zip(requests, (5, 70), strict=True)]
        logits, features = loaded.model.capture(
            chunks(*shares), memory, layers=layers, convention=convention
        )
        assert all(state.shape == (75, 256) for state in features.states)
        logits_of_step, one = loaded.model.capture(
            steps(*(r.share([3]) for r in requests)), memory, layers=layers, convention=convention
        )
        assert all(state.shape == (2, 256) for state in one.states)
        results.append((logits, logits_of_step, memory.state))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_without_residual_blocks_both_conventions_are_the_residual_stream(tiny) -> None:
    loaded = tiny("linear_mini")
    both = []
    for convention in ("prefix", "stream"):
        memory = allocate(loaded.spec.text, slots=1, pages=1)
        share = Request(0, (0,)).share(range(9))
        _, features = loaded.model.capture(
            chunks(share), memory, layers=(1, 3), convention=convention
        )
        both.append(features.states)
    for a, b in zip(*both, strict=True):
        assert torch.equal(a, b)


def test_an_unknown_convention_is_refused(tiny) -> None:
    with pytest.raises(ValueError, match="'input'"):
        captured(tiny("k3"), "input")
