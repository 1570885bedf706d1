"""Tiny checkpoints of the golden generator, written once a session."""

from __future__ import annotations

import pytest
import torch

from tests.support.golden import GOLDEN, NANO, write_tiny
from tests.support.models import Loaded, load


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """A function from variant to a loaded tiny checkpoint."""
    torch.set_num_threads(1)
    kept: dict[tuple, Loaded] = {}

    def get(variant: str, dtype: torch.dtype = torch.float32, **options) -> Loaded:
        key = (variant, dtype, *sorted(options.items()))
        if key not in kept:
            if variant == "nano":
                directory = NANO
            elif variant == "linear_mini":
                directory = GOLDEN / "linear_mini"
            else:
                directory = write_tiny(tmp_path_factory.mktemp(variant), variant)
            kept[key] = load(directory, dtype, **options)
        return kept[key]

    return get
