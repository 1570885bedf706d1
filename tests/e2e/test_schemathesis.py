"""Bodies made from the OpenAPI page, right and wrong: no 500, replies as described, no leak."""

from __future__ import annotations

import dataclasses

import pytest

from common.config import settings as cs
from router.openapi import PAGES
from tests.support.sites import SETTINGS, standing

SMALL = dataclasses.replace(
    SETTINGS,
    model=dataclasses.replace(SETTINGS.model, context=512),
    router=dataclasses.replace(SETTINGS.router, max_choices=4, default_max_tokens=8, silent_s=10.0),
    testing=cs.TestingSettings(),
)
EXAMPLES = 150  # of right and of wrong bodies, each
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
    import hypothesis
    import schemathesis
    from schemathesis.checks import not_a_server_error
    from schemathesis.generation import GenerationMode
    from schemathesis.specs.openapi.checks import (
        content_type_conformance,
        response_schema_conformance,
        status_code_conformance,
    )

    schema = schemathesis.openapi.from_url(f"{place.url}/openapi.json")
    operation = schema[path]["POST"]
    seen = []

    @hypothesis.settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(case=operation.as_strategy(generation_mode=GenerationMode(mode)))
    def ask(case) -> None:
        if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
            case.body["model"] = place.model  # or nearly all would be 404
        response = case.call(timeout=30)
        seen.append(response.status_code)
        checks = [not_a_server_error, status_code_conformance, content_type_conformance]
        if not response.headers["content-type"][0].startswith("text/event-stream"):
            checks.append(response_schema_conformance)
        case.validate_response(response, checks=checks)

    ask()
    assert len(seen) >= EXAMPLES / 2
    assert (200 if mode == "positive" else 400) in seen
    assert place.nothing_left()
