"""Who may ask, and how much: API keys, requests a minute and requests at once for each key.

Settings hold only hashes of keys (SHA-256 of a long random key; `baton` never sees the key at
rest). Without keys in the settings everyone may ask and nothing is counted. Knows no HTTP beyond
the value of a header.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
from collections import Counter
from collections.abc import Callable, Iterator
from time import monotonic

from common.config.settings import AccessSettings
from common.errors import RateLimited, Unauthorized

MINUTE_S = 60.0


class Access:
    """The keys of one router and what each of them has used."""

    def __init__(self, settings: AccessSettings, *, clock: Callable[[], float] = monotonic) -> None:
        """Every key begins with a full allowance."""
        self._hashes = {name: bytes.fromhex(digest) for name, digest in map(_split, settings.keys)}
        self._per_minute = settings.requests_per_minute
        self._at_once = settings.concurrent
        self._clock = clock
        self._running: Counter[str] = Counter()
        self._allowance: dict[str, tuple[float, float]] = {}  # name -> (requests left, since when)

    @contextlib.contextmanager
    def admit(self, key: str) -> Iterator[str]:
        """Let one request in for as long as the block runs; yields the key's name, or "".

        Raises:
            Unauthorized: no key, or an unknown one.
            RateLimited: the key has used its allowance.
        """
        if not self._hashes:
            yield ""
            return
        name = self._name_of(key)
        if self._at_once and self._running[name] >= self._at_once:
            raise RateLimited(
                f"the key `{name}` has {self._running[name]} requests running, as many as it may",
                retry_after_s=1.0,
            )
        self._spend(name)
        self._running[name] += 1
        try:
            yield name
        finally:
            self._running[name] -= 1

    def _name_of(self, key: str) -> str:
        if not key:
            raise Unauthorized("an API key is needed: send `Authorization: Bearer KEY`")
        given = hashlib.sha256(key.encode()).digest()
        found = ""
        for name, known in self._hashes.items():  # all of them, so that time tells nothing
            if hmac.compare_digest(given, known):
                found = name
        if not found:
            raise Unauthorized("the API key is not known here")
        return found

    def _spend(self, name: str) -> None:
        """Take one request from an allowance that fills up evenly over a minute."""
        if not self._per_minute:
            return
        now, most = self._clock(), float(self._per_minute)
        left, since = self._allowance.get(name, (most, now))
        left = min(most, left + (now - since) * most / MINUTE_S)
        if left < 1.0:
            self._allowance[name] = (left, now)
            raise RateLimited(
                f"the key `{name}` may send {self._per_minute} requests a minute",
                retry_after_s=(1.0 - left) * MINUTE_S / most,
            )
        self._allowance[name] = (left - 1.0, now)


def key_of(authorization: str, x_api_key: str) -> str:
    """The key of a request: a bearer token, or the header some clients send instead."""
    kind, _, token = authorization.partition(" ")
    return token.strip() if kind.lower() == "bearer" else x_api_key.strip()


def _split(entry: str) -> tuple[str, str]:
    name, _, digest = entry.partition(":")
    return name, digest
