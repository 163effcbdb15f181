"""A session's timeline as a Perfetto trace: what its runs were asked, when, and when each answer was there.

A track per run, and below it as many lanes as operations overlap. A slice goes from the acceptance of an operation to
its end, so waiting is part of it. Time counts from the session's creation.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from app.wire import perfetto_pb2 as pb

_SEQUENCE = 1


@dataclass(frozen=True, slots=True)
class Step:
    """One operation of a run. `finished_at` None: it still waits or runs."""

    seq_id: int
    kind: str
    state: str
    tokens: int
    error: str | None
    created_at: datetime
    finished_at: datetime | None


def encode_trace(began: datetime, now: datetime, runs: Iterable[tuple[str, Iterable[Step]]]) -> bytes:
    """The `.pftrace` of runs (id and operations by `created_at`); what has not ended is drawn until `now`."""
    trace = pb.Trace()
    tracks = itertools.count(1)
    for model_id, steps in runs:
        run_track = next(tracks)
        _describe(trace, run_track, model_id)
        lanes: list[int] = []  # their tracks
        busy: list[tuple[int, int]] = []  # a heap: the nanosecond from which a lane is free, the lane
        free: list[int] = []  # a heap of lanes
        for step in steps:
            start = _nanoseconds(began, step.created_at)
            stop = max(start + 1, _nanoseconds(began, step.finished_at or now))
            while busy and busy[0][0] <= start:
                heapq.heappush(free, heapq.heappop(busy)[1])
            if not free:
                free.append(len(lanes))
                lanes.append(next(tracks))
                _describe(trace, lanes[-1], f"lane {len(lanes) - 1}", parent=run_track)
            lane = heapq.heappop(free)
            heapq.heappush(busy, (stop, lane))
            _slice(trace, lanes[lane], step, start, stop)
    payload: bytes = trace.SerializeToString()
    return payload


def _nanoseconds(began: datetime, then: datetime) -> int:
    return max(0, round((then - began).total_seconds() * 1e9))


def _describe(trace: pb.Trace, track: int, name: str, *, parent: int = 0) -> None:
    packet = trace.packet.add(trusted_packet_sequence_id=_SEQUENCE)
    packet.track_descriptor.uuid, packet.track_descriptor.name = track, name
    if parent:
        packet.track_descriptor.parent_uuid = parent


def _slice(trace: pb.Trace, track: int, step: Step, start: int, stop: int) -> None:
    begin = trace.packet.add(trusted_packet_sequence_id=_SEQUENCE, timestamp=start).track_event
    begin.type, begin.track_uuid, begin.name = pb.TrackEvent.TYPE_SLICE_BEGIN, track, step.kind
    begin.categories.append("training")
    for name, number in (("seq_id", step.seq_id), ("tokens", step.tokens)):
        begin.debug_annotations.add(name=name, int_value=number)
    begin.debug_annotations.add(name="state", string_value=step.state)
    if step.error is not None:
        begin.debug_annotations.add(name="error", string_value=step.error)
    end = trace.packet.add(trusted_packet_sequence_id=_SEQUENCE, timestamp=stop).track_event
    end.type, end.track_uuid = pb.TrackEvent.TYPE_SLICE_END, track
