"""Print the table of docs/model.md: the largest error of every variant against every source.

    python -m benchmarks.truth

Reads the golden data and the bundled checkpoint; takes about a minute on one core.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from tests.parity import test_kda_exactness as exactness
from tests.parity import test_nano_reference as nano
from tests.parity import test_ops_golden as ops
from tests.parity import test_text_golden as text
from tests.parity import test_vision_golden as vision
from tests.support.golden import GOLDEN, NANO, tensors, write_tiny
from tests.support.models import Loaded, alone, load

Row = tuple[str, str, str, float]  # what, source, measure, value


def loaded(variant: str, dtype: torch.dtype = torch.float32) -> Loaded:
    if variant == "nano":
        return load(NANO, dtype)
    if variant == "linear_mini":
        return load(GOLDEN / "linear_mini", dtype)
    return load(write_tiny(Path(tempfile.mkdtemp()), variant), dtype)


def text_rows() -> Iterator[Row]:
    for variant, source in text.SOURCES.items():
        model = loaded(variant)
        whole, by_steps = 0.0, 0.0
        for length in text.LENGTHS:
            prompt, generated, logits = text.expected(variant, length)
            ours = alone(model, prompt, generated[:-1])
            whole = max(whole, float((ours - logits[length - 1 :]).abs().max()))
            ours = alone(model, prompt[:1], prompt[1:] + generated[:-1])
            by_steps = max(by_steps, float((ours - logits).abs().max()))
        yield variant, source, "logits, prompt then steps", whole
        yield variant, source, "logits, steps alone", by_steps
    model = loaded("k3")
    for layer in range(9):
        name = f"trace.layers.{layer}"
        for half, out in zip(("self_attn", "mlp"), text.halves(model, layer), strict=True):
            error = (out[:17] - tensors("k3_text")[f"{name}.{half}"]).abs().max()
            yield "k3", "k3_text traces", "one half of a layer", float(error)


def low_precision_rows() -> Iterator[Row]:
    for variant in ("k3", "k3-mxfp4", "linear"):
        model = loaded(variant, torch.bfloat16)
        for length in text.LENGTHS:
            prompt, generated, logits = text.expected(variant, length)
            error = alone(model, prompt, generated[:-1]) - logits[length - 1 :]
            what = f"{variant}, bf16", text.SOURCES[variant], "logits, root mean square"
            yield (*what, float(error.square().mean().sqrt()))
    model = loaded("k3", torch.bfloat16)
    for layer in range(9):
        for half, out in zip(("self_attn", "mlp"), text.halves(model, layer), strict=True):
            golden = tensors("k3_text")[f"trace.layers.{layer}.{half}"]
            error = (out[:17].float() - golden).square().mean(-1).sqrt().median()
            relative = float(error / golden.square().mean().sqrt())
            yield "k3, bf16", "k3_text traces", "one half of a layer, median, relative", relative


def nano_rows() -> Iterator[Row]:
    for dtype, name in ((torch.float32, "nano"), (torch.bfloat16, "nano, bf16")):
        model = loaded("nano", dtype)
        for case in nano.cases():
            logprobs = nano.logprobs_of(model, case)
            for row, best in zip(logprobs, case["reference"]["top5"], strict=False):
                ids, values = zip(*best, strict=True)
                error = float((row[list(ids)] - torch.tensor(values)).abs().max())
                yield name, "eval record", "five best log-probabilities", error


def vision_rows() -> Iterator[Row]:
    directory = write_tiny(Path(tempfile.mkdtemp()), "k3")
    for dtype, name in ((torch.float32, "vision"), (torch.bfloat16, "vision, bf16")):
        ours = vision.tower(directory, dtype).forward(
            [vision.image(i) for i in range(vision.COUNT)]
        )
        for i, rows in enumerate(ours):
            golden = tensors("k3_vision")[f"image{i}.embeddings"]
            yield name, "k3_vision", "embeddings", float((rows.float() - golden).abs().max())


def op_rows() -> Iterator[Row]:
    data = tensors("kda_ops")
    for case in ops.cases("kda_ops"):
        _, o, state = ops.run_kda(case)
        for key, ours in (("o", o), ("final_state", state.transpose(1, 2))):
            error = float((ours - data[f"{case}.{key}"]).abs().max())
            yield "KDA chunks", "kda_ops", {"o": "outputs"}.get(key, "state"), error
    for gates in ("bound", "near bound", "mixed", "zero", "small", "half and half", "softplus"):
        for keys in ("random", "parallel"):
            case = exactness.make(300, gates, keys, True, seed=1)
            exact = exactness.truth(case)
            for name, form in (("chunks", exactness.chunked), ("steps", exactness.stepped)):
                error = max(exactness.errors(form(case), exact))
                yield f"KDA {name}, gates {gates}", "float64 recurrence", "relative", error


def main() -> None:
    torch.set_num_threads(1)
    worst: dict[tuple[str, str, str], float] = {}
    for rows in (text_rows, nano_rows, vision_rows, op_rows, low_precision_rows):
        for what, source, measure, value in rows():
            key = (what, source, measure)
            worst[key] = max(worst.get(key, 0.0), value)
    print("| variant | source | measure | largest error |\n|---|---|---|---|")
    for (what, source, measure), value in worst.items():
        print(f"| {what} | {source} | {measure} | {value:.1e} |")


if __name__ == "__main__":
    main()
