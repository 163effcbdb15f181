"""Train loops in this process, turned by hand: real requests in a real log, and what their runs would be alone."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
import structlog
import torch
from fakeredis import FakeRedis
from sqlalchemy import select, update
from sqlalchemy.exc import OperationalError
from structlog.testing import capture_logs
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from app.accounts.key_ring import KeyRing
from app.checkpoints.models import Checkpoint
from app.db import Database, database_clock
from app.fleet.models import Worker
from app.fleet.service import NameOfModel, register_model
from app.futures.waiters import DONE_CHANNEL
from app.runs import log
from app.runs.models import Operation, Run
from app.runs.service import RunService
from app.settings import Settings
from app.storage.blobs import BlobStore, LocalBlobStore
from app.wire import tinker_pb2 as pb
from app.wire.types import Datum, LoraConfig
from tests import factories
from tests.services import wait_for
from workers.model import engine
from workers.model.base import BaseModel
from workers.model.engine import Engine, SoloEngine
from workers.model.forward import Work, run_pass
from workers.train import held, lease, recovery
from workers.train.loop import TrainLoop
from workers.train.slots import Slot

VOCAB = 97
CONTEXT = 64
LR, EPS = 2e-3, 1e-6
POOL = factories.POOL
_numbers = itertools.count()


@lru_cache(maxsize=1)
def tiny_base() -> BaseModel:
    """A random Qwen3, small enough for a pass in milliseconds."""
    torch.set_num_threads(1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        config = Qwen3Config(
            hidden_size=64,
            num_hidden_layers=2,
            intermediate_size=96,
            vocab_size=VOCAB,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            max_position_embeddings=CONTEXT,
            tie_word_embeddings=True,
        )
        model = Qwen3ForCausalLM(config)
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.data.normal_(std=0.1)
    return BaseModel(model.eval(), "tiny")


def random_data(seed: int, lengths: Sequence[int] = (9, 5)) -> list[Datum]:
    """Cross-entropy data, the same for the same arguments."""
    draw = np.random.default_rng(seed)
    return [
        Datum(
            draw.integers(0, VOCAB, n).astype(np.int32),
            {"target_tokens": draw.integers(0, VOCAB, n), "weights": draw.normal(size=n).astype(np.float32)},
        )
        for n in lengths
    ]


def message(model_id: str, seq_id: int, data: Sequence[Datum], **fields: Any) -> pb.ForwardBackwardRequest:
    """The request that carries `data`."""
    fields.setdefault("loss_fn", "cross_entropy")
    request = pb.ForwardBackwardRequest(model_id=model_id, seq_id=seq_id, **fields)
    for datum in data:
        added = request.data.add()
        added.model_input.add().encoded_text.tokens = datum.tokens.astype("<i4").tobytes()
        for name, array in datum.inputs.items():
            tensor = added.loss_fn_inputs[name]
            tensor.dense = array.tobytes()
            tensor.dtype = pb.DTYPE_INT64 if array.dtype.kind == "i" else pb.DTYPE_FLOAT32
            tensor.shape.extend(array.shape)
    return request


@dataclass(frozen=True)
class State:
    """Copies of a run's tensors and counters."""

    flat: Tensor
    m: Tensor
    v: Tensor
    grad: Tensor
    step: int
    counters: tuple[int, tuple[int, ...], int] = (0, (), 0)

    def same_bits(self, other: State) -> bool:
        """Whether nothing differs at all."""
        tensors = ("flat", "m", "v", "grad")
        equal = all(torch.equal(getattr(self, name), getattr(other, name)) for name in tensors)
        return equal and (self.step, self.counters) == (other.step, other.counters)


def assert_close(mine: State, alone: State, tolerance: float = 1e-5) -> None:
    """Weights and moments agree; far closer than with a step lost or applied twice."""
    assert mine.step == alone.step
    for name in ("flat", "m", "v", "grad"):
        a, b = getattr(mine, name), getattr(alone, name)
        assert float((a - b).norm()) <= tolerance * max(1.0, float(b.norm())), name


@lru_cache(maxsize=64)
def alone(rank: int, seed: int, script: tuple[tuple[str, int], ...]) -> State:
    """The run of that script computed without any of the service: one pass per request, stepped by `torch.optim`.

    `script`: ("fb", seed of the data) or ("step", anything), in order.
    """
    base = tiny_base()
    adapter = base.new_adapter(LoraConfig(rank=rank, seed=seed))
    parameters = [parameter for pair in adapter.modules.values() for parameter in pair]
    optimizer = torch.optim.AdamW(parameters, lr=LR, betas=(0.9, 0.95), eps=EPS, weight_decay=0.0)
    steps = 0
    for kind, data_seed in script:
        if kind == "fb":
            run_pass(base, [Work(adapter, random_data(data_seed), "cross_entropy")], micro_batch_tokens=4096)
        else:
            optimizer.step()
            adapter.zero_grad()
            steps += 1

    def moments(name: str) -> Tensor:
        parts = []
        for a, b in adapter.modules.values():
            for parameter, transposed in ((a, False), (b, True)):
                moment = optimizer.state[parameter][name] if steps else torch.zeros_like(parameter.data)
                parts.append((moment.t() if transposed else moment).reshape(-1))
        return torch.cat(parts)

    flat, grad = adapter.flat.detach().clone(), adapter.grad_flat.detach().clone()
    return State(flat, moments("exp_avg"), moments("exp_avg_sq"), grad, steps)


@dataclass
class Client:
    """One run as its client sees it: it counts its requests and sends them."""

    lab: Lab
    owner_id: str
    model_id: str
    rank: int
    seed: int
    optimizer: str = "adamw"
    next_seq: int = 1
    script: list[tuple[str, int]] = field(default_factory=list)

    def _seq(self, seq_id: int | None) -> int:
        if seq_id is not None:
            return seq_id
        self.next_seq += 1
        return self.next_seq - 1

    def send(self, data: Sequence[Datum], *, seq_id: int | None = None, **fields: Any) -> int:
        """`forward_backward` of these data."""
        number = self._seq(seq_id)
        self.lab.service.forward_backward(self.owner_id, message(self.model_id, number, data, **fields))
        return number

    def forward_backward(self, data_seed: int, *, seq_id: int | None = None) -> int:
        """`forward_backward`, noted in the script that `alone` follows."""
        if seq_id is None:
            self.script.append(("fb", data_seed))
        return self.send(random_data(data_seed), seq_id=seq_id)

    def bad_forward_backward(self) -> int:
        """One that fails on arrival: its token is outside the vocabulary."""
        return self.send([Datum(np.array([VOCAB], np.int32), {"target_tokens": np.array([1])})])

    def nan_forward_backward(self) -> int:
        """One whose gradient is NaN."""
        inputs = {"target_tokens": np.array([1, 2]), "weights": np.array([np.nan, 1], np.float32)}
        return self.send([Datum(np.array([1, 2], np.int32), inputs)])

    def optim_step(self, *, seq_id: int | None = None, note: bool = True, **params: float) -> int:
        """`optim_step`, noted in the script unless it is sent to be refused."""
        if seq_id is None and note:
            self.script.append(("step", 0))
        number = self._seq(seq_id)
        if self.optimizer == "adamw":
            fields = {"adam_params": {"learning_rate": LR, "eps": EPS} | params}
        else:
            fields = {"optimizer_params": {"type": self.optimizer, "learning_rate": LR} | params}
        self.lab.service.optim_step(
            self.owner_id, {"model_id": self.model_id, "seq_id": number, "type": "optim_step", **fields}
        )
        return number

    def train(self, data_seed: int) -> tuple[int, int]:
        """A pipelined `forward_backward` and `optim_step`."""
        return self.forward_backward(data_seed), self.optim_step()

    def save(self, name: str, **fields: Any) -> int:
        """`save_weights`."""
        return self._json(self.lab.service.save_weights, path=name, **fields)

    def save_for_sampler(self, **fields: Any) -> int:
        """`save_weights_for_sampler`."""
        return self._json(self.lab.service.save_weights_for_sampler, **fields)

    def load(self, path: str, *, optimizer: bool) -> int:
        """`load_weights` in place."""
        return self._json(self.lab.service.load_weights, path=path, optimizer=optimizer)

    def _json(self, submit: Callable[[str, object], object], **fields: Any) -> int:
        number = self._seq(None)
        submit(self.owner_id, {"model_id": self.model_id, "seq_id": number, **fields})
        return number

    # -- what became of it

    def operation(self, seq_id: int) -> Operation:
        """The row."""
        with self.lab.database.read() as session:
            found = log.find(session, self.model_id, seq_id)
        assert found is not None
        return found

    def result(self, seq_id: int) -> dict[str, Any]:
        """The JSON result of an operation that must have succeeded."""
        row = self.operation(seq_id)
        assert row.state == log.DONE, (row.kind, row.state, row.error)
        assert row.result is not None
        found: dict[str, Any] = orjson.loads(row.result)
        return found

    def metrics(self, seq_id: int) -> dict[str, float]:
        """The metrics of a step."""
        found: dict[str, float] = self.result(seq_id)["metrics"]
        return found

    def output(self, seq_id: int) -> pb.ForwardBackwardOutput:
        """The result of a `forward_backward`."""
        row = self.operation(seq_id)
        assert row.state == log.DONE and row.result is not None, row.error
        output = pb.ForwardBackwardOutput()
        output.ParseFromString(row.result)
        return output

    def error(self, seq_id: int) -> tuple[str | None, str]:
        """Category and message of an operation that must have failed."""
        row = self.operation(seq_id)
        assert row.state == log.FAILED, row.state
        return row.error_category, row.error or ""

    @property
    def row(self) -> Run:
        """The run's row."""
        with self.lab.database.read() as session:
            return session.get_one(Run, self.model_id)

    @property
    def alone(self) -> State:
        """What the noted script gives by itself."""
        return alone(self.rank, self.seed, tuple(self.script))


class Lab:
    """A database, a blob store, the service that writes the log, and train loops that live and die in this process."""

    def __init__(self, database: Database, folder: Path, *, blobs: BlobStore | None = None, **settings: Any) -> None:
        self.database = database
        self.blob_folder = folder / "blobs"
        self.blobs = blobs or LocalBlobStore(self.blob_folder)
        values: dict[str, Any] = {"database_url": database.url, "data_dir": folder, "lease_s": 3600.0}
        self.settings = Settings(**values | settings)
        self.service = RunService(database, self.blobs, self.settings, KeyRing(database, self.settings))
        self.base = tiny_base()
        self.redis = FakeRedis()
        self._notices = self.redis.pubsub(ignore_subscribe_messages=True)
        self._notices.subscribe(DONE_CHANNEL)
        self._notices.get_message()  # of the subscription itself
        self._loops: list[TrainLoop] = []
        self._logging = structlog.get_config()
        structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.INFO))
        self._capture = capture_logs()  # printing a traceback takes longer than most tests
        self.logs = self._capture.__enter__()
        with database.write() as session:
            register_model(
                session, pool=POOL, source="tiny", facts=self.base.facts, names=[NameOfModel("tiny", "tiny", None)]
            )

    def close(self) -> None:
        """End the threads of all loops."""
        for loop in self._loops:
            loop._writer.stop(10)
            loop._saver.stop(10)
        self.redis.close()
        self._capture.__exit__(None, None, None)
        structlog.configure(**self._logging)

    def worker(self, ranks: Engine | None = None, **settings: Any) -> TrainLoop:
        """A new train worker, of one rank unless it is given an engine; the test turns its cycles."""
        worker_id = f"w{next(_numbers)}"
        with self.database.write() as session:
            factories.add_worker(session, id=worker_id, roles=["train"])
        changed = self.settings.model_copy(update=settings)
        loop = TrainLoop(
            worker_id=worker_id,
            pool=POOL,
            engine=ranks or SoloEngine(self.base, micro_batch_tokens=changed.micro_batch_tokens),
            database=self.database,
            blobs=self.blobs,
            redis=self.redis,
            settings=changed,
        )
        loop._writer.start()
        self._loops.append(loop)
        return loop

    def client(self, *, rank: int = 4, seed: int = 1, owner_id: str | None = None, optimizer: str = "adamw") -> Client:
        """A new run, in a session of its own. Its creation is in the log."""
        with self.database.write() as session:
            owner_id = owner_id or factories.add_owner(session).id
            session_id = factories.add_session(session, owner_id).id
        request = {"session_id": session_id, "model_seq_id": 0, "base_model": "tiny"}
        lora = {"rank": rank, "seed": seed}
        config = {"lora_config": lora, "optimizer_config": {"type": optimizer}, "type": "create_model"}
        submitted = self.service.create(owner_id, request | config)
        return Client(self, owner_id, submitted.model_id, rank, seed, optimizer)

    def client_from(self, path: str, *, owner_id: str, optimizer: bool, **fields: Any) -> Client:
        """A new run that begins as a checkpoint."""
        with self.database.write() as session:
            session_id = factories.add_session(session, owner_id).id
        request = {"session_id": session_id, "model_seq_id": 0, "path": path, "optimizer": optimizer, **fields}
        submitted = self.service.load_weights(owner_id, request)
        client = Client(self, owner_id, submitted.model_id, 0, 0)
        client.optimizer = client.row.optimizer.get("type", "")
        return client

    def work(self, loop: TrainLoop, *, turns: int = 100) -> None:
        """Turn cycles until there is nothing to do and to wait for."""
        for _ in range(turns):
            if not loop.cycle():
                if not any(slot.held for slot in loop._slots.values()):
                    return
                self.write_files(loop)
        raise AssertionError("the loop finds no end")

    def write_files(self, loop: TrainLoop) -> None:
        """Let the files of saves that are under way be written; the next cycle commits the saves."""
        held.wait_for_files(loop._slots, 30)

    def write_snapshots(self, loop: TrainLoop) -> None:
        """Let the recovery snapshots that are under way be written."""
        wait_for(lambda: not any(slot.snapshot_pending for slot in loop._slots.values()))

    def kill(self, loop: TrainLoop) -> None:
        """What `kill -9` and the time of a lease do: the loop is never turned again, its leases run out, and it was
        not seen since."""
        loop._writer.stop(10)
        self.expire(loop)
        with self.database.write() as session:
            silent = update(Worker).where(Worker.id == loop._worker_id)
            session.execute(silent.values(last_seen=database_clock() - self.settings.lease_s))

    def restore(self, loop: TrainLoop, client: Client) -> None:
        """Bring a run into a slot of the worker, and no further."""
        with self.database.write() as session:
            (granted,) = lease.take(session, worker_id=loop._worker_id, lease_s=3600, model_ids=[client.model_id])
        restored = recovery.restore([granted], loop._executor, self.database, self.blobs, self.base)
        slot = restored[client.model_id]
        if isinstance(slot, Exception):
            raise slot
        loop._slots[client.model_id] = slot

    def expire(self, loop: TrainLoop, *clients: Client) -> None:
        """Let a worker's leases run out: all, or those of these runs."""
        mine = [client.model_id for client in clients]
        query = update(Run).where(Run.worker_id == loop._worker_id).values(lease_expires_at=database_clock() - 0.01)
        with self.database.write() as session:
            session.execute(query.where(Run.id.in_(mine)) if mine else query)

    def notices(self) -> set[str]:
        """Request ids announced since the last look."""
        found: set[str] = set()
        while (message := self._notices.get_message()) is not None:
            found |= set(message["data"].decode().split("\n"))
        return found

    def snapshot_of(self, client: Client, kind: str, name: str) -> str:
        """The snapshot that a checkpoint names."""
        query = select(Checkpoint.snapshot_id).where(
            Checkpoint.model_id == client.model_id, Checkpoint.kind == kind, Checkpoint.name == name
        )
        with self.database.read() as session:
            return session.scalars(query).one()


def residents(loop: TrainLoop) -> set[str]:
    """Ids of the runs in a worker's slots."""
    return set(loop._slots)


def slot_of(loop: TrainLoop, client: Client) -> Slot:
    """A run's slot."""
    return loop._slots[client.model_id]


def state_of(loop: TrainLoop, client: Client) -> State:
    """A copy of a resident run's state."""
    state = slot_of(loop, client).state
    assert state is not None
    counters = (state.counters.summed, tuple(state.counters.failed), state.counters.tokens)
    moments = state.optimizer.tensors()
    tensors = (state.adapter.flat, moments["m"], moments.get("v", moments["m"]), state.adapter.grad_flat)
    flat, m, v, grad = (tensor.detach().clone() for tensor in tensors)
    return State(flat, m, v, grad, state.optimizer.step, counters)


class Killed(BaseException):
    """The end of a process, as far as a test in the same process can have one."""


def break_passes(patch: pytest.MonkeyPatch, client: Client, error: BaseException) -> list[int]:
    """Every pass that holds work of the client's rank raises as a whole. Returns a list that grows with each."""
    raised: list[int] = []

    def breaking(base: BaseModel, works: Sequence[Work], *, micro_batch_tokens: int) -> Any:
        if any(work.adapter.config.rank == client.rank for work in works):
            raised.append(len(works))
            raise error
        return run_pass(base, works, micro_batch_tokens=micro_batch_tokens)

    patch.setattr(engine, "run_pass", breaking)
    return raised


def fail_once(patch: pytest.MonkeyPatch, place: str) -> None:
    """The next commit is refused by the database, in the middle of it."""
    module: Any = {"finish": log, "advance": lease}[place]
    real, calls = getattr(module, place), []

    def failing(*args: Any, **options: Any) -> Any:
        calls.append(place)
        if len(calls) == 1:
            raise OperationalError("UPDATE", {}, Exception("database is locked"))
        return real(*args, **options)

    patch.setattr(module, place, failing)
