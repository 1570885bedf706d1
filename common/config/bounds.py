"""What every number and host of the settings keeps to by itself: finite, not below 0, above 0 where
0 would mean a house that never serves; a name or an address. What depends on other keys stands with
its table."""

from __future__ import annotations

import ipaddress
import math
import re
from collections.abc import Sequence

from common.errors import ConfigError

ABOVE_ZERO = {
    "server": {"request_timeout_s", "keep_alive_s", "header_limit_bytes"},
    "images": {"max_bytes", "max_pixels", "timeout_s"},
    "router": {
        *("replicas", "default_max_tokens", "max_choices", "heartbeat_s", "silent_s", "probe_s"),
        "queue_wait_s",
    },
    "grammar": {"memory_bytes"},
    "encoder": {"arena_rows", "batch_patches", "queue_limit"},
    "prefill": {"replicas", "max_batch", "landing_rows", "queue_limit", "tensor", "data", "expert"},
    "decode": {"replicas", "tensor", "data", "expert"},
    "transfer": {"renew_s", "deadline_s", "quarantine_bound", "threads"},
}
SHARES = {("router", "canary_share"), ("trace", "share")}
MOST = 2**63 - 1
NAME = re.compile(r"[a-z0-9_]([a-z0-9_.-]*[a-z0-9_])?\.?", re.IGNORECASE)  # as DNS has them


def check_number(table: str, key: str, value: float, source: str) -> None:
    """Refuse a number that no key, or not this key, can have.

    Raises:
        ConfigError: names file, table, key, value, and what would do.
    """
    where = f"{source}: [{table}] {key} is {value}"
    if not math.isfinite(value) or value > MOST:
        raise ConfigError(f"{where}; give a finite number, at most {MOST}")
    if value <= 0 and key in ABOVE_ZERO.get(table, ()):
        raise ConfigError(f"{where}; it must be above 0")
    if (table, key) in SHARES and not 0 <= value <= 1:
        raise ConfigError(f"{where}; a share is between 0 and 1")
    if value < 0 and "port" not in key:  # ports are told their own bounds
        raise ConfigError(f"{where}; it must not be below 0")


def check_ports(host: str, port: int, admin_host: str, admin_port: int, source: str) -> None:
    """Refuse two listeners on one address; 0 lets the system choose."""
    if port and (host, port) == (admin_host, admin_port):
        raise ConfigError(
            f"{source}: [server] port and admin_port are both {port} on {host}; "
            "give each its own, there or as PORT and ADMIN_PORT"
        )


def check_host(key: str, host: str, source: str) -> None:
    """Refuse what nothing can listen at.

    Raises:
        ConfigError: names file, key, value, and what would do.
    """
    if not _is_host(host):
        raise ConfigError(
            f"{source}: [server] {key} is {host!r}, which is neither a name nor an address; give "
            "one, like 127.0.0.1, or 0.0.0.0 for all of the machine's"
        )


def told_of_context(context: int, trained: int) -> str:
    """A sentence where more tokens are served than a checkpoint was made for, else nothing."""
    if context <= trained:
        return ""
    return (
        f"model.context is {context}, and the checkpoint says that it was made for {trained} "
        "tokens: answers beyond those may be poor; set it to 0 for the checkpoint's own limit"
    )


def check_allowed(hosts: Sequence[str], source: str) -> None:
    """Refuse a host of images that no image's address could have; errors as of `check_host`."""
    for entry in hosts:
        host, colon, port = entry.rpartition(":")
        named = _is_host(host) and port.isascii() and port.isdecimal() if colon else False
        if entry != entry.lower() or not (named or _is_host(entry)):
            raise ConfigError(
                f"{source}: [images] allowed_hosts holds {entry!r}; give a host, or host:port, "
                "without scheme and path and in lower case, like pictures.example.org:8080"
            )


def _is_host(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        dotted = text.replace(".", "").isdecimal()  # an address with a mistake, and no name
        return NAME.fullmatch(text) is not None and not dotted
    return True
