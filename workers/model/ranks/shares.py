"""Which rank computes which datums. Pure: numbers in, numbers out."""

from __future__ import annotations

from collections.abc import Sequence

from workers.model.batch import pack

Shares = list[list[list[int]]]
"""For each rank its micro-batches, for each of those its rows."""


def share_out(
    lengths: Sequence[int], owners: Sequence[int], micro_batch_tokens: int, ranks: int, *, padded: bool = True
) -> Shares:
    """Give each sequence to a rank, so that all have about as many tokens, and pack each rank's into micro-batches.

    `lengths[i]` and `owners[i]`: tokens and adapter number of sequence i. The longest go first, each to the rank that
    has least. A rank may get none.
    """
    mine: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        rank = loads.index(min(loads))
        mine[rank].append(i)
        loads[rank] += lengths[i]
    shares: Shares = []
    for rows in map(sorted, mine):
        batches = pack([lengths[i] for i in rows], [owners[i] for i in rows], micro_batch_tokens, padded=padded)
        shares.append([[rows[j] for j in batch] for batch in batches])
    return shares
