"""Where the golden data lies, and the tiny checkpoints its generator writes."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
from pathlib import Path
from types import ModuleType
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

HERE = Path(__file__).parent.parent / "data"
GOLDEN = Path(os.environ.get("BATON_GOLDEN", HERE / "golden"))
BUNDLED_EVAL = HERE / "nano_eval.jsonl"  # the questions that tests name by their ids
NANO_EVAL = Path(os.environ.get("BATON_NANO_EVAL", HERE / "nano_eval.jsonl"))
NANO = HERE.parent.parent / "checkpoints" / "nano"


@functools.cache
def generator() -> ModuleType:
    """The module `make_tiny_k3.py` of the golden folder."""
    spec = importlib.util.spec_from_file_location("make_tiny_k3", GOLDEN / "make_tiny_k3.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@functools.cache
def tensors(name: str) -> dict[str, Tensor]:
    """All arrays of one golden file."""
    return load_file(GOLDEN / f"{name}.safetensors")


@functools.cache
def recipe(variant: str) -> dict[str, Any]:
    """How the golden folder's checkpoint of a variant was made: seed, overrides, digest."""
    recipes = json.loads((GOLDEN / "checkpoints.json").read_text()).values()
    return next(made for made in recipes if made["variant"] == variant)


def write_tiny(directory: Path, variant: str, *, dtype: str = "float32", **overrides) -> Path:
    """Write a tiny checkpoint of the golden generator and return its directory."""
    made = recipe(variant)
    changes = made["overrides"] | overrides
    config, values = generator().build(variant, made["seed"], dtype, **changes)
    if (dtype, changes) == (made["dtype"], made["overrides"]):
        assert generator().digest(values) == made["sha256"], "the goldens are not of these weights"
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(values, directory / "model.safetensors")
    return directory


def write_eight_headed(directory: Path, variant: str) -> Path:
    """The same with eight heads of each kind, enough for eight tensor ranks, and five layers."""
    config = generator().linear_text() if variant == "linear" else generator().K3_TEXT
    layers = {"kda_layers": [1, 2, 3, 5], "full_attn_layers": [4]}
    linear = config["linear_attn_config"] | layers | {"num_heads": 8}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "linear_attn_config": linear}
    return write_tiny(directory, variant, num_hidden_layers=5, **heads)
