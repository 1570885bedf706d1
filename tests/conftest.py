"""What holds for every test: fixed seeds, and skips of what this machine cannot run."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip by name what needs more CUDA devices than there are."""
    devices = torch.cuda.device_count()
    for item in items:
        for marker, needed in (("gpu", 1), ("multigpu", 2)):
            if marker in item.keywords and devices < needed:
                item.add_marker(
                    pytest.mark.skip(reason=f"needs {needed} CUDA device(s), found {devices}")
                )
