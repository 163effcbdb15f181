"""Adapters as files in PEFT's layout, which `peft` and vLLM load as they are (SEMANTICS §7)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from app.checkpoints.encryption import encrypt
from app.wire.types import LoraConfig
from workers.model.adapter import HostCopy
from workers.model.base import BaseModel
from workers.model.lora import Adapter
from workers.model.peft_layout import flattened, own_names, targeting, unflattened, weight_name
from workers.model.tensor_file import Pack, write_tensors

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
_METADATA = {"format": "pt"}

PLAIN: Mapping[str, Any] = {
    "bias": "none",
    "use_rslora": False,
    "use_dora": False,
    "fan_in_fan_out": False,
    "modules_to_save": None,
    "rank_pattern": {},
    "alpha_pattern": {},
    "layers_to_transform": None,
    "lora_bias": False,
}
"""What a configuration says of everything that PEFT could do and we do not. A file that says otherwise is refused."""


class BadAdapterFile(ValueError):
    """The files are not an adapter of this base model; the message says what does not fit."""


def peft_files(adapter: Adapter | HostCopy, base_name: str, base: BaseModel) -> dict[str, bytes]:
    """`adapter_config.json` and `adapter_model.safetensors` of `adapter`; the same adapter gives the same bytes.

    `base_name`: what the files call the base model. A trained unembedding is a plain LoRA target of its name, also
    where it is tied to the embedding. Raises ValueError if `adapter` is not one of `base`.
    """
    config = _peft_config(adapter, base_name, base)
    tensors, pack = _peft_tensors(adapter, base)
    packed = {name: pack(name, tensor.cpu()).contiguous() for name, tensor in tensors.items()}
    return {CONFIG_FILE: config, WEIGHTS_FILE: safetensors.torch.save(packed, _METADATA)}


def write_peft(adapter: Adapter | HostCopy, base_name: str, base: BaseModel, folder: Path) -> dict[str, Path]:
    """The files of `peft_files`, byte for byte, in a folder. No second copy of the adapter is made in memory."""
    paths = {name: folder / name for name in (CONFIG_FILE, WEIGHTS_FILE)}
    paths[CONFIG_FILE].write_bytes(_peft_config(adapter, base_name, base))
    write_tensors(paths[WEIGHTS_FILE], *_peft_tensors(adapter, base), _METADATA)
    return paths


def _peft_tensors(adapter: Adapter | HostCopy, base: BaseModel) -> tuple[dict[str, Tensor], Pack]:
    """The adapter's tensors by PEFT's names, and what gives them the shapes that they have there."""
    tensors, factors = {}, {}
    for own, tensor in adapter.state().items():
        path, _, factor = own.rpartition(".")
        name = weight_name(path, base.targets[path], factor)
        tensors[name], factors[name] = tensor, factor
    return tensors, lambda name, tensor: flattened(factors[name], tensor)


def _peft_config(adapter: Adapter | HostCopy, base_name: str, base: BaseModel) -> bytes:
    groups = {base.targets[path].group for path in adapter.modules if path in base.targets}
    if {path for path, target in base.targets.items() if target.group in groups} != set(adapter.modules):
        raise ValueError(f"the adapter is not one of {base.name_or_path}")
    alpha = adapter.config.alpha
    config = {
        **PLAIN,
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_name,
        "revision": None,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_dropout": 0.0,
        "r": adapter.config.rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        **targeting(base, adapter.modules),
    }
    return (json.dumps(config, indent=2, sort_keys=True) + "\n").encode()


def exported_files(
    adapter: Adapter | HostCopy, base_name: str, base: BaseModel, *, recipients: Sequence[str] | None
) -> dict[str, bytes]:
    """The files of `peft_files`; with `recipients` each is encrypted to them and has `.age` behind its name. Raises
    ValueError, or InvalidRequest for a recipient that nothing can be encrypted to.
    """
    files = peft_files(adapter, base_name, base)
    return files if recipients is None else encrypt(files, recipients)


def load_peft(base: BaseModel, files: Mapping[str, bytes], *, seed: int = 0) -> Adapter:
    """The adapter that `files` hold, on the device of `base`.

    It trains the groups of layers that the files have weights for, each whole. `seed` goes into its configuration: the
    files do not say it. Raises `BadAdapterFile`.
    """
    config = _plain_config(files)
    state = _read_weights(files, base)
    groups = {base.targets[name.rpartition(".")[0]].group for name in state}
    if not groups:
        raise BadAdapterFile(f"{WEIGHTS_FILE}: holds no weights")
    adapter = base.new_adapter(
        LoraConfig(
            rank=config["r"],
            seed=seed,
            train_attn="attn" in groups,
            train_mlp="mlp" in groups,
            train_unembed="unembed" in groups,
            alpha=float(config["lora_alpha"]),
        )
    )
    try:
        adapter.load_state(state)
    except ValueError as error:
        raise BadAdapterFile(f"{WEIGHTS_FILE}: {error}") from None
    return adapter


def _plain_config(files: Mapping[str, bytes]) -> dict[str, Any]:
    config = _parse_json(files)
    read_config(config)
    for key, plain in PLAIN.items():
        if config.get(key, plain) not in (plain, None):
            raise BadAdapterFile(f"{CONFIG_FILE}: {key}={config[key]!r} is not supported")
    return config


def read_config(config: Mapping[str, Any]) -> tuple[int, float]:
    """Rank and alpha of LoRA. Raises BadAdapterFile if it is none."""
    if config.get("peft_type") != "LORA":
        raise BadAdapterFile(f"{CONFIG_FILE}: peft_type is {config.get('peft_type')!r}, not 'LORA'")
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or rank < 1:
        raise BadAdapterFile(f"{CONFIG_FILE}: r must be a positive integer, got {rank!r}")
    if not isinstance(alpha, (int, float)) or alpha <= 0:
        raise BadAdapterFile(f"{CONFIG_FILE}: lora_alpha must be a positive number, got {alpha!r}")
    return rank, float(alpha)


def _parse_json(files: Mapping[str, bytes]) -> dict[str, Any]:
    try:
        config = json.loads(files[CONFIG_FILE])
    except KeyError:
        raise BadAdapterFile(f"{CONFIG_FILE} is missing") from None
    except ValueError as error:
        raise BadAdapterFile(f"{CONFIG_FILE}: {error}") from None
    if not isinstance(config, dict):
        raise BadAdapterFile(f"{CONFIG_FILE}: not an object")
    return config


def _read_weights(files: Mapping[str, bytes], base: BaseModel) -> dict[str, Tensor]:
    """`<path>.lora_A` or `.lora_B` → tensor, as `Adapter.load_state` takes it."""
    try:
        tensors = safetensors.torch.load(files[WEIGHTS_FILE])
    except KeyError:
        raise BadAdapterFile(f"{WEIGHTS_FILE} is missing") from None
    except SafetensorError as error:
        raise BadAdapterFile(f"{WEIGHTS_FILE}: {error}") from None
    known = own_names(base.targets)
    state = {}
    for name, tensor in tensors.items():
        if not name.endswith((".lora_A.weight", ".lora_B.weight")):
            raise BadAdapterFile(f"{WEIGHTS_FILE}: {name!r} is not a LoRA weight")
        if name not in known:
            raise BadAdapterFile(f"{WEIGHTS_FILE}: {name!r} is not a layer of {base.name_or_path} that can be trained")
        path, factor = known[name]
        try:
            state[f"{path}.{factor}"] = unflattened(factor, tensor, base.targets[path].experts)
        except ValueError as error:
            raise BadAdapterFile(f"{WEIGHTS_FILE}: {name!r}: {error}") from None
    return state
