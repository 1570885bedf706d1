"""What can never fit is refused with the numbers, at once, and nothing is held for it."""

from __future__ import annotations

import pytest

from common.config.settings import Settings
from common.errors import InvalidRequest
from tests.support.questions import arguments, referenced
from tests.support.relay import changed, in_process

PICTURE = "nano-20001-000"  # 24 tokens


@pytest.mark.parametrize(
    ("tables", "remedy"),
    [
        ({"encoder": {"arena_rows": 23}}, "encoder.arena_rows"),
        ({"prefill": {"landing_rows": 23}}, "prefill.landing_rows"),
        ({"decode": {"pages": 1}}, "ask for fewer tokens"),
    ],
    ids=["encoder's arena", "prefill's landing rows", "decode's pages"],
)
async def test_a_request_larger_than_a_replica_is_refused(tables, remedy):
    case = referenced()[PICTURE]
    async with in_process(changed(Settings(), **tables), encoder=1) as relay:
        with pytest.raises(InvalidRequest, match=remedy):
            await relay.run(relay.task(case["reference"]["prompt_ids"], **arguments(case)))
        await relay.nothing_left(5)
