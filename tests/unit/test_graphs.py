"""Steps through fixed tensors: buckets, padding, joins and leaves change nobody's bits."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch

from common.config.checkpoint import load_spec, parse_spec
from common.config.plan import RESERVE
from common.config.release import RELEASE
from common.config.settings import DecodeSettings, ModelSettings, Settings
from common.errors import ConfigError
from common.model.batch import Share, StepBatch
from common.ops.table import REFERENCE
from common.runtime import graphs, part
from common.runtime.graphs import GraphedModel, buckets, check_memory, graph_bytes, width_of
from common.runtime.loaded import load_facts
from common.runtime.recorder import Eager
from tests.support.golden import NANO
from tests.support.models import Loaded, Request, allocate, chunks, load, pages_for, steps

PROMPTS = dict(zip("abcdef", (5, 64, 130, 71, 1, 200), strict=True))
MOST, WIDTH = 5, 5


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    return load(NANO)


def begun(loaded: Loaded, names: str) -> tuple[object, dict[str, Request]]:
    """Requests whose prompts were absorbed, in memory that is NaN elsewhere."""
    memory = allocate(loaded.spec.text, slots=8, pages=24)
    requests, page = {}, 0
    for slot, name in enumerate(names):
        owned = pages_for(PROMPTS[name] + 8)
        requests[name] = Request(7 - slot, tuple(range(page, page + owned)))
        page += owned
        prompt = torch.arange(PROMPTS[name]) * 7 % 1000 + ord(name)
        loaded.model.forward(chunks(requests[name].share(prompt)), memory)
    return memory, requests


def test_buckets_end_with_the_most_and_grow_by_a_half_at_least_from_eight() -> None:
    assert buckets(1) == (1,)
    assert buckets(6) == (1, 2, 4, 6)
    assert buckets(32) == (1, 2, 4, 8, 16, 24, 32)
    assert buckets(256)[-5:] == (128, 160, 192, 224, 256)
    assert all(b <= 2 * a for a, b in zip(buckets(100), buckets(100)[1:], strict=False))


def test_joins_leaves_and_padding_change_nobodys_bits(loaded: Loaded) -> None:
    plain, alone = begun(loaded, "abcdef")
    memory, requests = begun(loaded, "abcdef")
    model = GraphedModel(loaded.model, memory, most=MOST, width=WIDTH, recorder=Eager())
    shuffle = random.Random(1)
    for step in range(6):
        names = shuffle.sample(sorted(requests), shuffle.choice([1, 3, 5]))
        found = model.forward(steps(*(requests[n].share([step + 3]) for n in names)), memory)
        for name, logits in zip(names, found, strict=True):
            wanted = loaded.model.forward(steps(alone[name].share([step + 3])), plain)[0]
            assert torch.equal(logits, wanted), name
    for tensor in ("state", "conv", "latent"):
        mine, theirs = getattr(memory, tensor), getattr(plain, tensor)
        assert torch.equal(mine.isnan(), theirs.isnan())
        assert torch.equal(mine.nan_to_num(), theirs.nan_to_num())


def test_recording_touches_no_slot_and_no_page(loaded: Loaded) -> None:
    memory = allocate(loaded.spec.text, slots=2, pages=2)
    GraphedModel(loaded.model, memory, most=3, width=2, recorder=Eager())
    assert all(t.isnan().all() for t in (memory.state, memory.conv, memory.latent))


def test_only_wanted_logits_come_back_in_the_order_of_the_shares(loaded: Loaded) -> None:
    memory, requests = begun(loaded, "abc")
    model = GraphedModel(loaded.model, memory, most=MOST, width=WIDTH, recorder=Eager())
    plain, alone = begun(loaded, "abc")
    wants = {"a": True, "b": False, "c": True}
    shares = [requests[n].share([9], want_logits=w) for n, w in wants.items()]
    wanted = loaded.model.forward(steps(*(alone[n].share([9]) for n in wants)), plain)
    assert torch.equal(model.forward(steps(*shares), memory), wanted[[0, 2]])


@pytest.mark.parametrize("kind", ["rows", "pages", "memory", "image"])
def test_what_was_not_recorded_is_refused(loaded: Loaded, kind: str) -> None:
    memory, _ = begun(loaded, "a")
    model = GraphedModel(loaded.model, memory, most=1, width=1, recorder=Eager())
    share = Share(slot=7, pages=(0,), start=5, token_ids=(3,))
    other = Share(slot=6, pages=(1, 2) if kind == "pages" else (1,), start=5, token_ids=(3,))
    image = Share(slot=7, pages=(0,), start=5, token_ids=(3,), embeds=torch.zeros(1, 256))
    batch = {"rows": [share, other], "pages": [other], "memory": [share], "image": [image]}[kind]
    over = begun(loaded, "a")[0] if kind == "memory" else memory
    with pytest.raises(ValueError, match=r"rows|pages|memory|image"):
        model.forward(StepBatch(kind="steps", shares=tuple(batch)), over)


def test_a_replicas_memory_is_judged_with_its_graphs_before_it_is_taken(monkeypatch) -> None:
    monkeypatch.setattr(graphs, "chosen", lambda facts, plan: REFERENCE)
    model = ModelSettings(path=str(NANO), device="cuda")
    needed = graph_bytes(load_spec(NANO).text, "float32", DecodeSettings())
    for has, enough in ((needed, False), (needed + (1 << 30), True)):
        monkeypatch.setattr(part, "device_memory", lambda device, has=has: has)
        if enough:
            check_memory(Settings(model=model))
        else:
            with pytest.raises(ConfigError, match="a rank needs"):
                check_memory(Settings(model=model))
    monkeypatch.setattr(part, "device_memory", lambda device: 1)
    check_memory(Settings(model=ModelSettings(path=str(NANO))))  # a host's is not judged
    check_memory(Settings(model=model, decode=DecodeSettings(tensor=2)))  # ranks judge their own


@pytest.mark.parametrize(
    ("body", "held"), [("definition", 2.0), ("packed", 0.53125), ("fp8", 1.0 + 4 / 128**2)]
)
def test_a_plan_counts_experts_as_their_body_holds_them(body, held) -> None:
    class Packed: ...

    class Fp8:
        held = "fp8"

    experts = {"definition": REFERENCE.experts, "packed": Packed(), "fp8": Fp8()}[body]
    ops = dataclasses.replace(REFERENCE, experts=experts)
    settings = Settings(model=ModelSettings(path=str(NANO), dtype="bfloat16"))
    facts = dataclasses.replace(load_facts(settings), spec=parse_spec(RELEASE))
    planned = part.planned_memory(facts, part.Plan.of(settings, "decode"), ops)
    values = 92 * 896 * 3 * 3072 * 3584
    assert planned.experts == pytest.approx(held * values, rel=1e-9)


def test_a_step_has_room_for_a_context_beyond_the_checkpoints() -> None:
    text = load_spec(NANO).text
    assert width_of(text, 1 << 20) == text.max_position // 64
    assert width_of(text, 1 << 20, 2 * text.max_position) == 2 * text.max_position // 64
    assert width_of(text, 1 << 20, 64) == text.max_position // 64
    assert width_of(text, 5, 2 * text.max_position) == 5


def test_the_reserve_of_a_plan_holds_the_graphs_of_the_release() -> None:
    decode = DecodeSettings(max_batch=128, pages=1 << 20)
    assert graph_bytes(parse_spec(RELEASE).text, "bfloat16", decode) < RESERVE
