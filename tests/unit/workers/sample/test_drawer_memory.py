"""What a sequence keeps of a step is its own: the rows of others go when their sequences go."""

from __future__ import annotations

import numpy as np
import torch

from tests.unit.workers.sample.native_lab import VOCAB, Inbox, Lab, ask, prompt
from workers.sample.engines.batch import Drawer
from workers.sample.engines.forward import Forward
from workers.sample.engines.stops import StopRule
from workers.sample.engines.tickets import Ticket


def test_a_short_row_does_not_keep_a_long_one_alive(lab: Lab) -> None:
    inbox = Inbox()
    tickets = [
        Ticket(
            inbox.job(ask(name, prompt(3), topk_sample_logprobs=k)),
            StopRule(frozenset()),
            context_length=64,
            vocab_size=VOCAB,
        )
        for name, k in (("few", 1), ("all", VOCAB))
    ]
    drawer = Drawer([ticket.begin() for ticket in tickets], Forward(lab.base))
    drawn = drawer.draw(torch.randn(2, VOCAB), np.zeros(2, np.int64))
    for array in drawn.topk[0]:
        assert array.shape == (1,)
        assert array.base is None
