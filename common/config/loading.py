"""Strict TOML to `Settings`: an unknown key is an error that names file, table and key.

The only place that reads the environment: `PORT` and `ADMIN_PORT` win over the file, BATON_SECRET
is the rooms', BATON_API_KEY a client's.
"""

from __future__ import annotations

import dataclasses
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_type_hints

from common.config.bounds import check_allowed, check_host, check_number, check_ports
from common.config.settings import Settings
from common.errors import ConfigError


def load_settings(path: Path, environ: Mapping[str, str] = os.environ) -> Settings:
    """Read a deployment file.

    Raises:
        ConfigError: the file is missing or not TOML, or a table, key, type or value is wrong.
    """
    try:
        raw = tomllib.loads(path.read_text())
    except (IsADirectoryError, UnicodeDecodeError):
        raise ConfigError(
            f"{path} is no file of text; give a TOML file like deploy/settings/local.toml"
        ) from None
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist; deploy/settings/local.toml is a start") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not TOML: {error}") from None
    for variable, key in (("PORT", "port"), ("ADMIN_PORT", "admin_port")):
        if value := environ.get(variable):
            if not (value.isascii() and value.isdecimal()):
                raise ConfigError(f"{variable} is {value!r}; it must be a port number")
            raw.setdefault("server", {})[key] = int(value)
    return parse_settings(raw, source=str(path))


def room_secret(environ: Mapping[str, str] = os.environ) -> str:
    """The secret of `Hello` for rooms started as plain processes: BATON_SECRET, else empty."""
    return environ.get("BATON_SECRET", "")


def client_key(environ: Mapping[str, str] = os.environ) -> str:
    """The key that `baton chat` shows a server: BATON_API_KEY, else empty."""
    return environ.get("BATON_API_KEY", "").strip()


def parse_settings(raw: Mapping[str, Any], *, source: str) -> Settings:
    """Turn parsed TOML into settings; `source` names the file in errors."""
    tables = get_type_hints(Settings)
    values: dict[str, Any] = {}
    for name, content in raw.items():
        if name not in tables:
            raise ConfigError(f"{source}: unknown table [{name}]; known: {', '.join(tables)}")
        if not isinstance(content, dict):
            raise ConfigError(f"{source}: {name} must be a table")
        values[name] = _table(tables[name], name, content, source)
    settings = Settings(**values)
    at = settings.server
    check_ports(at.host, at.port, at.admin_host, at.admin_port, source)
    for key, host in (
        ("host", at.host),
        ("admin_host", at.admin_host),
        ("room_host", at.room_host),
    ):
        if host or key != "room_host":  # which may be left to the node
            check_host(key, host, source)
    check_allowed(settings.images.allowed_hosts, source)
    return settings


def as_tables(settings: Settings) -> dict[str, dict[str, Any]]:
    """The inverse of `parse_settings`: plain dictionaries, for other processes."""
    return dataclasses.asdict(settings)


def _table(kind: type, name: str, content: Mapping[str, Any], source: str) -> Any:
    hints = get_type_hints(kind)
    values: dict[str, Any] = {}
    for key, value in content.items():
        if key not in hints:
            known = ", ".join(hints)
            raise ConfigError(f"{source}: unknown key [{name}] {key}; known: {known}")
        values[key] = value = _value(hints[key], value, f"{source}: [{name}] {key}")
        if isinstance(value, int | float):
            check_number(name, key, value, source)
    return kind(**values)


def _value(hint: Any, value: Any, where: str) -> Any:
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint in (int, float, str, bool):
        if type(value) is not hint:
            raise ConfigError(f"{where} is {value!r}; it must be of type {hint.__name__}")
        return value
    if not (isinstance(value, list | tuple) and all(isinstance(item, str) for item in value)):
        raise ConfigError(f"{where} is {value!r}; it must be a list of strings")
    return tuple(value)
