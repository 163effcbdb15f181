"""Who enters the batch when, and how prompts are packed into passes. No model involved."""

from __future__ import annotations

from collections import deque

from tests.unit.workers.sample.native_lab import ask, prompt
from workers.sample.engines.admission import Limits, admit
from workers.sample.engines.base import Job
from workers.sample.engines.stops import StopRule
from workers.sample.engines.tickets import Ticket


def ticket(length: int, *, name: str = "r", max_tokens: int = 10, num_samples: int = 1, seed: int = 0) -> Ticket:
    request = ask(name, prompt(length, seed), max_tokens=max_tokens, num_samples=num_samples)
    return Ticket(Job(request, None, lambda _: None), StopRule(frozenset()), context_length=1000, vocab_size=97)


def test_one_prompt_of_many_samples_goes_through_once() -> None:
    [wave] = admit(deque([ticket(5, num_samples=6)]), [], Limits(100, 10_000, 100))
    assert len(wave.prompts) == 1
    assert [s.index for s in wave.sequences] == list(range(6))


def test_equal_prompts_are_shared_and_counted_as_hits() -> None:
    line = deque([ticket(5, name="a"), ticket(5, name="b"), ticket(5, name="c", seed=1)])
    tickets = list(line)
    [wave] = admit(line, [], Limits(100, 10_000, 100))
    assert len(wave.prompts) == 2
    assert [t.cache_hit_tokens for t in tickets] == [0, 5, 0]


def test_a_job_too_large_enters_in_parts_and_nobody_overtakes() -> None:
    line = deque([ticket(5, num_samples=10), ticket(6)])
    limits = Limits(4, 10_000, 100)
    seen = []
    while line:
        [wave] = admit(line, [], limits)
        seen.append([(len(s.ticket.prompt), s.index) for s in wave.sequences])
    assert seen == [
        [(5, 0), (5, 1), (5, 2), (5, 3)],
        [(5, 4), (5, 5), (5, 6), (5, 7)],
        [(5, 8), (5, 9), (6, 0)],
    ]


def test_cells_count_rows_times_the_longest() -> None:
    line = deque([ticket(11, max_tokens=10, seed=i) for i in range(5)])
    waves = admit(line, [], Limits(100, 65, 1000))
    running = [s for wave in waves for s in wave.sequences]
    assert len(running) == 3
    assert admit(line, running, Limits(100, 65, 1000)) == []
    assert len(line) == 2


def test_a_sequence_longer_than_the_budget_runs_alone() -> None:
    line = deque([ticket(50, num_samples=2), ticket(3)])
    [wave] = admit(line, [], Limits(100, 10, 1000))
    assert len(wave.sequences) == 1


def test_passes_hold_prompts_of_similar_length_within_the_token_budget() -> None:
    lengths = [3, 90, 5, 4, 95, 6, 300]
    line = deque([ticket(n) for n in lengths])
    waves = admit(line, [], Limits(100, 100_000, 200))
    assert [sorted(len(p.tokens) for p in wave.prompts) for wave in waves] == [[3, 4, 5, 6], [90, 95], [300]]
    for wave in waves:
        assert len(wave.prompts) == 1 or len(wave.prompts) * wave.length <= 200
