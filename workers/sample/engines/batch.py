"""The sequences that decode together, with what stays the same from step to step."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from workers.model.lora import Routing
from workers.sample.engines.draw import DrawPlan, draw
from workers.sample.engines.forward import ALIGNED, Forward, route
from workers.sample.engines.kv_cache import DecodeView, KVPool
from workers.sample.engines.scores import top
from workers.sample.engines.tickets import Sequence


@dataclass(frozen=True, slots=True, eq=False)
class Drawn:
    """One token for each of B sequences, and its logprob; `topk[row]`: ids and logprobs for rows that want them."""

    tokens: list[int]
    logprobs: list[float]
    topk: dict[int, tuple[np.ndarray, np.ndarray]]


class Drawer:
    """How the rows of one batch draw, fixed while its composition is."""

    def __init__(self, sequences: Seq[Sequence], forward: Forward) -> None:
        self._plan = DrawPlan.of(
            [s.ticket.request.params for s in sequences],
            [s.stream for s in sequences],
            forward.vocab_size,
            forward.device,
        )
        wanted = [(row, s.ticket.request.topk_sample_logprobs) for row, s in enumerate(sequences)]
        self._topk_rows = {row: k for row, k in wanted if k > 0}

    def draw(self, logits_BV: Tensor, counts_B: np.ndarray) -> Drawn:
        """`logits_BV` float32; `counts_B` int64: tokens that each sequence has already."""
        logprobs_BV = torch.log_softmax(logits_BV, -1)
        tokens_B = draw(logits_BV, self._plan, counts_B)
        logprobs_B = logprobs_BV.gather(1, tokens_B.unsqueeze(1)).squeeze(1)
        tokens, logprobs = torch.stack([tokens_B.double(), logprobs_B.double()]).tolist()
        topk = {}
        if self._topk_rows:
            rows = list(self._topk_rows)
            best = top(logprobs_BV[rows], max(self._topk_rows.values()))
            for at, (row, k) in enumerate(self._topk_rows.items()):
                # a view would keep the longest row of every step alive with the shortest
                topk[row] = best.token_ids[at, :k].copy(), best.logprobs[at, :k].copy()
        return Drawn([int(token) for token in tokens], logprobs, topk)


class Batch:
    """Running sequences in slots `start`, `start`+1, …, ordered by adapter. Its arrays move on with every step."""

    def __init__(self, sequences: Seq[Sequence], start: int, forward: Forward) -> None:
        self.sequences = sequences
        self._start = start
        self._forward = forward
        self._routing: Routing = route(s.ticket.adapter for s in sequences)
        self._drawer = Drawer(sequences, forward)
        self._tokens_B = np.array([s.tokens[-1] for s in sequences])
        self._positions_B = np.array([s.position for s in sequences])
        self._counts_B = np.array([len(s.tokens) for s in sequences])
        self._slots_B = np.arange(start, start + len(sequences))

    @property
    def longest(self) -> int:
        """Cells that the next step needs of each slot."""
        return int(self._positions_B.max()) + 1

    def halves(self) -> tuple[Batch, Batch]:
        """Two smaller batches in the same slots."""
        middle = len(self.sequences) // 2
        return (
            Batch(self.sequences[:middle], self._start, self._forward),
            Batch(self.sequences[middle:], self._start + middle, self._forward),
        )

    def step(self, pool: KVPool) -> Drawn:
        """Feed every sequence's last token, draw the next. Doing it again after an error does no harm."""
        length = min(pool.length, -(-self.longest // ALIGNED) * ALIGNED)
        cells_B = self._slots_B * pool.length + self._positions_B
        inputs = torch.from_numpy(np.stack([self._tokens_B, self._positions_B, cells_B])).to(self._forward.device)
        view = DecodeView(pool, self._start, self._start + len(self.sequences), inputs[2], length)
        hidden_BD = self._forward.decode(inputs[0], inputs[1], view, length, self._routing)
        drawn = self._drawer.draw(self._forward.logits(hidden_BD, self._routing), self._counts_B)
        self._tokens_B = np.array(drawn.tokens)
        self._positions_B += 1
        self._counts_B += 1
        return drawn
