"""Compiled grammars: kept within a bound, compiled in a process of their own, and never trusted."""

import asyncio
import json
import sys
import time
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch

from common.config.settings import GrammarSettings
from common.contract.grammar import Grammar
from common.contract.messages import Sampling
from common.errors import DeadEnd, InvalidRequest
from common.grammar.shelf import GrammarShelf, weight
from common.sampling.sampler import Row, mask_of, sample
from router import grammars as module
from router.grammars import Grammars
from router.prompt.form import Form, form_of
from router.schema import parse_chat
from services.decode.joining import join
from tests.support.nano import ROOT
from tests.support.walks import LIMITS, PERSON, TOKENIZER, form, plain, schema_form, vocabulary

NANO = ROOT / "checkpoints/nano"


def of(source: str, *beginnings: tuple[int, ...]) -> Form:
    return Form(grammar=Grammar.of(source), beginnings=beginnings, param="response_format")


# --- masks in sampling


def pick(mask: bytes, **sampling):
    logits = torch.arange(12.0)[None]
    return sample(logits, [Row(sampling=Sampling(**sampling), mask=mask)])[0]


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_only_a_token_of_the_mask_is_chosen(temperature):
    mask = bytes([0b0000_0100, 0b0000_0010])  # 2 and 9
    found = {pick(mask, temperature=temperature, seed=seed).id for seed in range(20)}
    assert found <= {2, 9} and 9 in found


def test_a_mask_stands_above_bias_and_top_k():
    assert pick(bytes([0b1, 0]), temperature=0.7, top_k=1, logit_bias={11: 100.0}).id == 0


def test_a_mask_without_a_token_is_an_error_of_its_row_alone():
    logits = torch.arange(12.0).expand(2, -1).contiguous()
    rows = [Row(sampling=Sampling(), mask=bytes(2)), Row(sampling=Sampling(temperature=0.0))]
    stuck, other = sample(logits, rows)
    assert isinstance(stuck, DeadEnd) and other.id == 11


def test_ids_beyond_the_mask_are_not_chosen():
    assert pick(bytes([0b1000]), temperature=0.0).id == 3


def test_logprobs_stay_those_of_the_model():
    token = pick(bytes([0b1, 0]), temperature=0.0, logprobs=1)
    expected = torch.arange(12.0).log_softmax(-1)
    assert token.logprob == pytest.approx(float(expected[0])) and token.top[0][0] == 11


def test_a_script_ignores_the_mask():
    sampling = Sampling(script=(7,))
    matcher = vocabulary().compile(plain('"x"'))
    assert mask_of(sampling, 0, matcher) is None
    assert mask_of(sampling, 1, matcher) is not None


def test_the_same_seed_draws_the_same_masked_token_in_any_batch():
    torch.manual_seed(3)
    logits, mask = torch.randn(3, 12), bytes([0b1011_0110, 0b101])
    rows = [Row(sampling=Sampling(seed=s), mask=mask if s != 1 else None) for s in range(3)]
    together = [token.id for token in sample(logits, rows)]
    assert together == [sample(logits[i : i + 1], [rows[i]])[0].id for i in range(3)]


# --- positions


def test_a_replay_stands_where_the_tokens_lead():
    form = schema_form(PERSON)
    emitted = list(TOKENIZER.encode('{"name": "Ada'))
    start = vocabulary().compile(form.grammar)
    straight = start.copy()
    for token in emitted:
        straight.take(token)
    choices = joined(start, forced=(tuple(emitted), tuple(emitted[:3])))
    assert choices[0].matcher.mask() == straight.mask()
    assert choices[1].matcher.mask() != straight.mask()
    assert any(start.mask())  # the beginning itself was not moved


def test_choices_begin_behind_their_own_first_tokens():
    start = vocabulary().compile(plain('("ab" | "cd")'))
    a, c = TOKENIZER.encode("a")[0], TOKENIZER.encode("c")[0]
    left, right = joined(start, first=(a, c))
    assert left.matcher.mask() != right.matcher.mask()


def test_choices_count_what_they_emitted_themselves():
    sampling = {"repetition": 1.5, "frequency": 0.1}
    replayed, other = joined(None, forced=((5, 5, 6), (7,)), **sampling)
    assert replayed.history.counts == {5: 2, 6: 1} and other.history.counts == {7: 1}
    assert replayed.history.prompt == {1}
    assert [c.history.counts for c in joined(None, first=(8, 9))] == [{8: 1}, {9: 1}]


def joined(matcher, *, forced=(), first=(0, 0), **sampling):
    """`join` of two choices over memory that does nothing."""
    held = SimpleNamespace(
        reserve=SimpleNamespace(prompt_tokens=64, n=2),
        slots=(0, 1),
        shared_pages=(0,),
        own_pages=((1,), (2,)),
        id=b"",
        matcher=matcher,
    )
    job = SimpleNamespace(
        sampling=Sampling(n=2, max_tokens=90, **sampling),
        token_ids=(1,) * 64,
        forced=forced,
        ticket=SimpleNamespace(
            seal=SimpleNamespace(first=[SimpleNamespace(id=token) for token in first])
        ),
    )
    return join(held, job, MagicMock())


def test_a_token_against_the_grammar_leaves_nothing_to_say():
    matcher = vocabulary().compile(plain('"x"'))
    matcher.take(TOKENIZER.encode("y")[0])
    assert not any(matcher.mask()) and matcher.why_lost


def test_nothing_may_follow_a_complete_answer():
    matcher = vocabulary().compile(plain('"x"'))
    matcher.take(TOKENIZER.encode("x")[0], TOKENIZER.end_of_msg)
    assert matcher.is_complete and not any(matcher.mask())


# --- the shelf


def test_a_text_under_another_hash_is_refused():
    false = Grammar(kind="lark", source=plain('"y"').source, hash=plain('"x"').hash)
    with pytest.raises(InvalidRequest, match="hash"):
        GrammarShelf(NANO, cache_bytes=1 << 20).matcher(false)


def test_compiled_grammars_are_kept_within_the_bound():
    one = weight(plain('"a"'))
    shelf = GrammarShelf(NANO, cache_bytes=2 * one)
    for letter in "abcd":
        shelf.matcher(plain(f'"{letter}"'))
        assert shelf.held_bytes <= 2 * one
    assert shelf.held_bytes == 2 * one


def test_two_matchers_of_one_grammar_do_not_move_each_other():
    shelf = GrammarShelf(NANO, cache_bytes=1 << 20)
    first, second = shelf.matcher(plain('"ab"')), shelf.matcher(plain('"ab"'))
    first.take(TOKENIZER.encode("a")[0])
    assert first.mask() != second.mask()


# --- the process


@pytest.fixture
async def judge():
    judge = Grammars(NANO, GrammarSettings())
    yield judge
    await judge.close()


async def test_a_good_form_passes_and_a_bad_one_is_named(judge):
    await judge.check(schema_form(PERSON))
    bad = schema_form({"type": "not-a-type"})
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="not-a-type") as refused:
            await judge.check(bad)
        assert refused.value.param == "response_format"
    impossible = schema_form({"type": "object", "properties": {"a": False}, "required": ["a"]})
    with pytest.raises(InvalidRequest, match="cannot be enforced"):
        await judge.check(impossible)


async def test_a_form_that_takes_too_long_is_refused_and_the_next_one_is_not(monkeypatch):
    judge = Grammars(NANO, GrammarSettings(compile_s=0.2))
    program = (
        "import sys,time\n"
        "def say(): sys.stdout.buffer.write((1).to_bytes(4,'big')+b'\\x80'); sys.stdout.flush()\n"
        "say(); sys.stdin.buffer.read(4); time.sleep(60)\n"
    )
    slow = write_program(monkeypatch, program)
    began = time.monotonic()
    with pytest.raises(InvalidRequest, match=r"longer than 0\.2 s"):
        await judge.check(of(plain('"a"').source))
    assert time.monotonic() - began < 30
    slow.undo()
    await Grammars.check(judge, of(plain('"b"').source))
    await judge.close()


async def test_a_process_that_dies_refuses_its_own_form_only(judge):
    await judge.check(of(plain('"a"').source))
    judge._process.kill()
    await judge._process.wait()
    await judge.check(of(plain('"b"').source))


async def test_a_form_that_needs_too_much_memory_is_refused():
    judge = Grammars(NANO, GrammarSettings(memory_bytes=1))
    large = [f"{number:06}" for number in range(30_000)]
    wanted = form(structured_outputs={"choice": large}, reasoning_effort="none")
    with pytest.raises(InvalidRequest, match="more memory"):
        await judge.check(wanted)
    await judge.close()


def test_a_grammar_that_branches_without_end_is_lost_soon():
    rules = 'root ::= "a" root root | "b" root | [a-z] root [a-z] | root root | ""'
    wanted = form(structured_outputs={"grammar": rules}, reasoning_effort="none").grammar
    matcher = vocabulary().compile(wanted)
    letter = TOKENIZER.encode("a")[0]
    for _ in range(300):
        if not any(matcher.mask()):
            break
        matcher.take(letter)
    assert "Too many items" in matcher.why_lost


def test_a_long_form_is_refused_before_it_is_compiled():
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    body["structured_outputs"] = {"choice": ["a" * 600, "b" * 600]}
    request = parse_chat(json.dumps(body).encode(), LIMITS)
    with pytest.raises(InvalidRequest, match="at most 1000"):
        form_of(TOKENIZER, request, source_bytes=1000)


def write_program(monkeypatch, program):
    real = asyncio.create_subprocess_exec

    async def fake(*command, **options):
        return await real(sys.executable, "-c", program, **options)

    monkeypatch.setattr(module.asyncio, "create_subprocess_exec", fake)
    return monkeypatch


@pytest.mark.parametrize(
    ("regex", "said"),
    [("(((a{50}){50}){50}){50}", "cannot be enforced"), (r"a[^\s\S]b", "no text fits it")],
)
async def test_a_form_that_breaks_on_the_way_is_refused_before_it_is_asked_for(judge, regex, said):
    wanted = form(structured_outputs={"regex": regex}, reasoning_effort="none")
    with pytest.raises(InvalidRequest, match=said):
        await judge.check(wanted)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"oneOf": [{"type": "string"}, {"minLength": 1}]}, "write anyOf, or parts that exclude"),
        ({"type": "integer", "minimum": 10, "maximum": 1}, "minimum (10) is greater than maximum"),
        ({"type": "string", "format": "bogus"}, "Unknown format: bogus"),
    ],
)
def test_a_fault_is_told_without_the_librarys_own_places_and_advice(body, said):
    with pytest.raises(InvalidRequest) as told:
        vocabulary().compile(schema_form(body).grammar)
    words = str(told.value)
    assert said in words
    for odd in ("at 3(", "failed to compile", "non-verbose", "coerce_one_of"):
        assert odd not in words


def test_an_expression_that_is_too_costly_is_told_to_be_made_simpler():
    costly = form(structured_outputs={"regex": ".*" * 2000})
    with pytest.raises(InvalidRequest, match=r"make it simpler$"):
        vocabulary().compile(costly.grammar)
