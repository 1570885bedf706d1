"""The HTTP cases that need something to happen before or during the request."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.support.cases import Answer, Runner, Server
from tests.support.pictures import picture


@pytest.fixture(scope="module")
def runner(server: Server):
    runner = Runner(server)
    yield runner
    runner.close()


def ids(count: int, start: int = 0) -> list[int]:
    return [32 + (start + 7 * i) % 90 for i in range(count)]


def continued(runner: Runner, prompt: list[int], **fields) -> tuple:
    """Text and logprobs of a greedy continuation."""
    body = {
        "model": runner.server.model,
        "prompt": prompt,
        "max_tokens": 6,
        "temperature": 0,
        "logprobs": 1,
    }
    told: Answer = runner.post("/v1/completions", body | fields)
    assert told.status == 200, told.text
    choice = told.json["choices"][0]
    return choice["logprobs"]["tokens"], choice["logprobs"]["token_logprobs"]


def alike(one: tuple, other: tuple) -> None:
    assert one[0] == other[0]
    assert one[1] == pytest.approx(other[1], abs=1e-4)


@pytest.mark.parametrize("name", ["O-18a", "O-18b", "O-18c"])
def test_a_client_that_leaves_frees_everything_within_two_seconds(runner: Runner, name: str):
    case = runner.cases[name]
    body = runner.fill_value(case.request["body"], case)
    body |= {"ignore_eos": True, "min_tokens": 2000}
    url = runner.server.url + case.request["path"]
    if name == "O-18a":
        with httpx.stream("POST", url, json=body, timeout=60) as reply:
            lines = (line for line in reply.iter_lines() if line.startswith("data: "))
            next(lines), next(lines)
    else:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(url, json=body, timeout=0.2 if name == "O-18b" else 0.05)
    runner.until_empty(within_s=4.0)  # the case says 2; this machine may be busy
    assert runner.say().status == 200


def test_a_picture_that_turns_out_to_be_damaged_is_named(runner: Runner):
    """O-10a: its header is whole, so that only the encoder can tell."""
    case = runner.cases["O-10a"]
    bad = runner.fill_value(case.request["body"], case)["messages"][0]["content"][0]
    good = {"type": "image_url", "image_url": {"url": picture("28x28 solid blue PNG")}}
    content = [good, {"type": "text", "text": "and"}, bad]
    answer = runner.ask(case, messages=[{"role": "user", "content": content}])
    error = answer.json["error"]
    assert (answer.status, error["code"]) == (400, "invalid_image")
    assert error["param"] == "messages[0].content[2].image_url"
    runner.until_empty()


def test_a_slot_used_before_changes_nothing(runner: Runner):
    """O-22a, O-22b, O-23a, O-24a: alone, then among others, then again."""
    prompts = [ids(length, length) for length in (1, 2, 3, 4, 63, 64, 65, 200)]
    alone = [continued(runner, prompt) for prompt in prompts]
    with ThreadPoolExecutor(len(prompts)) as pool:
        together = list(pool.map(lambda prompt: continued(runner, prompt), prompts))
    for one, other in zip(alone, together, strict=True):
        alike(one, other)
    changed = prompts[-1][:-5] + ids(5, 40)
    continued(runner, changed)
    continued(runner, prompts[-1][:130])
    alike(continued(runner, prompts[-1]), alone[-1])
    runner.until_empty()


def test_a_second_turn_does_not_depend_on_the_first_having_been_served(runner: Runner):
    """O-24b."""
    case = runner.cases["O-24b"]
    before = runner.ask(case).choice()
    runner.ask(case, messages=case.request["body"]["messages"][:1])
    after = runner.ask(case).choice()
    assert after.same() == before.same()


@pytest.mark.parametrize("length", [1, 63, 64, 65, 127, 128, 129])
def test_every_length_around_a_page_is_continued(runner: Runner, length: int):
    """O-25d."""
    first = continued(runner, ids(length))
    alike(continued(runner, ids(length)), first)
    assert len(first[0]) <= 6
    runner.until_empty()


def test_two_requests_may_share_a_client_id(runner: Runner):
    """O-28a."""
    headers = {"X-Request-Id": "same-id"}

    def ask(word: str) -> Answer:
        messages = [{"role": "user", "content": f"Say {word}"}]
        script = f"{word}<|close|>response<|sep|>"
        return runner.post(
            "/v1/chat/completions",
            {
                "model": runner.server.model,
                "messages": messages,
                "max_tokens": 20,
                "baton_script": script,
            },
            headers,
        )

    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(ask, ("sun", "rain"))
    assert (one.choice().content, other.choice().content) == ("sun", "rain")
    assert one.headers["X-Request-Id"] == other.headers["X-Request-Id"] == "same-id"
    assert one.json["id"] != other.json["id"]


def test_aborting_one_of_two_with_the_same_id_leaves_the_other(runner: Runner):
    """O-28a."""
    headers = {"X-Request-Id": "same-id"}
    body = {
        "model": runner.server.model,
        "messages": [{"role": "user", "content": "count"}],
        "max_tokens": 60,
        "min_tokens": 60,
        "ignore_eos": True,
    }
    url = runner.server.url + "/v1/chat/completions"

    def leave() -> None:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(url, json=body | {"max_tokens": 2000}, headers=headers, timeout=0.3)

    with ThreadPoolExecutor(2) as pool:
        gone = pool.submit(leave)
        time.sleep(0.05)
        kept = pool.submit(runner.post, "/v1/chat/completions", body, headers)
        gone.result()
        assert kept.result().json["usage"]["completion_tokens"] == 60
    runner.until_empty()
    assert json.loads(kept.result().text)["choices"][0]["finish_reason"] == "length"
