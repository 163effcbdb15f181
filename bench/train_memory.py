"""The memory that a forward and backward of one datum of 2048 tokens takes beside the loaded model.

    python bench/train_memory.py [--runs 5] [--layers 4] [--vocab 2048] [--model FOLDER] [--checkpointing off auto on]

A Qwen3 as wide as the tiny model, or the model in a folder. Each side runs in a process of its own, which reads from
the kernel how far its resident memory rose above what it was with the model loaded and one short datum done. The ratio
is ours to that of PEFT's loop, which never checkpoints, with its 95 % interval, for each setting of our gradient
checkpointing; `auto` is what a worker does by itself. The bar is 0.5. Linux only.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from loops import datums, model_of, our_step, peft_step, with_peft
from pairs import ratio
from transformers import PreTrainedModel, Qwen3ForCausalLM

from app.wire.types import LoraConfig
from workers.model.base import BaseModel
from workers.model.preparation import Preparation, prepare

TOKENS, RANK, BAR = 2048, 8, 0.5


def risen_mib(step: Callable[[], float]) -> float:
    """How far resident memory rises in `step`."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    step()
    return (_status("VmHWM") - before) / 1024


def _status(field: str) -> int:
    """KiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def random_model(layers: int, vocab: int) -> PreTrainedModel:
    """As wide as the tiny model."""
    config = model_of(None).config
    config.num_hidden_layers, config.vocab_size, config.layer_types = layers, vocab, ["full_attention"] * layers
    return Qwen3ForCausalLM(config).eval()


def measure(side: str, model: PreTrainedModel, checkpointing: str) -> float:
    """MiB of one side, in this process."""
    torch.set_num_threads(1)
    vocab = model.config.vocab_size
    short, long = datums([8], vocab), datums([TOKENS], vocab)
    if side == "peft":
        wrapped = with_peft(model, RANK)
        steps = [peft_step(wrapped, data) for data in (short, long)]
    else:
        base = BaseModel(model, "tiny")
        prepare(base, Preparation("padded", checkpointing))
        adapter = base.new_adapter(LoraConfig(rank=RANK, seed=0))
        steps = [our_step(base, [(adapter, data)]) for data in (short, long)]
    steps[0]()
    return risen_mib(steps[1])


def measured(side: str, shape: Sequence[str], checkpointing: str) -> float:
    """MiB of one side, in a process of its own."""
    command = [sys.executable, __file__, "--side", side, *shape, "--checkpointing", checkpointing]
    finished = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return float(finished.stdout.split()[-1])


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocab", type=int, default=2048)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--checkpointing", nargs="+", choices=["off", "auto", "on"], default=["off", "auto", "on"])
    parser.add_argument("--side", choices=["peft", "tinworks"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side:
        model = model_of(arguments.model) if arguments.model else random_model(arguments.layers, arguments.vocab)
        print(measure(arguments.side, model, *arguments.checkpointing))
        return
    shape = ["--layers", str(arguments.layers), "--vocab", str(arguments.vocab)]
    shape = ["--model", str(arguments.model)] if arguments.model else shape
    print(f"tokens={TOKENS} {' '.join(shape)} runs={arguments.runs}")
    for checkpointing in arguments.checkpointing:
        ours, theirs = [], []
        for _ in range(arguments.runs):
            ours.append(measured("tinworks", shape, checkpointing))
            theirs.append(measured("peft", shape, checkpointing))
        share = ratio(theirs, ours)
        sizes = f"ours {share.theirs:.1f} MiB, against {share.ours:.1f} MiB"
        print(f"checkpointing {checkpointing:4} {share}  bar {BAR}  {sizes}", flush=True)


if __name__ == "__main__":
    main()
