"""What must not stand in Serve's logs and pages: kept in the cluster's store, named in arguments.

Serve writes an application's arguments to its controller's log. So arguments have the settings
without the [access] table, and the fingerprint under which the store has that one.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Mapping
from typing import Any

from ray.experimental import internal_kv

from common.contract.scaling import CLOSING, NAMESPACE
from common.errors import ConfigError

SECRET = b"secret"  # its key in the store


def tell_routers_to_close() -> None:
    """Have every router refuse new requests soon, before Serve tells them to end."""
    internal_kv._internal_kv_put(CLOSING, b"1", namespace=NAMESPACE)


def room_secret() -> str:
    """What rooms and routers know each other by: one for the life of a cluster.

    During an upgrade replicas of two releases serve side by side, so it outlives a build of the
    application. Without a cluster it is a new one.
    """
    fresh = secrets.token_hex(32)
    if not internal_kv._internal_kv_initialized():  # type: ignore[no-untyped-call]
        return fresh
    internal_kv._internal_kv_put(SECRET, fresh.encode(), overwrite=False, namespace=NAMESPACE)
    kept: bytes = internal_kv._internal_kv_get(SECRET, namespace=NAMESPACE)
    return kept.decode()


def arguments(tables: Mapping[str, Any]) -> dict[str, Any]:
    """An application's arguments, which anybody may read; `keep` stores the rest."""
    args = {"tables": {name: table for name, table in tables.items() if name != "access"}}
    return args | (
        {"access": _fingerprint(tables["access"])} if any(tables["access"].values()) else {}
    )


def keep(tables: Mapping[str, Any]) -> None:
    """Store what `arguments` of these tables leaves out."""
    access = tables["access"]
    internal_kv._internal_kv_put(
        _key(_fingerprint(access)), json.dumps(access).encode(), namespace=NAMESPACE
    )


def whole(args: Mapping[str, Any]) -> dict[str, Any]:
    """The tables that `arguments` was given, or those that an operator wrote into a document.

    Raises:
        ConfigError: the store lacks them, or keys stand in the arguments themselves.
    """
    tables = dict(args["tables"])
    if "access" not in args:
        access = tables.get("access", {})
        if access.get("keys") or access.get("admin"):
            raise ConfigError(
                "the application's arguments have hashes of keys, which Serve has written to its "
                "log by now; make new keys, and name a file with `settings` instead"
            )
        return tables
    kept = internal_kv._internal_kv_get(_key(args["access"]), namespace=NAMESPACE)
    if kept is None:
        raise ConfigError("the cluster's store lost the [access] table; deploy the settings again")
    return tables | {"access": json.loads(kept)}


def _fingerprint(access: Mapping[str, Any]) -> str:
    """New keys are new arguments, so that Serve builds the application anew."""
    return hashlib.sha256(json.dumps(access, sort_keys=True).encode()).hexdigest()[:16]


def _key(fingerprint: str) -> bytes:
    return b"access-" + fingerprint.encode()
