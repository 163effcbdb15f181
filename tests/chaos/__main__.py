"""`python -m tests.chaos`: run seeds, one after the other, and print a line of each.

Options that are not given are drawn from each seed. Exits with 1 if a seed failed; its folder, with the logs of every
process, stays, and the command that repeats it is printed.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.chaos.blows import DATABASES, KILLS, LAYOUTS, STORES, draw
from tests.chaos.seed import Outcome, quiet_run, run
from workers.model.tiny import make_tiny_model


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the seeds that the command line names."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="the first seed")
    parser.add_argument("--seeds", type=int, default=1, help="how many, from the first on")
    parser.add_argument("--database", choices=DATABASES)
    parser.add_argument("--store", choices=STORES)
    parser.add_argument("--layout", choices=LAYOUTS, help="of train workers")
    parser.add_argument("--kills", type=int, default=KILLS, help="blows of one seed")
    parser.add_argument("--batch-polls", action=argparse.BooleanOptionalAction, help="sample_use_retrieve_futures")
    parser.add_argument("--folder", type=Path, help="where failed seeds leave their logs")
    parser.add_argument("--keep", action="store_true", help="the others leave theirs, too")
    given = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    folder = given.folder or Path(tempfile.mkdtemp(prefix="tinworks-chaos-"))
    model = folder / "tiny"
    make_tiny_model(model)
    quiet = quiet_run(folder / "quiet", model)
    print(quiet.line(), flush=True)
    failed: list[Outcome] = []
    for seed in range(given.seed, given.seed + given.seeds):
        plan = draw(
            seed,
            database=given.database,
            store=given.store,
            layout=given.layout,
            batch_polls=given.batch_polls,
            kills=given.kills,
        )
        outcome = run(plan, folder / f"seed-{seed}", model, quiet, keep=given.keep)
        print(outcome.line(), flush=True)
        if outcome.wrong:
            failed.append(outcome)
            print(*(f"    {what}" for what in outcome.wrong), sep="\n")
            print(f"    {plan.command}\n    logs: {outcome.folder}", flush=True)
    print(f"{given.seeds - len(failed)} of {given.seeds} seeds passed", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
