"""Whatever is lost between two rooms is noticed, named, and made good once."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import pytest
import pytest_asyncio
import torch

from common.config.image_grid import ImageRules, image_grid
from common.config.settings import Settings
from common.contract.messages import ImageRef
from common.errors import HandoffRefused
from router import jobs
from services.encoder.images import image_digest
from tests.support.golden import NANO
from tests.support.relay import Relay, changed, in_process
from tests.support.scenes import png

pytestmark = pytest.mark.asyncio(loop_scope="module")

LENGTH, ANSWER = 150, 5  # two full pages and a part of a third
SCENE = {
    "width": 56,
    "height": 28,
    "background": "white",
    "shapes": [{"shape": "circle", "color": "red", "x": 20, "y": 14, "r": 9}],
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def relay():
    settings = changed(Settings(), model={"path": str(NANO)})
    async with in_process(settings, encoder=1) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def plain(relay) -> list[int]:
    """The answer without any loss."""
    return await answer(relay)


@pytest.fixture
def whole(relay):
    """The rooms, without what a test plants in them once it is over."""
    yield relay
    decode, prefill = relay.decodes[0], relay.prefills[0]
    decode.intake.tamper = prefill.puller.tamper = None
    decode.receiver._verifying = prefill.receiver._verifying = True
    decode.engine.__dict__.pop("submit", None)
    decode.link.__dict__.pop("read", None)
    prefill.owner.__dict__.pop("offer", None)


def question(seed: int, length: int = LENGTH) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(5, 1200) for _ in range(length))


def image() -> tuple[ImageRef, bytes]:
    payload = png(SCENE)
    tokens = image_grid(SCENE["width"], SCENE["height"], ImageRules()).tokens
    reference = ImageRef(
        digest=image_digest(payload), width=SCENE["width"], height=SCENE["height"], tokens=tokens
    )
    return reference, payload


async def answer(relay: Relay, seed: int = 1, **more) -> list[int]:
    return (await relay.run(relay.task(question(seed), max_tokens=ANSWER, **more))).ids()


def once(damage: Callable[..., None]) -> Callable[..., None]:
    """The damage, the first time only: the second pass must be clean."""
    struck = []

    def strike(*arguments) -> None:
        if not struck:
            struck.append(True)
            damage(*arguments)

    return strike


# On arrival, between DONE and verification: the destination's own memory.
ON_ARRIVAL = {
    "one layer's state": (
        "digest:state:",
        lambda held, memory: memory.states.state[held.slots[0], 2].zero_(),
    ),
    "one layer's convolution": (
        "digest:conv:",
        lambda held, memory: memory.states.conv[held.slots[0], 3].zero_(),
    ),
    "one page": (
        "digest:latent:",
        lambda held, memory: memory.latents.pages[held.prompt_pages[1]].zero_(),
    ),
    "one bit": (
        "digest:latent:",
        lambda held, memory: memory.latents.pages.view(torch.int32)[held.prompt_pages[0], 0, 3, 5]
        .bitwise_xor_(1),
    ),
    "one value that is not finite": (
        "finite:state",
        lambda held, memory: memory.states.state[held.slots[0], 0, 0, 0, 0].fill_(float("nan")),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("part", "damage"), ON_ARRIVAL.values(), ids=ON_ARRIVAL.keys())
async def test_what_is_lost_on_arrival_is_refused_and_prefilled_again(whole, plain, part, damage):
    before = refusals(whole)
    whole.decodes[0].intake.tamper = once(damage)
    assert await answer(whole) == plain
    assert refusals(whole) - before == 1
    await whole.nothing_left()


@pytest.mark.parametrize(("part", "damage"), ON_ARRIVAL.values(), ids=ON_ARRIVAL.keys())
async def test_what_is_lost_every_time_is_an_error_that_names_the_part(whole, part, damage):
    whole.decodes[0].intake.tamper = damage
    with pytest.raises(HandoffRefused) as refused:
        await answer(whole)
    assert refused.value.part.startswith(part)
    await whole.nothing_left()


def refusals(relay: Relay) -> float:
    counters = relay.decodes[0].tally.snapshot() | relay.prefills[0].tally.snapshot()
    return sum(v for k, v in counters.items() if k.startswith("baton_handoffs_refused_total"))


def after_publishing(relay: Relay, damage: Callable[..., None]) -> None:
    """Strike the producer's pools when the ticket is out and the job has not begun to READ."""
    engine, prefill = relay.decodes[0].engine, relay.prefills[0]
    submit = engine.submit

    def struck(job):
        work = next(work for work in prefill.engine.works() if work.stage == "published")
        damage(work, prefill.memory)
        return submit(job)

    engine.submit = struck


IN_THE_PRODUCERS_POOL = {
    "one layer's state": (
        "digest:state:",
        lambda work, memory: memory.states.state[work.slot, 2].zero_(),
    ),
    "one page": (
        "digest:latent:",
        lambda work, memory: memory.latents.pages[work.pages[1]].zero_(),
    ),
    "the last tokens": (
        "digest:latent:",
        lambda work, memory: memory.latents.pages[work.pages[2], :, :3].zero_(),
    ),
}


@pytest.mark.parametrize(
    ("part", "damage"), IN_THE_PRODUCERS_POOL.values(), ids=IN_THE_PRODUCERS_POOL.keys()
)
async def test_what_changes_in_the_producers_pool_is_refused_by_name(whole, part, damage):
    after_publishing(whole, damage)
    with pytest.raises(HandoffRefused) as refused:
        await answer(whole)
    assert refused.value.part.startswith(part)
    await whole.nothing_left()


async def test_the_previous_requests_content_is_refused(whole):
    kept = {}

    def keep(work, memory) -> None:
        kept["state"] = memory.states.state[work.slot].clone()
        kept["pages"] = memory.latents.pages[list(work.pages)].clone()

    after_publishing(whole, keep)
    first = await answer(whole, seed=5)
    whole.decodes[0].engine.__dict__.pop("submit")

    def put_back(work, memory) -> None:
        memory.states.state[work.slot].copy_(kept["state"])
        memory.latents.pages[list(work.pages)] = kept["pages"]

    after_publishing(whole, put_back)
    with pytest.raises(HandoffRefused) as refused:
        await answer(whole, seed=6)
    assert refused.value.part.startswith("digest:state:")
    whole.decodes[0].receiver._verifying = False
    assert await answer(whole, seed=6) != first  # the first token is sampled by prefill
    await whole.nothing_left()


async def test_a_lost_embedding_row_is_refused_by_image(whole):
    picture = {"images": [image()], "offsets": [40]}
    expected = await answer(whole, **picture)
    whole.prefills[0].puller.tamper = once(lambda images: images[0][1].zero_())
    assert await answer(whole, **picture) == expected
    whole.prefills[0].puller.tamper = lambda images: images[0][1].zero_()
    with pytest.raises(HandoffRefused) as refused:
        await answer(whole, **picture)
    assert refused.value.part == "digest:embed:0"
    await whole.nothing_left()


async def test_without_verification_the_same_losses_give_wrong_answers(whole, plain):
    """Otherwise the tests above could not fail."""
    picture = {"images": [image()], "offsets": [40]}
    seen = await answer(whole, **picture)
    whole.decodes[0].receiver._verifying = whole.prefills[0].receiver._verifying = False
    wrong = []
    for what in ("one layer's state", "one page"):
        whole.decodes[0].intake.tamper = ON_ARRIVAL[what][1]
        wrong.append(await answer(whole) != plain)
    whole.decodes[0].intake.tamper = None
    whole.prefills[0].puller.tamper = lambda images: images[0].zero_()
    wrong.append(await answer(whole, **picture) != seen)
    assert any(wrong)
    await whole.nothing_left()


# --- leases and cancels -----------------------------------------------------------------------


async def test_a_ticket_whose_lease_ended_is_refused_before_any_byte_and_made_again(whole, plain):
    owner, before = whole.prefills[0].owner, refusals(whole)
    after_publishing(whole, once(lambda work, memory: owner.abort(work.job.request)))
    reads, link = [], whole.decodes[0].link
    read = link.read
    link.read = lambda *arguments: reads.append(True) or read(*arguments)
    assert await answer(whole) == plain
    assert refusals(whole) - before == 1 and len(reads) == 1
    await whole.nothing_left()


async def test_a_cancel_that_meets_a_ticket_being_made_frees_it_at_once(whole):
    prefill = whole.prefills[0]
    offer = prefill.owner.offer

    def cancelled_just_before(request, *more, **options):
        prefill.engine.cancel(request)
        return offer(request, *more, **options)

    prefill.owner.offer = cancelled_just_before
    job = jobs.prefill(whole.task(question(1)), "cancelled", None, 10.0)
    await asyncio.wrap_future(prefill.engine.submit(job))
    await whole.nothing_left(within_s=2.0)
