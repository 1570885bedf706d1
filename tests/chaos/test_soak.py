"""A short soak: requests and faults mixed, every answer compared, nothing left."""

from __future__ import annotations

import pytest

from tests.chaos.soak import soak


async def run(folder, capsys, number: int, prompts: int, faults: int) -> None:
    tale = await soak(folder, number=number, seed=3, prompts=prompts, faults=faults)
    with capsys.disabled():
        print(f"\n{tale.details()}\n{tale.last_line()}")
    assert (tale.wrong, tale.endless, tale.leaked) == (0, 0, 0), tale.details()
    assert tale.requests == number and tale.faults.total() == faults
    assert tale.errors.total() <= faults


async def test_forty_requests_survive_four_faults(tmp_path, capsys):
    await run(tmp_path, capsys, 40, 10, 4)


@pytest.mark.slow
async def test_three_hundred_requests_survive_twelve_faults(tmp_path, capsys):
    await run(tmp_path, capsys, 300, 60, 12)
