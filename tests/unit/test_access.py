"""Keys, and how much each of them may ask."""

from __future__ import annotations

import hashlib

import pytest

from common.config.settings import AccessSettings
from common.errors import ConfigError, RateLimited, Unauthorized
from router.access import Access, key_of

ANN, BOB = "k-ann", "k-bob"


def entry(name: str, key: str) -> str:
    return f"{name}:{hashlib.sha256(key.encode()).hexdigest()}"


def access(now: list[float] | None = None, **limits) -> Access:
    settings = AccessSettings(keys=(entry("ann", ANN), entry("bob", BOB)), **limits)
    return Access(settings, clock=lambda: (now or [0.0])[0])


def test_without_keys_everyone_may_ask():
    with Access(AccessSettings(requests_per_minute=1)).admit("") as name:
        assert name == ""


@pytest.mark.parametrize("key", ["", "k-an", "k-ann ", "ann", hashlib.sha256(b"k-ann").hexdigest()])
def test_a_key_that_is_not_exactly_known_is_refused(key):
    with pytest.raises(Unauthorized), access().admit(key):
        pass


def test_each_key_has_its_own_allowance_which_fills_up_over_a_minute():
    now = [0.0]
    door = access(now, requests_per_minute=2)
    for _ in range(2):
        with door.admit(ANN) as name:
            assert name == "ann"
    with pytest.raises(RateLimited) as late, door.admit(ANN):
        pass
    assert late.value.retry_after_s == pytest.approx(30.0)
    with door.admit(BOB):
        pass
    now[0] = 29.0
    with pytest.raises(RateLimited), door.admit(ANN):
        pass
    now[0] = 31.0
    with door.admit(ANN):
        pass


def test_requests_at_once_are_counted_until_they_end_however_they_end():
    door = access(concurrent=1)
    with door.admit(ANN):
        with pytest.raises(RateLimited, match="1 requests running"), door.admit(ANN):
            pass
        with door.admit(BOB):
            pass
    with pytest.raises(KeyError), door.admit(ANN):
        raise KeyError("the request failed")
    with door.admit(ANN):
        pass


@pytest.mark.parametrize(
    ("authorization", "other", "key"),
    [
        ("Bearer k", "", "k"),
        ("bearer  k ", "x", "k"),
        ("", "k", "k"),
        ("Basic abc", "k", "k"),
        ("", "", ""),
    ],
)
def test_a_key_is_read_from_either_header(authorization, other, key):
    assert key_of(authorization, other) == key


@pytest.mark.parametrize("text", ["ann", "ann:abc", ":" + "0" * 64, "ann:" + "G" * 64])
def test_a_key_that_is_not_hashed_is_refused_at_the_start(text):
    with pytest.raises(ConfigError, match="sha256sum"):
        AccessSettings(keys=(text,))
