"""The `baton` command tells what is wrong in a sentence, and how it ended in its exit status."""

import hashlib

import pytest

from common.config.checkpoint import load_spec
from common.config.settings import Settings
from router.desk import Desk
from services.before import refuse_what_cannot_start
from services.cli import main
from tests.support.golden import NANO
from tests.support.relay import changed
from tests.support.sites import SETTINGS, standing

PORTS = ("port", "admin_port")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["check", "README.md"], "README.md"),
        (["check", "no/such/directory"], "no/such/directory"),
        (["check", str(NANO), "--decode", "eight"], "'eight'"),
        (["serve", "no/such/file.toml"], "does not exist"),
        (["slice", "out", "--layers", "3"], "'3'"),
        (["chat", "--url", "http://127.0.0.1:9", "--model", "m"], "refused"),
        (["chat", "--url", "localhost:9", "--model", "m"], "localhost:9 does not answer"),
        (["trace", "x", "--url", "http://127.0.0.1:9/"], "http://127.0.0.1:9/ does not answer"),
        (
            ["trace", "x", "--key-file", "no/such/key"],
            "baton: No such file or directory: 'no/such/key'",
        ),
        (["serve", "tests"], "tests is no file of text"),
        (["chat", "--image", "no/such/picture.png", "--model", "m"], "no/such/picture.png"),
        (["chat", "--key-file", "no/such/key", "--model", "m"], "no/such/key"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_a_sentence(arguments, said, capsys, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda prompt: "hello")
    assert main(arguments) == 1
    out = capsys.readouterr()
    assert said in out.err
    assert out.err.startswith("baton: ")


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ('path = "no/such/model"', "no/such/model/config.json does not exist"),
        ('device = "tpu"', "model.device is 'tpu'; use cpu or cuda"),
    ],
)
def test_what_cannot_start_is_told_before_anything_starts(
    table, said, tmp_path, capsys, monkeypatch
):
    for variable in ("PORT", "ADMIN_PORT"):
        monkeypatch.delenv(variable, raising=False)
    settings = tmp_path / "settings.toml"
    settings.write_text(f"[model]\n{table}\n[server]\nport = 0\nadmin_port = 0\n")
    assert main(["serve", str(settings)]) == 1
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(("context", "warned"), [(0, False), (8192, False), (10_000, True)])
def test_a_context_beyond_the_checkpoints_is_told_with_both_numbers(
    context, warned, capsys, caplog
):
    settings = changed(
        Settings(), model={"path": str(NANO), "context": context}, server=dict.fromkeys(PORTS, 0)
    )
    refuse_what_cannot_start(settings)
    Desk(settings, load_spec(NANO))
    said = "model.context is 10000, and the checkpoint says that it was made for 8192 tokens"
    assert (said in capsys.readouterr().err, said in caplog.text) == (warned, warned)


@pytest.mark.parametrize("tail", ["/v1", "/v1/", ""])
def test_a_conversation_takes_the_address_that_other_clients_take(tail, capsys, monkeypatch):
    said = iter(["hello", ""])
    monkeypatch.setattr("builtins.input", lambda prompt: next(said))
    with standing() as place:
        assert main(["chat", "--url", place.url + tail]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("way", ["environment", "file", "none", "wrong"])
def test_a_conversation_shows_its_key_from_the_environment_or_a_file(
    way, tmp_path, capsys, monkeypatch
):
    monkeypatch.delenv("BATON_API_KEY", raising=False)
    file = tmp_path / "key"
    file.write_text("a secret\n" if way == "file" else "another\n")
    if way == "environment":
        monkeypatch.setenv("BATON_API_KEY", "a secret")
    keys = (f"someone:{hashlib.sha256(b'a secret').hexdigest()}",)
    said = iter(["hello", ""])
    monkeypatch.setattr("builtins.input", lambda prompt: next(said))
    more = ["--key-file", str(file)] if way in ("file", "wrong") else []
    with standing(changed(SETTINGS, access={"keys": keys})) as place:
        status = main(["chat", "--url", place.url, *more])
    told = {"none": "wants a key; put it into BATON_API_KEY", "wrong": "does not know the key"}
    assert status == (way in told)
    assert told.get(way, "") in capsys.readouterr().err


def test_a_key_that_no_header_can_carry_is_told(tmp_path, capsys):
    file = tmp_path / "key"
    file.write_text("schl\u00fcssel")
    assert main(["chat", "--url", "http://127.0.0.1:9", "--key-file", str(file)]) == 1
    assert "no header can carry" in capsys.readouterr().err


def test_a_good_checkpoint_is_listed(capsys):
    assert main(["check", str(NANO), "--decode", "2x4"]) == 0
    assert "decode   rank 7" in capsys.readouterr().out
