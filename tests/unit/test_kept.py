"""Keys stay out of an application's arguments, which Serve writes to its log."""

from __future__ import annotations

import hashlib
import json

import pytest
from ray.experimental import internal_kv

from common.config.loading import as_tables, parse_settings
from common.config.settings import AccessSettings, Settings
from common.errors import ConfigError
from services import kept
from services.app import document

HASH = hashlib.sha256(b"a key").hexdigest()
SETTINGS = Settings(access=AccessSettings(keys=(f"me:{HASH}",), concurrent=3))


@pytest.fixture
def store(monkeypatch):
    values: dict[bytes, bytes] = {}

    def put(key: bytes, value: bytes, overwrite: bool = True, namespace: bytes | None = None):
        if overwrite or key not in values:
            values[key] = value

    monkeypatch.setattr(internal_kv, "_internal_kv_initialized", lambda: True)
    monkeypatch.setattr(internal_kv, "_internal_kv_put", put)
    monkeypatch.setattr(
        internal_kv, "_internal_kv_get", lambda key, namespace=None: values.get(key)
    )
    return values


def test_a_document_has_no_hash_and_the_application_has_it_again(store):
    told = document(SETTINGS)
    assert HASH not in json.dumps(told)
    kept.keep(as_tables(SETTINGS))
    (application,) = told["applications"]
    assert parse_settings(kept.whole(application["args"]), source="here") == SETTINGS


def test_other_keys_are_other_arguments_so_that_serve_builds_anew():
    other = Settings(access=AccessSettings(keys=(f"you:{HASH}",), concurrent=3))
    args = [kept.arguments(as_tables(settings)) for settings in (SETTINGS, other, SETTINGS)]
    assert args[0] != args[1] and args[0] == args[2]


def test_settings_without_keys_need_no_store():
    args = kept.arguments(as_tables(Settings()))
    assert parse_settings(kept.whole(args), source="here") == Settings()


def test_a_store_that_forgot_says_what_to_do(store):
    with pytest.raises(ConfigError, match="deploy the settings again"):
        kept.whole(kept.arguments(as_tables(SETTINGS)))


def test_keys_written_into_a_document_are_refused():
    with pytest.raises(ConfigError, match="make new keys"):
        kept.whole({"tables": as_tables(SETTINGS)})
    assert kept.whole({"tables": as_tables(Settings())}) == as_tables(Settings())
