"""Which waiting jobs join the batch, and in which passes their prompts go through the model. Pure: no model, no
tensors."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from dataclasses import replace as replaced

import numpy as np

from workers.model.lora import Adapter
from workers.sample.engines.tickets import Sequence, Ticket


@dataclass(frozen=True, slots=True)
class Limits:
    """`rows`: sequences at a time. `cells`: cached tokens, counted as rows × the longest that any of them can become.
    `prefill_tokens`: prompt tokens in one pass, padding included."""

    rows: int
    cells: int
    prefill_tokens: int


@dataclass(slots=True, eq=False)
class Prompt:
    """A prompt that one or more sequences continue, of one adapter."""

    tokens: np.ndarray
    adapter: Adapter | None
    group: int
    sequences: list[Sequence] = field(default_factory=list)

    @property
    def tickets(self) -> list[Ticket]:
        """The jobs behind the sequences, each once."""
        return list(dict.fromkeys(sequence.ticket for sequence in self.sequences))


@dataclass(slots=True, eq=False)
class Wave:
    """Prompts that go through the model side by side, ordered by group, in as many passes as `prefill_tokens` asks for:
    a single long prompt may need several. Prompt i's keys and values go to slot `start` + i."""

    prompts: list[Prompt]
    start: int = 0
    offset: int = 0
    """Tokens of each prompt that are through."""

    @property
    def length(self) -> int:
        """Tokens of the longest prompt."""
        return max(len(prompt.tokens) for prompt in self.prompts)

    @property
    def sequences(self) -> list[Sequence]:
        """All sequences, prompt by prompt."""
        return [sequence for prompt in self.prompts for sequence in prompt.sequences]

    def drop_closed(self) -> None:
        """Forget sequences whose job is closed. Prompts left without any go too, except within a pass of several."""
        for prompt in self.prompts:
            prompt.sequences = [s for s in prompt.sequences if not s.ticket.closed]
        if self.offset == 0 or not self.sequences:
            self.prompts = [prompt for prompt in self.prompts if prompt.sequences]

    def split(self) -> list[Wave]:
        """One wave per prompt, from the beginning."""
        return [Wave([replaced(prompt)]) for prompt in self.prompts]


def admit(waiting: deque[Ticket], running: Iterable[Sequence], limits: Limits) -> list[Wave]:
    """Take sequences from the front of `waiting` as long as there is room; a job may enter in parts. Nobody
    overtakes."""
    cells = [sequence.ticket.cells for sequence in running]
    rows, longest = len(cells), max(cells, default=1)
    prompts: dict[tuple[int, bytes], Prompt] = {}
    while waiting:
        ticket = waiting[0]
        longest = max(longest, ticket.cells)
        room = min(limits.rows, limits.cells // longest) - rows
        if rows == 0:
            room = max(room, 1)
        missing = ticket.request.num_samples - ticket.begun
        if room <= 0:
            break
        join(prompts, ticket, min(room, missing))
        rows += min(room, missing)
        if missing > room:
            break
        waiting.popleft()
    return waves(prompts.values(), limits.prefill_tokens)


def join(prompts: dict[tuple[int, bytes], Prompt], ticket: Ticket, count: int) -> None:
    """Begin `count` sequences of a job, at the prompt of an earlier job if that is the same."""
    key = (ticket.group, ticket.prompt.tobytes())
    if key not in prompts:
        prompts[key] = Prompt(ticket.prompt, ticket.adapter, ticket.group)
    elif ticket.begun == 0:
        ticket.cache_hit_tokens = len(ticket.prompt)
    prompts[key].sequences += [ticket.begin() for _ in range(count)]


def waves(prompts: Iterable[Prompt], prefill_tokens: int) -> list[Wave]:
    """Pack prompts of similar lengths into waves of at most `prefill_tokens`, the shortest first."""
    packed: list[list[Prompt]] = []
    for prompt in sorted(prompts, key=lambda p: len(p.tokens)):
        length = len(prompt.tokens)
        wave = packed[-1] if packed else None
        if (
            wave is None
            or (len(wave) + 1) * length > prefill_tokens
            or length > 2 * len(wave[0].tokens) + 32
        ):  # fmt: skip
            packed.append([prompt])
        else:
            wave.append(prompt)
    return [Wave(sorted(wave, key=lambda p: p.group)) for wave in packed]
