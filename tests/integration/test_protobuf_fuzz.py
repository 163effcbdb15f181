"""`forward_backward` sent anything: each body gets a future or a named refusal soon, and nothing that is accepted
harms the train loop, the memory, or a neighbour's numbers.

A run takes messages that are wrong in one or several places, and messages whose bytes were damaged. What is accepted is
executed at once by a real train loop on a tiny model. On the way, a neighbour trains on the same worker.
"""

from __future__ import annotations

import ctypes
import gc
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest
import zstandard
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from app.db import Database
from app.runs import log
from app.runs.loss_specs import LOSS_SPECS
from app.wire import tinker_pb2 as pb
from tests.integration.conftest import Api, running
from tests.integration.fuzz_answers import check_answer
from tests.unit.workers.train.train_lab import CONTEXT, VOCAB, Lab, State, state_of
from workers.train.loop import TrainLoop

CASES, MANY_CASES = 1500, 20_000
LONGEST_CPU_S = 2.0
"""Of this process, for one answer: the time on the clock depends on what else the machine does."""
GROWTH_BYTES = 96 * 2**20
"""What caches of SQLite, torch and the allocator may still take after the first cases; a case that leaked its arrays
or its compressed megabytes would need more."""
MAX_BODY_BYTES = 2**21
EVERY = 100
"""Cases between two steps of the neighbour."""
ONCE = settings(
    derandomize=True, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck), deadline=None
)


# -- messages that are wrong on purpose

INT64 = st.sampled_from([0, 1, 2, 3, 7, -1, 2**31, 2**62, -(2**62), 2**63 - 1, -(2**63)]) | st.integers(-4, 80)
NUMBERS = st.sampled_from([0.0, 1.0, -1.0, 0.5, 1e30, -1e38, 1e-45, float("nan"), float("inf"), float("-inf")])
NAMES = st.sampled_from(
    ["target_tokens", "weights", "logprobs", "advantages", "sequence_ratio_mask", "", "a.b[0]", "x" * 300, "ключ", "\0"]
)
LOSSES = st.sampled_from(
    ["cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo", "stable_reinforce", "custom", "", "nope"]
)
KEYS = st.sampled_from(["clip_low_threshold", "clip_high_threshold", "beta", "loss_id", "", "\0", "y" * 200])
TOKENS = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=12)
ODD_TOKENS = st.lists(st.sampled_from([0, VOCAB - 1, VOCAB, -1, 2**31 - 1, -(2**31)]), max_size=CONTEXT + 2)


@st.composite
def tensors(draw: st.DrawFn) -> pb.Tensor:
    """An array of some dtype, whose bytes may not be what its shape and indices promise."""
    dtype = draw(st.sampled_from([pb.DTYPE_FLOAT32, pb.DTYPE_INT64, pb.DTYPE_INT32, pb.DTYPE_BFLOAT16, 0, 99]))
    shape = draw(st.lists(INT64, max_size=3) | st.just([1] * 70) | st.just([2**62] * 500) | st.just([0, 2**62]))
    tensor = pb.Tensor(dtype=dtype, shape=shape)
    form = draw(st.integers(0, 3))
    if form == 0:
        tensor.dense = draw(st.binary(max_size=40))
    elif form == 1:
        tensor.dense = np.array(draw(st.lists(NUMBERS, max_size=12)), "<f4").tobytes()
    elif form == 2:
        rows = st.lists(st.integers(-2, 9) | INT64, max_size=8)
        tensor.sparse_csr.crow_indices = np.array(draw(rows), "<i8").tobytes() + draw(st.sampled_from([b"", b"\1"]))
        tensor.sparse_csr.col_indices = np.array(draw(rows), "<i8").tobytes()
        tensor.sparse_csr.values = draw(st.binary(max_size=64))
    return tensor


@st.composite
def spans(draw: st.DrawFn) -> pb.ProvenanceSpan:
    """A span of a sequence that nobody has sampled."""
    span = pb.ProvenanceSpan()
    kind = draw(st.sampled_from(["prompt_tokens", "sampled_tokens", None]))
    if kind is not None:
        chosen = getattr(span, kind)
        chosen.sequence_id = draw(st.sampled_from(["", "s", "a:sample:0:0:0", "z" * 500]))
        chosen.offset, chosen.length = draw(INT64), draw(INT64)
    return span


@st.composite
def good_datums(draw: st.DrawFn, loss_fn: str) -> pb.Datum:
    """What the loss takes, with numbers of any size in it."""
    tokens = draw(TOKENS)
    datum = pb.Datum()
    datum.model_input.add().encoded_text.tokens = np.array(tokens, "<i4").tobytes()
    targets = datum.loss_fn_inputs["target_tokens"]
    targets.dense, targets.dtype = np.array(tokens[::-1], "<i8").tobytes(), pb.DTYPE_INT64
    spec = LOSS_SPECS.get(loss_fn, LOSS_SPECS["cross_entropy"])
    for name in (*spec.required[1:], *spec.optional):
        if name in spec.required or loss_fn == "ppo":
            values = draw(st.lists(NUMBERS, min_size=len(tokens), max_size=len(tokens)))
            datum.loss_fn_inputs[name].dense = np.array(values, "<f4").tobytes()
            datum.loss_fn_inputs[name].dtype = pb.DTYPE_FLOAT32
    return datum


@st.composite
def odd_datums(draw: st.DrawFn, loss_fn: str) -> pb.Datum:
    """A good datum, spoilt."""
    datum = draw(good_datums(loss_fn))
    for spoil in draw(st.lists(st.integers(0, 6), min_size=1, max_size=3)):
        if spoil == 0:
            datum.loss_fn_inputs[draw(NAMES)].CopyFrom(draw(tensors()))
        elif spoil == 1:
            datum.loss_fn_inputs["target_tokens"].shape.extend(draw(st.lists(INT64, min_size=1, max_size=3)))
        elif spoil == 2:
            datum.model_input.add().encoded_text.tokens = np.array(draw(ODD_TOKENS), "<i4").tobytes()
        elif spoil == 3:
            datum.model_input.add().CopyFrom(draw(st.sampled_from(CHUNKS)))
        elif spoil == 4:
            datum.model_input_spans.extend(draw(st.lists(spans(), max_size=3)))
            datum.loss_fn_input_spans.extend(draw(st.lists(spans(), max_size=3)))
        elif spoil == 5:
            datum.loss_fn_inputs.pop("target_tokens", None)
        else:
            datum.model_input[0].encoded_text.tokens += draw(st.binary(max_size=5))
    return datum


CHUNKS = [
    pb.Chunk(),
    pb.Chunk(image=pb.ImageChunk(data=b"\x89PNG", format="png", expected_tokens=-1)),
    pb.Chunk(dmel=pb.DmelChunk(dmel=b"123")),
    pb.Chunk(encoded_text=pb.EncodedTextChunk()),
]


@st.composite
def messages(draw: st.DrawFn) -> pb.ForwardBackwardRequest:
    """A request without its place in a sequence, good or spoilt."""
    loss_fn = draw(st.just("cross_entropy") | LOSSES)
    message = pb.ForwardBackwardRequest(loss_fn=loss_fn)
    message.data.extend(draw(st.lists(good_datums(loss_fn) | odd_datums(loss_fn), max_size=3)))
    message.forward_only = draw(st.booleans())
    for key in draw(st.lists(KEYS, max_size=1)):
        message.loss_fn_config[key] = draw(NUMBERS)
    for key in draw(st.lists(KEYS, max_size=1)):
        value = message.loss_fn_config_v2[key]
        if draw(st.booleans()):
            value.text = draw(st.sampled_from(["", "no such loss", "w" * 5000]))
    return message


# -- bytes that were damaged on the way

UNKNOWN = [b"\x78\x01", b"\xfa\x01\x03abc", b"\x0d\x01\x02\x03\x04", b"\x1b\x1c", b"\x80" * 10 + b"\x01"]
"""A field of an unknown number, one of bytes, a known one of another wire type, a group, and a number without end."""


@st.composite
def damages(draw: st.DrawFn) -> Callable[[bytes], tuple[bytes, str]]:
    """What becomes of a body: the bytes that arrive, and their Content-Encoding."""
    kind = draw(st.sampled_from(["flip", "cut", "twice", "insert", "zstd", "broken zstd", "bomb", "no zstd", "many"]))
    place, mask = draw(st.floats(0, 1, exclude_max=True)), draw(st.integers(1, 255))
    piece = draw(st.sampled_from(UNKNOWN) | st.binary(max_size=20))

    def damage(body: bytes) -> tuple[bytes, str]:
        at = int(place * len(body))
        if kind == "flip":
            return body[:at] + bytes([body[at] ^ mask]) + body[at + 1 :], ""
        if kind == "cut":
            return body[:at], ""
        if kind == "twice":
            return body + body[at:], ""
        if kind == "insert":
            return body[:at] + piece + body[at:], ""
        if kind == "many":
            return body + b"\x1a\x00" * (mask * 4000), ""
        if kind == "bomb":
            return zstandard.compress(body + bytes(MAX_BODY_BYTES * (1 + mask % 3))), "zstd"
        frame = zstandard.compress(body)
        if kind == "broken zstd":
            at = int(place * len(frame))
            return frame[:at] + bytes([frame[at] ^ mask]) + frame[at + 1 :], "zstd"
        return (frame, "zstd") if kind == "zstd" else (body, "zstd")

    return damage


# -- a service, a worker, and two tenants


class Bench:
    """The service with a train loop on its database: one run that takes everything, one that only trains."""

    def __init__(self, api: Api, folder: Path, database: Database) -> None:
        self.api = api
        self.lab = Lab(database, folder)
        self.loop: TrainLoop = self.lab.worker()
        self.model_id = str(api.create(api.session())["model_id"])
        self.neighbour = self.lab.client(seed=5)
        self.lab.work(self.loop)
        self.seq_id = 1
        self.outcomes: Counter[str] = Counter()
        self._sent = 0
        self.steps = 0

    def send(self, body: bytes, encoding: str) -> None:
        """One case: its answer, and what the train loop makes of it."""
        options = {"content_encoding": encoding} if encoding else {}
        began = time.process_time()
        answer = self.api.forward_backward(body, **options)
        assert time.process_time() - began < LONGEST_CPU_S
        self.settled(answer)

    def settled(self, answer: httpx.Response) -> None:
        """Check an answer; what it has accepted comes to its end in the train loop."""
        check_answer(answer)
        assert answer.status_code in (200, 400, 404, 409, 413), answer.text
        self.outcomes[str(answer.status_code)] += 1
        if answer.status_code == 200:
            self._settle(answer.json()["request_id"])
        self._sent += 1
        if self._sent % EVERY == 0:
            self.train_neighbour()

    def _settle(self, request_id: str) -> None:
        model_id, _, seq_id = request_id.rpartition(":")
        if self.api.operation(model_id, int(seq_id)).state == log.ACCEPTED:
            self.lab.work(self.loop)
        row = self.api.operation(model_id, int(seq_id))
        assert row.state != log.ACCEPTED or int(seq_id) > self.seq_id
        assert row.state != log.FAILED or row.error_category == "user", row.error
        self.outcomes[row.state] += 1
        while self._taken():
            self.seq_id += 1

    def _taken(self) -> bool:
        with self.api.database.read() as session:
            return log.find(session, self.model_id, self.seq_id) is not None

    def train_neighbour(self) -> None:
        """A step of the neighbour, and one of the run that takes everything, whatever becomes of it."""
        self.steps += 1
        self.neighbour.train(self.steps)
        self.lab.work(self.loop)
        body = {"model_id": self.model_id, "seq_id": self.seq_id, "adam_params": {}}
        if self.api.post("optim_step", body).status_code == 200:
            self._settle(f"{self.model_id}:{self.seq_id}")

    @property
    def neighbours_state(self) -> State:
        return state_of(self.loop, self.neighbour)


@pytest.fixture
def bench(configure: Callable[..., None], sqlite_url: str, redis_url: str, tmp_path: Path) -> Iterator[Bench]:
    with running(configure, sqlite_url, redis_url, tmp_path, max_request_bytes=MAX_BODY_BYTES, key_cache_s=2) as api:
        made = Bench(api, tmp_path, api.database)
        yield made
        made.lab.close()


def undisturbed(migrated_sqlite: Path, folder: Path, steps: int) -> State:
    """The neighbour's run on a worker of its own."""
    folder.mkdir()
    (folder / "quiet.db").write_bytes(migrated_sqlite.read_bytes())
    database = Database(f"sqlite:///{folder / 'quiet.db'}")
    lab = Lab(database, folder)
    loop, client = lab.worker(), lab.client(seed=5)
    lab.work(loop)
    for number in range(1, steps + 1):
        client.train(number)
        lab.work(loop)
    state = state_of(loop, client)
    lab.close()
    database.dispose()
    return state


def memory_in_use() -> int:
    """Bytes of this process, less what the allocator only keeps for later."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(psutil.Process().memory_info().rss)


def fuzz(bench: Bench, cases: int) -> None:
    """Send half of the cases as they are, half of them damaged; memory is measured after a tenth and at the end."""
    sent: list[int] = []
    began: list[int] = []

    @settings(ONCE, max_examples=cases)
    @given(message=messages(), damage=st.none() | damages())
    def send(message: pb.ForwardBackwardRequest, damage: Callable[[bytes], tuple[bytes, str]] | None) -> None:
        message.model_id, message.seq_id = bench.model_id, bench.seq_id
        body = message.SerializeToString()
        bench.send(*(damage(body) if damage else (body, "")))
        sent.append(len(body))
        if len(sent) == cases // 10:
            began.append(memory_in_use())

    send()
    assert memory_in_use() - began[0] < GROWTH_BYTES


def check(bench: Bench, migrated_sqlite: Path, folder: Path, cases: int) -> None:
    fuzz(bench, cases)
    bench.train_neighbour()
    assert bench.outcomes["200"] > cases // 4 and bench.outcomes["400"] > cases // 20
    assert bench.outcomes[log.DONE] > cases // 20 and bench.outcomes[log.FAILED] > cases // 20
    bad = {"pass_failed", "cycle_failed", "restore_failed", "request_failed"}
    assert [entry for entry in bench.lab.logs if entry["event"] in bad] == []
    assert bench.neighbours_state.same_bits(undisturbed(migrated_sqlite, folder / "quiet", bench.steps))


def test_no_body_harms_the_service_or_a_neighbour(bench: Bench, migrated_sqlite: Path, tmp_path: Path) -> None:
    check(bench, migrated_sqlite, tmp_path, CASES)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_none_of_many_bodies_harms_the_service_or_a_neighbour(
    bench: Bench, migrated_sqlite: Path, tmp_path: Path
) -> None:
    check(bench, migrated_sqlite, tmp_path, MANY_CASES)
