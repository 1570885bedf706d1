"""Between the trainable network and a hub-style checkpoint directory.

Tensors get the release's names and dtypes: experts as MXFP4, a few vectors in fp32, the rest in
bf16. The side files (config, tokenizer, preprocessing) are copied from the directory that gave the
network its shape.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.nano.network import Network
from benchmarks.nano.rounding import rounded
from common.ops.quant import pack_mxfp4, unpack_mxfp4

SIDE_FILES = (
    "config.json",
    "generation_config.json",
    "preprocessor_config.json",
    "tokenizer_config.json",
    "tiktoken.model",
)
FP32 = re.compile(r"\.(A_log|dt_bias|e_score_correction_bias)$|_conv1d\.weight$|\.o_norm\.weight$")
STACK = re.compile(r"(.*\.block_sparse_moe)\.(w[123])")


def to_tensors(network: Network) -> dict[str, Tensor]:
    """The network under the checkpoint's names, as stored."""
    tensors: dict[str, Tensor] = {}
    for name, value in network.state_dict().items():
        value, name = value.detach().float().cpu(), name.removeprefix("vision.")
        if (stack := STACK.fullmatch(name)) is None:
            stored = value if FP32.search(name) else value.bfloat16()
            tensors[name] = stored.contiguous()
            continue
        packed, scale = pack_mxfp4(rounded(value))
        for expert in range(len(value)):
            at = f"{stack[1]}.experts.{expert}.{stack[2]}"
            tensors[f"{at}.weight_packed"] = packed[expert].contiguous()
            tensors[f"{at}.weight_scale"] = scale[expert].contiguous()
    return tensors


def fill(network: Network, tensors: dict[str, Tensor]) -> None:
    """Give the network a checkpoint's values; rounding its experts again changes nothing."""
    state = {}
    for name, value in network.state_dict().items():
        key = name.removeprefix("vision.")
        if (stack := STACK.fullmatch(key)) is None:
            state[name] = tensors[key].float()
            continue
        experts = [f"{stack[1]}.experts.{i}.{stack[2]}" for i in range(len(value))]
        packed = torch.stack([tensors[f"{e}.weight_packed"] for e in experts])
        scale = torch.stack([tensors[f"{e}.weight_scale"] for e in experts])
        state[name] = unpack_mxfp4(packed, scale, torch.float32)
    network.load_state_dict(state)


def save(network: Network, like: Path, out: Path) -> None:
    """Write a whole checkpoint directory with the side files of `like`."""
    out.mkdir(parents=True, exist_ok=True)
    for name in SIDE_FILES:
        if (like / name).exists():
            shutil.copyfile(like / name, out / name)
    save_file(to_tensors(network), out / "model.safetensors", metadata={"format": "pt"})


def load(network: Network, directory: Path) -> None:
    """The opposite: continue from a checkpoint."""
    fill(network, load_file(directory / "model.safetensors"))
