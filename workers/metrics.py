"""What a worker measures, in one registry per process. Nothing here names a run or a tenant.

A worker is not scraped: it packs this registry into its row every few seconds, and web shows it with the worker's id
and pool (`app.telemetry.exposition`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from app.wire.types import SampleResult

REGISTRY = CollectorRegistry()
_SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
_TOKENS = (64, 256, 1024, 4096, 16384, 65536)
_FEW = (1, 2, 4, 8, 16, 32, 64, 128)


def _counter(name: str, text: str, *labels: str) -> Counter:
    return Counter(f"tinworks_{name}", text, labels, registry=REGISTRY)


def _gauge(name: str, text: str, *labels: str) -> Gauge:
    return Gauge(f"tinworks_{name}", text, labels, registry=REGISTRY)


def _histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
    return Histogram(f"tinworks_{name}", text, buckets=buckets, registry=REGISTRY)


# -- the cycle
PHASE_SECONDS = _counter("phase_seconds", "Time of the train loop by phase of its cycle", "phase")
PASS_SECONDS = _histogram("pass_seconds", "Time of one turn's computing", _SECONDS)
PASS_TOKENS = _histogram("pass_tokens", "Tokens of one turn's forward and backward passes", _TOKENS)
PASS_OPERATIONS = _histogram("pass_operations", "Operations of one turn", _FEW)
PASS_RUNS = _histogram("pass_runs", "Runs of one turn", _FEW)
TRAINED_TOKENS = _counter("trained_tokens", "Tokens of passes that were computed")
OPERATIONS = _counter("operations", "Operations that were committed", "kind", "outcome")
MICRO_BATCHES = _counter("micro_batches", "Micro-batches that went through the model")
ROWS = _counter("rows", "Rows of micro-batches: those that hold a token, and padding", "what")

# -- runs
SLOTS = _gauge("slots", "Runs that may be resident")
RESIDENT = _gauge("resident_runs", "Runs that are")
LEASES = _counter("leases", "Leases that were taken, released, lost, or given back after a crash", "change")
RECOVERIES = _histogram("recovery_seconds", "Time to bring a run back into a slot", _SECONDS)
REPLAYED = _counter("replayed_operations", "Operations that were repeated to bring runs back")
REPLAYED_SECONDS = _counter("replayed_seconds", "Time for which operations were repeated")
FAILED_RECOVERIES = _counter(
    "failed_recoveries", "Runs that could not be brought back, for a passing reason or not", "why"
)
SNAPSHOTS = _counter("snapshots", "Snapshots for recovery", "outcome")
SNAPSHOT_SECONDS = _histogram("snapshot_seconds", "Time to write one", _SECONDS)
SNAPSHOT_LAG = _gauge("snapshot_lag_operations", "Most operations that a run would repeat if this worker died now")
SNAPSHOT_LAG_BYTES = _gauge("snapshot_lag_bytes", "Most bytes of bodies of such operations")
SNAPSHOT_LAG_SECONDS = _gauge(
    "snapshot_lag_seconds", "Time of computing that all runs together would repeat if this worker died now"
)

# -- samples
SEQUENCES = _gauge("sequences", "Sequences that a sampler has to do: in its engine, and before it", "where")
SAMPLES = _counter("samples", "Samples that have ended", "outcome")
SAMPLED_TOKENS = _counter("sampled_tokens", "Tokens that were drawn")
PROMPT_TOKENS = _counter("prompt_tokens", "Tokens of prompts of finished samples: computed, or found in a cache", "how")
ADAPTER_LOADS = _counter("adapter_loads", "Adapters that were brought into the engine", "outcome")


phase_seconds = lru_cache(maxsize=None)(PHASE_SECONDS.labels)
operations = lru_cache(maxsize=None)(OPERATIONS.labels)
"""Finding a metric by its labels takes longer than counting; these find it once."""


def count_micro_batches(batches: Sequence[Sequence[int]], lengths: Sequence[int], *, padded: bool) -> None:
    """Note how sequences of these lengths were packed. `padded`: to the longest of their micro-batch."""
    tokens = sum(lengths)
    rows = sum(len(batch) * max(lengths[i] for i in batch) for batch in batches) if padded else tokens
    MICRO_BATCHES.inc(len(batches))
    ROWS.labels("token").inc(tokens)
    ROWS.labels("padding").inc(rows - tokens)


def count_turn(*, seconds: float, tokens: int, operations: int, runs: int) -> None:
    """Note what one turn of a train loop has computed."""
    PASS_SECONDS.observe(seconds)
    PASS_OPERATIONS.observe(operations)
    PASS_RUNS.observe(runs)
    if tokens:
        PASS_TOKENS.observe(tokens)
        TRAINED_TOKENS.inc(tokens)


def count_sample(outcome: SampleResult | Exception, *, prompt_tokens: int) -> None:
    """Note a sample that has ended."""
    if not isinstance(outcome, SampleResult):
        SAMPLES.labels("failed").inc()
        return
    SAMPLES.labels("done").inc()
    SAMPLED_TOKENS.inc(sum(len(sequence.tokens) for sequence in outcome.sequences))
    PROMPT_TOKENS.labels("cached").inc(outcome.prompt_cache_hit_tokens)
    PROMPT_TOKENS.labels("computed").inc(max(0, prompt_tokens - outcome.prompt_cache_hit_tokens))
