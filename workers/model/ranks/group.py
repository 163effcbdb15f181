"""The process group of a train worker's ranks: messages on the CPU, tensors wherever they are."""

from __future__ import annotations

import os
import socket
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from workers.model.ranks.messages import Message, decode, encode
from workers.model.ranks.placement import Placement


def listen(place: Placement, timeout_s: float) -> tuple[dist.TCPStore, Placement]:
    """Rank 0's side of the rendezvous: where the others ask for each other's addresses. Returns where it listens.

    With all ranks on one host nobody else can connect. On several it listens on every interface, for the address that
    the others know may belong to something in front of this host.
    """
    listener = socket.create_server((place.address, place.port)) if place.one_host else None
    store = dist.TCPStore(
        place.address,
        place.port if listener is None else listener.getsockname()[1],
        place.world,
        is_master=True,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=None if listener is None else listener.detach(),
    )
    return store, replace(place, port=store.port)


class RankGroup:
    """All ranks, which must make this object at the same time, and call the same of its methods in the same order.

    `timeout_s`: how long a rank waits for the others before it takes them for dead.
    """

    def __init__(
        self, place: Placement, device: torch.device, timeout_s: float, store: dist.TCPStore | None = None
    ) -> None:
        if place.one_host:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        timeout = timedelta(seconds=timeout_s)
        if store is None:
            store = dist.TCPStore(place.address, place.port, place.world, is_master=False, timeout=timeout)
        self.rank = place.rank
        self.world = place.world
        self.device = device
        if device.type == "cuda":
            torch.cuda.set_device(device)
        backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
        dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.world, timeout=timeout)
        self._messages = dist.new_group(backend="gloo", timeout=timeout)
        self.mesh: DeviceMesh = init_device_mesh(device.type, (place.world,))

    # -- messages

    def tell(self, message: Message) -> None:
        """Rank 0: send to all others."""
        data = encode(message)
        dist.broadcast(torch.tensor([len(data)]), 0, group=self._messages)
        dist.broadcast(_bytes(data), 0, group=self._messages)

    def hear(self) -> Message:
        """Every other rank: wait for what rank 0 tells."""
        length = torch.zeros(1, dtype=torch.int64)
        dist.broadcast(length, 0, group=self._messages)
        data = torch.empty(int(length), dtype=torch.uint8)
        dist.broadcast(data, 0, group=self._messages)
        return decode(data.numpy().tobytes())

    def reply(self, message: Message) -> None:
        """To rank 0."""
        data = encode(message)
        dist.send(torch.tensor([len(data)]), 0, group=self._messages)
        dist.send(_bytes(data), 0, group=self._messages)

    def reply_of(self, rank: int) -> Message:
        """Rank 0: wait for a rank's reply."""
        length = torch.zeros(1, dtype=torch.int64)
        dist.recv(length, rank, group=self._messages)
        data = torch.empty(int(length), dtype=torch.uint8)
        dist.recv(data, rank, group=self._messages)
        return decode(data.numpy().tobytes())

    # -- tensors

    def spread(self, tensor: Tensor) -> None:
        """Rank 0's values for all, in place."""
        dist.broadcast(tensor, 0)

    def sum_to_first(self, tensor: Tensor) -> None:
        """Rank 0 gets the sum over all ranks, in place; what the others have afterwards is undefined."""
        dist.reduce(tensor, 0)

    def close(self) -> None:
        """Leave."""
        dist.destroy_process_group()


def _bytes(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
