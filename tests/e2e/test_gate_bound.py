"""O-27a over HTTP: most channels of every KDA gate at its lower bound, the others nearly open."""

from __future__ import annotations

import dataclasses
import shutil
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from common.config.checkpoint import load_spec
from common.config.settings import Settings
from common.weights import load_text
from tests.support.behind_http import behind_http
from tests.support.golden import NANO
from tests.support.nano import nano_tokenizer
from tests.support.plain import Plain
from tests.support.relay import changed

PUSH = 40.0  # on every fourth channel downwards, which opens it, on the others upwards
STEPS = (64, 192, 1024)  # prompt tokens of one pass: one chunk, three, all


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """The bundled checkpoint with other gates."""
    directory = tmp_path_factory.mktemp("bound") / "checkpoint"
    shutil.copytree(NANO, directory)
    for file in directory.glob("*.safetensors"):
        tensors = load_file(file)
        for name in [name for name in tensors if name.endswith("dt_bias")]:
            is_open = torch.arange(tensors[name].numel()) % 4 == 0
            tensors[name] = torch.where(is_open, -PUSH, PUSH).to(tensors[name].dtype)
        save_file(tensors, file)
    return directory


def doubled(weights: Any) -> Any:
    """Every floating-point tensor of a tree in float64."""
    if isinstance(weights, torch.Tensor):
        return weights.double() if weights.is_floating_point() else weights
    if dataclasses.is_dataclass(weights):
        names = [field.name for field in dataclasses.fields(weights)]
        return dataclasses.replace(weights, **{n: doubled(getattr(weights, n)) for n in names})
    return type(weights)(map(doubled, weights)) if isinstance(weights, list | tuple) else weights


def in_float64(directory, prompt: list[int], count: int) -> list[int]:
    """Greedy tokens of a run that takes one token at a time."""
    spec = load_spec(directory)
    assert spec.text.kda.gate_lower_bound == -5.0
    weights = load_text(directory, spec, dtype=torch.float32)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch.Tensor, "float", torch.Tensor.double)
        torch.set_default_dtype(torch.float64)
        try:
            model = Plain(doubled(weights), spec.text)
            for token in prompt:
                row = model.feed([token])[-1]
            found = [int(row.argmax())]
            while len(found) < count:
                found.append(int(model.feed([found[-1]])[-1].argmax()))
        finally:
            torch.set_default_dtype(torch.float32)
    return found


@pytest.mark.slow
async def test_at_the_gates_bound_the_answer_is_that_of_a_recurrence_in_float64(checkpoint):
    answers = []
    for step_tokens in STEPS:
        settings = changed(
            Settings(),
            model={"path": str(checkpoint)},
            server={"port": 0, "admin_port": 0, "drain_s": 1.0},
            prefill={"step_tokens": step_tokens},
        )
        async with behind_http(settings) as site:
            body = site.body("O-27a")
            answer = await site.ask("/v1/completions", body)
            assert answer.status == 200, answer.text
            answers.append(answer.choice())
    prompt, count = body["prompt"], body["max_tokens"]
    exact = [nano_tokenizer().decode([t]) for t in in_float64(checkpoint, prompt, count)]
    for choice in answers:
        assert [entry["token"] for entry in choice.logprobs] == exact
        values = [entry["logprob"] for entry in choice.logprobs]
        assert all(-100 < value <= 0 for value in values)
        assert values == pytest.approx([e["logprob"] for e in answers[0].logprobs], abs=1e-4)
