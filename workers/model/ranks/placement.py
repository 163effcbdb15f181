"""Which rank a process is, and where the others are.

torch's own names: `MASTER_ADDR` and `MASTER_PORT` (where rank 0 listens), `WORLD_SIZE`, `RANK` (of this host's first
rank, in what a person sets), and for a started rank `LOCAL_RANK`, which is also the number of its device, and
`LOCAL_WORLD_SIZE`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

ADDRESS, PORT, WORLD, RANK = "MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK"
LOCAL, LOCAL_WORLD = "LOCAL_RANK", "LOCAL_WORLD_SIZE"


class BadPlacement(ValueError):
    """The rendezvous settings do not go together; the message names the variable."""


@dataclass(frozen=True, slots=True)
class Placement:
    """`rank` of `world`, the `local`-th on its host, which has `local_world`. `port` 0: rank 0 takes a free one."""

    rank: int
    world: int
    local: int
    local_world: int
    address: str = "127.0.0.1"
    port: int = 0

    @property
    def one_host(self) -> bool:
        """Whether all ranks are on this host."""
        return self.world == self.local_world

    def neighbour(self, local: int) -> Placement:
        """Another rank of the same host."""
        return replace(self, rank=self.rank - self.local + local, local=local)

    def environment(self) -> dict[str, str]:
        """What a started rank is told."""
        return {
            ADDRESS: self.address,
            PORT: str(self.port),
            WORLD: str(self.world),
            RANK: str(self.rank),
            LOCAL: str(self.local),
            LOCAL_WORLD: str(self.local_world),
        }


def placement(environment: Mapping[str, str], local_world: int) -> Placement:
    """Of a host's first rank, or, with `LOCAL_RANK`, of any. Without settings all `local_world` ranks are here.

    Raises BadPlacement.
    """
    if ADDRESS not in environment:
        return Placement(0, local_world, 0, local_world)
    values = {name: _number(environment, name) for name in (PORT, WORLD, RANK)}
    local = 0
    if LOCAL in environment:
        local, local_world = _number(environment, LOCAL), _number(environment, LOCAL_WORLD)
    if not 0 <= values[RANK] - local <= values[WORLD] - local_world:
        raise BadPlacement(
            f"{RANK} {values[RANK]} and the {local_world} ranks of this host do not fit into {WORLD} {values[WORLD]}"
        )
    return Placement(values[RANK], values[WORLD], local, local_world, environment[ADDRESS], values[PORT])


def _number(environment: Mapping[str, str], name: str) -> int:
    try:
        return int(environment[name])
    except KeyError:
        raise BadPlacement(f"{ADDRESS} or {LOCAL} is set but {name} is not") from None
    except ValueError:
        raise BadPlacement(f"{name} must be a number, got {environment[name]!r}") from None
