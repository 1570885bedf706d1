"""Experts change ranks while answers are being written, and no token changes."""

from __future__ import annotations

import asyncio
import shutil

import pytest
from safetensors.torch import load_file, save_file

from common.config.loading import parse_settings
from common.errors import ConfigError, TransferError
from common.parallel import nixl_ep
from router.journey import Journey
from services.decode.room import DecodeRoom
from tests.support.golden import NANO
from tests.support.relay import changed, in_process

SMALL = {"slots": 8, "pages": 64}
PROMPTS = [tuple(range(20, 20 + n)) for n in (5, 70, 33)]
TOKENS = 20
POPULAR = 5  # experts, all of the first share


@pytest.fixture(scope="module")
def skewed(tmp_path_factory):
    """The bundled checkpoint with a router that likes a few neighbouring experts."""
    directory = tmp_path_factory.mktemp("skewed") / "nano"
    shutil.copytree(NANO, directory)
    values = load_file(directory / "model.safetensors")
    for name, value in values.items():
        if name.endswith("e_score_correction_bias"):
            value[:POPULAR] += 0.4
    save_file(values, directory / "model.safetensors")
    return str(directory)


def settings_of(**decode):
    tables = {"decode": SMALL | decode, "prefill": SMALL}
    return parse_settings(tables, source="test")


async def answers(line, when_written=None) -> list[list[int]]:
    """Three answers at once; `when_written` is called when the first has some of its tokens."""
    asks = {"max_tokens": TOKENS, "temperature": 1.0, "seed": 7}
    tasks = [line.task(prompt, **asks) for prompt in PROMPTS]
    reached: dict[int, asyncio.Event] = {n: asyncio.Event() for n in (4, 12)}

    async def write(task) -> list[int]:
        ids: list[int] = []
        async with Journey(task, line.house) as journey:
            async for item in journey.events():
                ids += [token.id for token in item.tokens]
                for count, event in reached.items():
                    if len(ids) >= count:
                        event.set()
        return ids

    async def watch() -> None:
        for event in reached.values():
            await event.wait()
            if when_written is not None:
                await when_written()

    *found, _ = await asyncio.gather(*map(write, tasks), watch())
    return found


@pytest.mark.parametrize(
    "axes",
    [
        {"data": 2, "expert": 2},
        pytest.param({"tensor": 2, "data": 2, "expert": 4}, marks=pytest.mark.slow),
        pytest.param({"tensor": 2, "data": 2, "expert": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
async def test_experts_move_under_running_requests_without_a_wrong_token(skewed, axes) -> None:
    moving = {"spare_experts": 2, "rebalance_s": 3600.0}
    still, model = settings_of(**axes), {"path": skewed}
    async with in_process(changed(still, model=model)) as line:
        unmoved = await answers(line)
    async with in_process(changed(still, model=model, decode=moving)) as line:
        (room,) = line.decodes
        gains = []
        assert await asyncio.to_thread(room.rebalancer.look) is None  # nothing was chosen yet
        room.rebalancer.least = 0

        async def look() -> None:
            assert room.engine.helds()  # in the middle of answers
            gains.append(await asyncio.to_thread(room.rebalancer.look))

        moved = await answers(line, look)
        assert len(moved[0]) == TOKENS and moved == unmoved
        assert await answers(line) == unmoved  # and with what stays
    assert sum(gain.experts for gain in gains) > 0
    first = gains[0]
    assert first.before > 1.5 and first.after < 1.25
    print(f"{axes}: the busiest share over the mean {first.before:.2f}, then {first.after:.2f}")


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("exchange", "ops"),
    [("all_to_all", "reference"), ("direct", "reference"), ("direct", "auto")],  # auto: captured
)
async def test_ranks_that_share_a_device_answer_alike_while_experts_move(exchange, ops) -> None:
    model = {"device": "cuda", "ops": ops}
    moving = {"data": 2, "expert": 2, "spare_experts": 2, "rebalance_s": 3600.0}
    async with in_process(changed(settings_of(), model=model)) as line:
        alone = await answers(line)
    grouped = settings_of(**moving, exchange=exchange)
    async with in_process(changed(grouped, model=model)) as line:
        (room,) = line.decodes
        gains = []
        room.rebalancer.least = 0
        is_captured = room.loaded.model.replays is not None
        assert is_captured is (ops == "auto")

        async def look() -> None:
            gains.append(await asyncio.to_thread(room.rebalancer.look))

        assert await answers(line, look) == alone
        assert await answers(line) == alone
    assert sum(gain.experts for gain in gains) > 0


@pytest.mark.gpu
async def test_ranks_answer_alike_over_nixls_expert_parallel_kernels(skewed) -> None:
    pytest.importorskip(nixl_ep.MODULE, reason="nixl-cu13 has no such kernels for this torch")
    model = {"device": "cuda", "ops": "reference", "dtype": "bfloat16", "path": skewed}
    moving = {"data": 2, "expert": 2, "spare_experts": 2, "rebalance_s": 3600.0}
    found = {}
    for exchange in ("all_to_all", "nixl_ep"):
        settings = settings_of(**moving, exchange=exchange)
        async with in_process(changed(settings, model=model)) as line:
            (room,) = line.decodes
            gains = []
            room.rebalancer.least = 0

            async def look(room=room, gains=gains) -> None:
                gains.append(await asyncio.to_thread(room.rebalancer.look))

            found[exchange] = await answers(line, look), await answers(line)
            assert sum(gain.experts for gain in gains) > 0
    assert found["nixl_ep"] == found["all_to_all"]


async def test_an_expert_that_did_not_arrive_as_it_was_sent_is_not_used() -> None:
    settings = settings_of(data=2, expert=2, spare_experts=1, rebalance_s=3600.0)
    async with in_process(settings) as line:
        rebalancer = line.decodes[0].rebalancer
        rebalancer.least = 0
        whole = await answers(line)  # also the load that will be looked at
        honest, before = rebalancer._moving.fetch, list(rebalancer.placements)

        def damaged(*args):
            return {name: value ^ 1 for name, value in honest(*args).items()}

        rebalancer._moving.fetch = damaged
        with pytest.raises(TransferError, match="otherwise than rank 1 has it"):
            await asyncio.to_thread(rebalancer.look)
        assert rebalancer.placements == before
        assert await answers(line) == whole


@pytest.mark.parametrize(
    ("decode", "sentence"),
    [
        ({"rebalance_s": 5.0}, "need experts on several shares"),
        ({"data": 2, "expert": 2, "spare_experts": 2}, "set decode.rebalance_s"),
        ({"data": 2, "exchange": "direct"}, "no ranks exchange anything"),
        ({"data": 2, "expert": 2, "spare_experts": -1}, "it must not be below 0"),
    ],
    ids=str,
)
def test_places_that_nothing_would_use_are_refused(decode, sentence) -> None:
    with pytest.raises(ConfigError, match=sentence):
        settings_of(**decode)


def test_memory_for_copies_and_for_what_arrives_is_planned() -> None:
    axes = {"data": 2, "expert": 2, "rebalance_s": 5.0, "spare_experts": 1 << 24}
    with pytest.raises(ConfigError, match="its device has"):
        DecodeRoom(settings_of(**axes), secret="s")
