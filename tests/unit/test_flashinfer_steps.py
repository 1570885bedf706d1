"""What FlashInfer is told before a pass: lengths, pages and whose buffers, against a stand-in."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from common.config.spec import MlaSpec
from common.ops import mla
from common.ops.mla.flashinfer import FlashInferSteps
from common.ops.plan import Steps

HEADS, RANK, ROPE, NOPE = 3, 16, 8, 4
SPEC = MlaSpec(
    num_heads=HEADS, q_lora_rank=None, kv_lora_rank=RANK, nope_dim=NOPE, rope_dim=ROPE, v_dim=4,
    output_gate=False,
)  # fmt: skip


class Wrapper:
    """FlashInfer's wrapper by its documentation: plan, then run over what was planned."""

    def __init__(self, **options: object) -> None:
        self.options, self.plans = options, 0

    def plan(self, rows, first, indices, lengths, heads, rank, rope, page, causal, scale, *dtypes):
        kept = self.options.get("kv_indices")
        if kept is not None:
            kept[: len(indices)].copy_(indices)
        self.indices = indices if kept is None else kept
        self.first, self.lengths, self.page, self.scale = first, lengths, page, scale
        self.plans += 1
        assert (heads, rank, rope, causal) == (HEADS, RANK, ROPE, False)
        assert rows.tolist() == list(range(len(lengths) + 1))

    def run(self, q, q_rest, latents, rests):
        out = torch.empty(*q.shape[:2], RANK)
        for row, length in enumerate(self.lengths.tolist()):
            begin = int(self.first[row])
            pages = self.indices[begin : begin + -(-length // self.page)].long()
            entry = torch.cat([latents[pages], rests[pages]], -1).flatten(0, 1)[:length]
            score = (torch.cat([q[row], q_rest[row]], -1) @ entry.t()) * self.scale
            out[row] = score.softmax(-1) @ entry[:, :RANK]
        return out


class Steps_(FlashInferSteps):
    def __init__(self) -> None:
        self.wrappers: list[Wrapper] = []
        super().__init__(torch.device("cpu"), SPEC, torch.float32)

    def _wrapper(self, **options):
        self.wrappers.append(Wrapper(**options))
        return self.wrappers[-1]


def plan_of(slots: list[int], starts: list[int]) -> Steps:
    tables = torch.tensor([[4, 1, 5], [2, 0, 3], [-1, -1, -1]])[: len(slots)]
    return Steps(slots=torch.tensor(slots), starts=torch.tensor(starts), tables=tables.clone())


@pytest.fixture
def given():
    pages = torch.randn(6, 2, 64, RANK + ROPE)
    return torch.randn(3, HEADS, NOPE + ROPE), pages, torch.randn(HEADS, NOPE + 4, RANK)


def compare(body: Steps_, plan: Steps, given, real: int) -> None:
    q, pages, kv_b = given
    q = q[: len(plan.slots)]
    found = body(q, pages, 1, kv_b, SPEC.scale, plan, None)
    wanted = mla.attend_steps(q, pages, 1, kv_b, SPEC.scale, plan, None)
    torch.testing.assert_close(found[:real], wanted[:real])
    assert found.isfinite().all()


def test_a_scheduled_pass_attends_to_its_pages_and_all_layers_share_the_schedule(given) -> None:
    body, plan = Steps_(), plan_of([0, 1, -1], [130, 63, -1])
    body.schedule(plan, [130, 63, -1])
    compare(body, plan, given, 2)
    compare(body, plan, given, 2)
    assert body.wrappers[0].plans == 1


def test_a_pass_that_nobody_scheduled_is_scheduled_from_the_device(given) -> None:
    body = Steps_()
    for starts in ([5, 70], [6, 71]):
        compare(body, plan_of([0, 1], starts), given, 2)
    assert body.wrappers[0].plans == 2


def test_a_plan_that_stays_keeps_buffers_of_its_own_and_is_filled_again(given) -> None:
    body, plan = Steps_(), plan_of([0, 1], [5, 70])
    body.schedule(plan, [-1, -1], stays=True)
    kept = body.wrappers[1].options["kv_indices"].data_ptr()
    body.schedule(plan, [5, 70], stays=True)
    compare(body, plan, given, 2)
    plan.starts.copy_(torch.tensor([129, 0]))
    plan.tables[1] = torch.tensor([3, -1, -1])
    body.schedule(plan, [129, 0], stays=True)
    compare(body, dataclasses.replace(plan), given, 2)  # by another body of the same tensors
    compare(body, plan, given, 2)
    assert len(body.wrappers) == 2 and body.wrappers[1].plans == 3
    assert body.wrappers[1].indices.data_ptr() == kept
