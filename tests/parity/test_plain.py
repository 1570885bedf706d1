"""The plain loop against the golden logits, and the product against the plain loop."""

from __future__ import annotations

import pytest
import torch

from tests.parity.test_text_golden import expected
from tests.support.models import alone
from tests.support.plain import full_logits, greedy


@pytest.mark.parametrize("variant", ["k3", "linear"])
@pytest.mark.parametrize("length", [1, 65])
def test_the_plain_loop_gives_the_golden_logits_and_tokens(tiny, variant, length) -> None:
    loaded = tiny(variant)
    prompt, generated, logits = expected(variant, length)
    ours = full_logits(loaded.weights, loaded.spec, prompt, 6)
    torch.testing.assert_close(ours, logits[length - 1 :], rtol=0, atol=5e-4)
    assert greedy(loaded.weights, loaded.spec, prompt, 6)[0] == generated


@pytest.mark.parametrize("length", [1, 4, 64, 129])
def test_the_product_gives_the_plain_loops_logprobs(tiny, length) -> None:
    loaded = tiny("nano")
    prompt = torch.randint(0, 1280, (length,), generator=torch.Generator().manual_seed(length))
    tokens, logprobs = greedy(loaded.weights, loaded.spec, prompt.tolist(), 6)
    ours = alone(loaded, prompt.tolist(), tokens[:-1])
    assert ours.argmax(-1).tolist() == tokens
    chosen = ours.log_softmax(-1)[range(6), tokens]
    torch.testing.assert_close(chosen, torch.tensor(logprobs), rtol=0, atol=1e-4)
