"""A train worker of several ranks: rank 0 is the worker's own process, the others do what it says.

Rank 0 holds the runs as a worker of one rank does: weights, optimizer states, counters. The others hold copies of the
weights and a gradient of their own for each adapter, and nothing that would be missed. For a pass rank 0 broadcasts the
requests, every rank computes its share of the datums, the results go back. Gradients stay where they were computed
until rank 0 needs them, for an optimizer step or a snapshot; then they are summed into its own. New weights are
broadcast before the next pass that uses them.

A rank that dies takes all others with it: the runs' leases expire, and the next worker rebuilds them.
"""
