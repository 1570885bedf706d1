"""Which choices a decode step serves, and when they end."""

from dataclasses import dataclass

from common.contract.finish import finish_of
from common.contract.messages import Sampling
from services.decode.scheduler import plan_step


@dataclass
class Running:
    name: str
    last_step: int = 0


def test_everything_runs_while_it_fits():
    running = [Running("a"), Running("b")]
    assert plan_step(running, max_batch=2) == running


def test_those_that_waited_longest_go_first_and_all_get_their_turn():
    running = [Running(name) for name in "abcde"]
    turns = []
    for step in range(1, 7):
        chosen = plan_step(running, max_batch=2)
        for choice in chosen:
            choice.last_step = step
        turns.append("".join(choice.name for choice in chosen))
    assert turns == ["ab", "cd", "ae", "bc", "ad", "be"]


def test_a_stop_id_ends_only_after_the_least_number_of_tokens():
    sampling = Sampling(stop_ids=(9,), min_tokens=2, max_tokens=4)
    assert finish_of(sampling, 9, 2) == ""
    assert finish_of(sampling, 9, 3) == "stop"
    assert finish_of(sampling, 5, 3) == ""
    assert finish_of(sampling, 5, 4) == "length"
