"""The training network against the serving model, and a few steps of training."""

import json
import shutil
from dataclasses import replace

import pytest
import torch

from benchmarks.nano import export
from benchmarks.nano.layers import delta_rule
from benchmarks.nano.network import Network, to_rows
from benchmarks.nano.optimiser import orthogonal, split
from benchmarks.nano.packing import Batch, Packer, Shape
from benchmarks.nano.training import Schedule, Trainer, run
from common.config.checkpoint import load_spec
from common.ops.kda.reference import recurrence
from tests.support import models
from tests.support.golden import NANO
from tests.support.nano import nano_tokenizer

TEXT = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "attn_res_block_size": 2,
    "intermediate_size": 96,
    "num_experts": 4,
    "num_experts_per_token": 2,
    "moe_intermediate_size": 32,
    "routed_expert_hidden_size": 32,
}
LINEAR = {"num_heads": 2, "head_dim": 32, "full_attn_layers": [3], "kda_layers": [1, 2]}
VISION = {
    "vt_hidden_size": 32,
    "vt_num_hidden_layers": 1,
    "vt_num_attention_heads": 2,
    "qkv_hidden_size": 32,
    "vt_intermediate_size": 64,
    "mm_hidden_size": 32,
    "text_hidden_size": 64,
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory):
    """Side files of a checkpoint of the nano's kind, many times smaller."""
    directory = tmp_path_factory.mktemp("tiny")
    for name in export.SIDE_FILES:
        shutil.copy(NANO / name, directory)
    config = json.loads((NANO / "config.json").read_text())
    config["text_config"] |= TEXT
    config["text_config"]["linear_attn_config"] |= LINEAR
    config["vision_config"] |= VISION
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def one_batch(**shape: int) -> Batch:
    return Packer(nano_tokenizer(), Shape(**shape), seed=4).batch(0.0)


def last_logits(network: Network, batch: Batch, number: int, lengths: list[int]) -> torch.Tensor:
    """The training network's logits inside document `number`, after each of `lengths` tokens.

    Experts are rounded, as at the end of a run: rounding a checkpoint's experts changes nothing.
    """
    with torch.no_grad():
        hidden, _ = network(batch, torch.ones(()), torch.float32)
        rows, columns = torch.where(batch.document == number)
        return network.logits(hidden[rows[0], columns[torch.tensor(lengths) - 1]])


def served_logits(
    loaded: models.Loaded, network: Network, batch: Batch, number: int, lengths: list[int]
) -> torch.Tensor:
    """The serving model's logits for the same, each length as a request of its own."""
    rows, columns = torch.where(batch.document == number)
    ids, at = batch.ids[rows[0], columns], batch.image_row[rows[0], columns]
    with torch.no_grad():
        features = network.vision(batch.patches, batch.grid, torch.float32).flatten(0, 1)
    pages = models.pages_for(len(ids))
    memory = models.allocate(
        loaded.spec.text, slots=len(lengths), pages=pages * len(lengths), dtype=loaded.dtype
    )
    shares = []
    for slot, length in enumerate(lengths):
        places = [i for i in range(length) if at[i] >= 0]
        request = models.Request(slot, tuple(range(slot * pages, (slot + 1) * pages)))
        embeds = features[at[places].long()] if places else None
        shares.append(request.share(ids[:length].tolist(), embeds=embeds, embed_at=tuple(places)))
    return loaded.model.forward(models.chunks(*shares), memory)


def document_with_pictures(batch: Batch) -> int:
    return int(batch.document[batch.image_row >= 0].mode().values)


def test_bundled_checkpoint_goes_through_the_network_and_back_unchanged() -> None:
    network = Network(load_spec(NANO))
    export.load(network, NANO)
    stored = export.load_file(NANO / "model.safetensors")
    again = export.to_tensors(network)
    assert again.keys() == stored.keys()
    assert [k for k in stored if stored[k].dtype != again[k].dtype] == []
    assert [k for k in stored if not torch.equal(stored[k], again[k])] == []


def test_network_and_serving_model_agree_on_the_bundled_checkpoint() -> None:
    network = Network(load_spec(NANO))
    export.load(network, NANO)
    batch = one_batch(rows=1, length=512, images=8)
    number = document_with_pictures(batch)
    size = int((batch.document == number).sum())
    lengths = [1, 63, 64, 65, size]
    wanted = served_logits(models.load(NANO), network, batch, number, lengths)
    assert torch.allclose(
        last_logits(network, batch, number, lengths), wanted, atol=2e-3, rtol=1e-4
    )


def test_training_lowers_the_loss_and_its_export_serves_what_was_trained(tiny, tmp_path) -> None:
    spec = load_spec(tiny)
    torch.manual_seed(0)
    schedule = Schedule(rounded_from=0.5, flat=1.0 - 1e-6)
    trainer = Trainer(Network(spec), schedule, torch.device("cpu"))
    batch = one_batch(rows=1, length=512, images=8)
    reports = run(trainer, iter([batch] * 40), 40)
    losses = [report.loss.item() for report in reports]
    assert losses[-1] < 0.7 * losses[0]
    export.save(trainer.network, tiny, tmp_path)
    exported = Network(load_spec(tmp_path))
    export.load(exported, tmp_path)
    number = document_with_pictures(batch)
    lengths = [1, 64, int((batch.document == number).sum())]
    served = served_logits(models.load(tmp_path), exported, batch, number, lengths)
    assert torch.allclose(
        last_logits(exported, batch, number, lengths), served, atol=1e-4, rtol=1e-4
    )
    # Export rounds what is not an expert to bf16, 8 bits of mantissa.
    trained = last_logits(trainer.network, batch, number, lengths)
    assert (trained - served).abs().max() < 0.05 * trained.abs().max()


def test_documents_of_one_row_do_not_see_each_other(tiny) -> None:
    torch.manual_seed(0)
    network = Network(load_spec(tiny))
    batch = one_batch(rows=1, length=1024, images=16)
    hidden, _ = network(batch, torch.zeros(()), torch.float32)
    last = int(batch.document.max())
    changed = batch.ids.clone()
    changed[batch.document == 0] = (changed[batch.document == 0] + 1) % 1000
    other, _ = network(replace(batch, ids=changed), torch.zeros(()), torch.float32)
    assert not torch.allclose(other[batch.document == 0], hidden[batch.document == 0], atol=1e-3)
    kept = batch.document == last
    assert torch.allclose(other[kept], hidden[kept], atol=1e-6)


def test_chunked_rows_equal_the_recurrence_and_restart_where_a_document_begins() -> None:
    generator = torch.Generator().manual_seed(0)
    size = (1, 192, 2, 8)
    q, k, v = (torch.randn(size, generator=generator, dtype=torch.float64) for _ in range(3))
    q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
    g = -5 * torch.rand(size, generator=generator, dtype=torch.float64)
    beta = torch.rand(1, 192, 2, 1, generator=generator, dtype=torch.float64)
    starts = torch.tensor([[True, False, True]])
    state, rows = torch.zeros(1, 2, 8, 8, dtype=torch.float64), []
    for t in range(192):
        if t == 128:
            state = torch.zeros_like(state)
        state, out = recurrence(q[:, t], k[:, t], v[:, t], g[:, t], beta[:, t, :, 0], state)
        rows.append(out)
    found = delta_rule(q.float(), k.float(), v.float(), g.float(), beta.float(), starts)
    assert torch.allclose(found.double(), torch.stack(rows, 1), atol=1e-5)


def test_every_parameter_is_trained_by_one_optimiser(tiny) -> None:
    network = Network(load_spec(tiny))
    parts = split(network)
    ids = [id(p) for group in (parts.matrices, parts.tables, parts.vectors) for p in group]
    assert len(ids) == len(set(ids))
    assert set(ids) == {id(p) for p in network.parameters() if p.requires_grad}
    assert all(p.ndim >= 2 for p in parts.matrices)


def test_orthogonal_brings_singular_values_near_one() -> None:
    values = torch.linalg.svdvals(orthogonal(torch.randn(3, 24, 40)))
    assert values.min() > 0.6 and values.max() < 1.3


def test_rows_mark_starts_and_let_a_token_see_its_own_past_alone() -> None:
    numbers = torch.tensor([[0] * 64 + [1] * 60 + [-1] * 4 + [-1] * 64])
    rows = to_rows(numbers)
    assert rows.starts.tolist() == [[True, True, True]]
    assert rows.allowed[0, 0, 70].nonzero()[:, 0].tolist() == list(range(64, 71))
