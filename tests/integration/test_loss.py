"""Loss is noticed: bytes changed on the way are refused by name, and would have changed answers.

The hooks change bytes only: in the producer's memory after its ticket was made, or in the
receiver's between the READ's end and verification. Each is run with verification, where it must be
refused every time, and without, where at least one answer must come out wrong.
"""

from __future__ import annotations

import pytest

from common.config.settings import Settings
from common.errors import HandoffRefused
from tests.support.harm import KINDS, Harm, tell
from tests.support.processes import write_settings
from tests.support.questions import arguments, referenced
from tests.support.relay import Relay, changed, in_process, with_processes

PICTURE = ["nano-20001-000", "nano-20001-016"]
BEFORE = "nano-20001-015"  # the request before
TEXT = ["nano-20001-009", "nano-20001-008", "nano-20001-013"]


HARMS = [(kind, side) for kind in KINDS for side in ("producer", "receiver")]


@pytest.mark.parametrize(("kind", "side"), HARMS, ids=[" at ".join(harm) for harm in HARMS])
async def test_changed_bytes_are_refused_by_name_and_prefilled_again(kind, side):
    ids = PICTURE if kind == "embedding row" else TEXT
    async with in_process(Settings(), encoder=1) as relay:
        harm = Harm(kind, side)
        harm.plant(relay)
        await ask(relay, BEFORE)
        harm.left = 2  # refused, prefilled again, refused again
        with pytest.raises(HandoffRefused) as refused:
            await ask(relay, ids[0])
        assert refused.value.part == KINDS[kind]
        await relay.nothing_left()
        harm.left = 1  # refused once: the second hand-off is whole
        for name in ids[1:]:
            assert await ask(relay, name) == right(name)
        await relay.nothing_left()
        family = ":".join(KINDS[kind].split(":")[:2])  # the metric's label, without the layer
        assert counted(relay, f'baton_handoffs_refused_total{{part="{family}"}}') == 3
        assert counted(relay, "baton_handoffs_refused_total") == 3


def right(name: str) -> list[int]:
    return referenced()[name]["reference"]["ids"]


async def ask(relay: Relay, name: str) -> list[int]:
    case = referenced()[name]
    task = relay.task(case["reference"]["prompt_ids"], **arguments(case))
    return (await relay.run(task)).ids()


def counted(relay: Relay, name: str) -> float:
    rooms = [*relay.prefills, *relay.decodes]
    return sum(
        value
        for room in rooms
        for key, value in room.tally.snapshot().items()
        if key.startswith(name)
    )


@pytest.mark.parametrize("kind", KINDS)
async def test_the_same_changes_give_wrong_answers_without_verification(kind):
    settings = changed(Settings(), testing={"verify": False})
    ids = PICTURE if kind == "embedding row" else TEXT
    async with in_process(settings, encoder=1) as relay:
        harm = Harm(kind, "receiver")
        harm.plant(relay)
        await ask(relay, BEFORE)
        harm.left = len(ids)
        wrong = [name for name in ids if await ask(relay, name) != right(name)]
        assert wrong, "the answers survived; the hook proves nothing"


@pytest.mark.slow
async def test_rooms_of_their_own_processes_are_told_what_to_change(tmp_path):
    orders = tmp_path / "harm.json"
    tell(orders, 0)
    path = write_settings(tmp_path / "settings.toml", {"server": {"port": 0, "admin_port": 0}})
    async with with_processes(path, encoder=1, harm=orders) as relay:
        assert await ask(relay, BEFORE) == right(BEFORE)
        for number, (kind, side) in enumerate(HARMS, 1):
            name = (PICTURE if kind == "embedding row" else TEXT)[0]
            tell(orders, number, kind, side, 2)
            with pytest.raises(HandoffRefused) as refused:
                await ask(relay, name)
            assert refused.value.part == KINDS[kind]
            await relay.nothing_left()
        assert await ask(relay, name) == right(name)
