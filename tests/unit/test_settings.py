"""Settings: strict tables, environment overrides, and hooks that refuse an open bind."""

from pathlib import Path

import pytest

from common.config.loading import as_tables, load_settings, parse_settings
from common.config.settings import Settings
from common.errors import ConfigError

ROOT = Path(__file__).parents[2]


def test_the_shipped_file_loads_and_the_environment_wins():
    settings = load_settings(ROOT / "deploy/settings/local.toml", {"PORT": "9000"})
    assert settings.server.port == 9000
    assert settings.server.admin_port == 8001


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"modle": {}}, r"unknown table \[modle\]"),
        ({"model": {"nmae": "x"}}, r"unknown key \[model\] nmae"),
        ({"server": {"port": "80"}}, "must be of type int"),
        ({"server": {"port": True}}, "must be of type int"),
        ({"server": {"port": 70000}}, "between 0 and 65535"),
        ({"model": {"dtype": "float16"}}, "float32 or bfloat16"),
        ({"images": {"allowed_hosts": "a"}}, "list of strings"),
        ({"transfer": {"renew_s": 20}}, "outlive two renewals"),
        ({"transfer": {"lease_s": 11}}, "15 or more"),
        ({"decode": {"replicas": -1}}, r"x.toml: \[decode\] replicas is -1; it must be above 0"),
        ({"prefill": {"replicas": 0}}, "replicas is 0; it must be above 0"),
        ({"router": {"max_choices": 0}}, "max_choices is 0; it must be above 0"),
        ({"router": {"queue_limit": -1}}, "queue_limit is -1; it must not be below 0"),
        ({"router": {"canary_share": 2}}, "canary_share is 2.0; a share is between 0 and 1"),
        ({"model": {"context": -5}}, "context is -5; it must not be below 0"),
        ({"server": {"drain_s": -1}}, "drain_s is -1.0; it must not be below 0"),
        ({"server": {"read_s": float("nan")}}, "read_s is nan; give a finite number"),
        ({"server": {"request_timeout_s": float("inf")}}, "is inf; give a finite number"),
        ({"decode": {"slots": 10**20}}, "give a finite number, at most"),
        ({"server": {"port": 81, "admin_port": 81}}, "both 81 on 127.0.0.1; give each its own"),
        ({"server": {"host": "not a host"}}, r"x.toml: \[server\] host is 'not a host', which is"),
        ({"server": {"host": "http://0.0.0.0"}}, "neither a name nor an address"),
        ({"server": {"host": ""}}, "host is '', which is neither"),
        ({"server": {"host": "127.0.0.256"}}, "neither a name nor an address"),
        (
            {"server": {"admin_host": "a b"}, "access": {"admin": "0" * 64}},
            r"\[server\] admin_host is 'a b'",
        ),
        ({"server": {"room_host": "node/1"}}, r"\[server\] room_host is 'node/1'"),
        (
            {"images": {"allowed_hosts": ["a", "http://b/"]}},
            "allowed_hosts holds 'http://b/'; give",
        ),
        ({"images": {"allowed_hosts": ["b.org/x"]}}, "without scheme and path"),
        ({"images": {"allowed_hosts": ["b:http"]}}, "allowed_hosts holds 'b:http'"),
        ({"images": {"allowed_hosts": ["B.org"]}}, "in lower case"),
        ({"testing": {"scripted": True}, "server": {"host": "0.0.0.0"}}, "bind loopback"),
    ],
)
def test_a_wrong_setting_is_named(raw, message):
    with pytest.raises(ConfigError, match=message):
        parse_settings(raw, source="x.toml")


@pytest.mark.parametrize("host", ["::", "::1", "0.0.0.0", "localhost", "node-1.example.org.", "a"])
def test_names_and_addresses_are_hosts(host):
    admin = {"access": {"admin": "0" * 64}}
    settings = parse_settings({"server": {"host": host, "room_host": host}} | admin, source="x")
    assert settings.server.host == host
    allowed = [host, f"{host}:8080"]
    parse_settings({"images": {"allowed_hosts": allowed}}, source="x")


def test_a_wrong_port_in_the_environment_is_named():
    with pytest.raises(ConfigError, match="PORT is 'http'"):
        load_settings(ROOT / "deploy/settings/local.toml", {"PORT": "http"})


def test_settings_survive_the_way_to_another_process():
    settings = Settings()
    assert parse_settings(as_tables(settings), source="x") == settings
