"""What every number of the settings keeps to by itself: finite, not below 0, and above 0 where 0
would mean a house that never serves. What depends on other keys stands with its table."""

from __future__ import annotations

import math

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
