"""Bodies made from the OpenAPI page, right and wrong: no 500, replies as described, no leak."""

from __future__ import annotations

import dataclasses

import pytest

from common.config import settings as cs
from router.openapi import PAGES
from tests.support.cases import Runner
from tests.support.sites import SETTINGS, standing

SMALL = dataclasses.replace(
    SETTINGS,
    model=dataclasses.replace(SETTINGS.model, context=512),
    router=dataclasses.replace(SETTINGS.router, max_choices=4, default_max_tokens=8, silent_s=10.0),
    testing=cs.TestingSettings(),
)
EXAMPLES = 150  # of right and of wrong bodies, each
REAL_EXAMPLES = 25
LIMITS = {
    "/v1/chat/completions": "max_tokens",
    "/v1/completions": "max_tokens",
    "/v1/messages": "max_tokens",
    "/v1/responses": "max_output_tokens",
}
BODIES = [page.path for page in PAGES if page.body is not None]


@pytest.fixture(scope="module")
def place():
    with standing(SMALL) as place:
        yield place


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("mode", ["positive", "negative"])
@pytest.mark.parametrize("path", BODIES)
def test_no_body_gets_a_500_or_leaves_anything(place, path, mode):
    seen = walk(place.url, place.model, path, mode, EXAMPLES)
    assert len(seen) >= EXAMPLES / 2
    assert (200 if mode == "positive" else 400) in seen
    assert place.nothing_left()


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("path", BODIES)
def test_no_body_gets_a_500_from_real_rooms_or_leaves_anything(server, path):
    runner = Runner(server)
    seen = walk(server.url, server.model, path, "positive", REAL_EXAMPLES, max_tokens=4)
    assert len(seen) >= REAL_EXAMPLES / 2 and set(seen) <= {200, 400}
    assert runner.say().status == 200
    runner.until_empty()
    runner.close()


def walk(url: str, model: str, path: str, mode: str, examples: int, max_tokens: int = 0) -> list:
    """Statuses of so many bodies; `max_tokens` bounds the answers of those that name a limit."""
    import hypothesis
    import schemathesis
    from schemathesis.checks import not_a_server_error
    from schemathesis.generation import GenerationMode
    from schemathesis.specs.openapi.checks import (
        content_type_conformance,
        response_schema_conformance,
        status_code_conformance,
    )

    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    operation = schema[path]["POST"]
    seen = []

    @hypothesis.settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(case=operation.as_strategy(generation_mode=GenerationMode(mode)))
    def ask(case) -> None:
        if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
            case.body["model"] = model  # or nearly all would be 404
            if max_tokens and (name := LIMITS.get(path)):
                case.body[name] = max_tokens
        response = case.call(timeout=30)
        seen.append(response.status_code)
        checks = [not_a_server_error, status_code_conformance, content_type_conformance]
        if not response.headers["content-type"][0].startswith("text/event-stream"):
            checks.append(response_schema_conformance)
        case.validate_response(response, checks=checks)

    ask()
    return seen
