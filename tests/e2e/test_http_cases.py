"""The HTTP cases against a running server; `BATON_CASES` names another file of the same format.

A case is run when its setup can be carried out from the file alone; the others are skipped by name.
After every case a plain request must answer and nothing may be held in any room.
"""

from __future__ import annotations

import dataclasses

import pytest

from tests.support.canary import Canary, ImageHost
from tests.support.cases import Case, Runner, Server, load
from tests.support.checks import Run, error_body, find
from tests.support.sites import SETTINGS, standing

CASES = load()
RUN = [case for case in CASES if case.why_not() is None]
SLOW = {"O-04b", "O-21c", "O-21d"}  # long scripts and prompts
ARRANGED = {  # where a person arranged what a case's own words ask for
    "tests/e2e/test_http_arranged.py": (
        ["O-18a", "O-18b", "O-18c", "O-22a", "O-23a", "O-24a", "O-24b", "O-25d", "O-28a"]
    ),
    "tests/chaos/test_http_faults.py": ["O-22b", "O-26a", "O-26b", "O-26c", "O-28c"],
    "tests/e2e/test_gate_bound.py": ["O-27a"],
}
ROOMY = dataclasses.replace(SETTINGS, model=dataclasses.replace(SETTINGS.model, context=40_000))
SENTENCES = sorted({sentence for case in RUN for sentence in case.expect["checks"]})


@pytest.fixture(scope="module")
def runner(server: Server):
    runner = Runner(server)
    yield runner
    runner.close()


@pytest.fixture(scope="module")
def roomy():
    """A server with more context than the bundled model has; its rooms only say a script."""
    with standing(ROOMY) as place:
        runner = Runner(place)
        yield runner
        runner.close()


def marked(case: Case):
    marks = [pytest.mark.slow] if case.id in SLOW else []
    return pytest.param(case, id=case.id, marks=marks)


@pytest.mark.parametrize("case", [marked(case) for case in CASES])
def test_a_case_is_answered_as_it_says(case: Case, runner: Runner, request) -> None:
    if reason := case.why_not():
        places = [place for place, names in ARRANGED.items() if case.id in names]
        pytest.skip(f"{case.id}: {reason}{''.join(f'; arranged in {place}' for place in places)}")
    needs_host = "{{allowed_host}}" in str(case.request)
    if needs_host and not hasattr(runner.server, "allowed_host"):
        pytest.skip(f"{case.id}: the server allows no host for images")
    if case.script is not None and len(case.script) + 200 > runner.context:
        runner = request.getfixturevalue("roomy")
    with Canary() as canary, ImageHost(runner.server if needs_host else None, canary):
        runner.canary_port = canary.port
        answer = runner.ask(case)
        assert answer.status in case.statuses, answer.text[:500]
        run = Run(runner, case, answer)
        error_body(run)
        for function in filter(None, map(find, case.expect["checks"])):
            function(run)
        assert canary.connections == 0
    assert runner.say().status == 200
    runner.until_empty()


@pytest.mark.parametrize("sentence", [s for s in SENTENCES if find(s) is None])
def test_a_sentence_is_written_as_code(sentence: str) -> None:
    cases = [case.id for case in RUN if sentence in case.expect["checks"]]
    pytest.skip(f"{', '.join(cases)}: not run: {sentence}")
