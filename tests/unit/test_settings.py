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
        ({"testing": {"scripted": True}, "server": {"host": "0.0.0.0"}}, "bind loopback"),
    ],
)
def test_a_wrong_setting_is_named(raw, message):
    with pytest.raises(ConfigError, match=message):
        parse_settings(raw, source="x.toml")


def test_a_wrong_port_in_the_environment_is_named():
    with pytest.raises(ConfigError, match="PORT is 'http'"):
        load_settings(ROOT / "deploy/settings/local.toml", {"PORT": "http"})


def test_settings_survive_the_way_to_another_process():
    settings = Settings()
    assert parse_settings(as_tables(settings), source="x") == settings
