from __future__ import annotations

import inspect
import json

import pytest

from common import errors
from router.faults import describe


def every_error() -> list[type[errors.ServingError]]:
    return [
        kind
        for _, kind in inspect.getmembers(errors, inspect.isclass)
        if issubclass(kind, errors.ServingError)
    ]


def raised(kind: type[errors.ServingError]) -> errors.ServingError:
    if kind is errors.HandoffRefused:
        return errors.HandoffRefused("digest:state:3", "10.0.0.7:5 sent something else")
    return kind("10.0.0.7:5 said no")


@pytest.mark.parametrize("kind", every_error())
def test_every_error_becomes_a_body_a_client_can_read(kind):
    fault = describe(raised(kind))
    assert fault.status == kind.status
    assert set(fault.error) == {"message", "type", "param", "code"}
    text = json.dumps(fault.body)
    assert not any(other.__name__ in text for other in every_error())
    assert ("Retry-After" in fault.headers) == kind.retryable


def test_what_went_wrong_inside_is_not_told():
    assert "10.0.0.7" not in describe(raised(errors.HandoffRefused)).error["message"]
    assert "secret" not in json.dumps(describe(RuntimeError("secret")).body)
    assert describe(RuntimeError("secret")).status == 500


def test_a_full_queue_says_when_to_come_back():
    fault = describe(errors.CapacityError("the queue holds 256 requests"))
    assert (fault.status, fault.headers["Retry-After"]) == (429, "1")
    assert "256" in fault.error["message"]
