"""`python -m workers.model.ranks`: one rank that is not the first, or, without `LOCAL_RANK`, all ranks of a host.

The first rank starts the others of its own host like this. On further hosts a person does, or a platform, with
`MASTER_ADDR`, `MASTER_PORT`, `WORLD_SIZE` and the `RANK` of the host's first rank (docs/scaling.md).
"""

from __future__ import annotations

import os
import sys

from app.settings import get_settings
from app.telemetry.logs import configure_logs
from workers.model.ranks.placement import ADDRESS, LOCAL, BadPlacement, placement
from workers.model.ranks.processes import THREADS, RankProcesses
from workers.model.serving import pin_devices


def main() -> None:
    """Follow rank 0, or start who does."""
    settings = get_settings()
    configure_logs(settings)
    pin_devices(settings)
    threads = int(os.environ.get(THREADS, "1"))
    try:
        if ADDRESS not in os.environ:
            raise BadPlacement(f"{ADDRESS} is not set: say where rank 0 is")
        place = placement(os.environ, settings.local_ranks)
        if LOCAL in os.environ:
            from workers.model.ranks.start import follow

            follow(place, threads=threads, timeout_s=2 * settings.max_pass_s)
            return
        if place.rank == 0:
            raise BadPlacement("RANK is 0: that one is the worker, `celery -A workers worker -Q train`")
    except BadPlacement as error:
        sys.exit(str(error))
    RankProcesses(place, first=0, threads=threads, on_death=lambda status: os._exit(status)).wait()


if __name__ == "__main__":
    main()
