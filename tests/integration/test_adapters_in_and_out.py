"""`tinworks export` and `tinworks import` against a database and a blob store, and train loops between them."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import peft
import pytest
import safetensors.torch
import torch
import typer
from sqlalchemy import select, update
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3ForCausalLM
from typer.testing import CliRunner

from app.checkpoints.export import find, write_adapter
from app.checkpoints.models import Checkpoint, Snapshot, Upload
from app.cli import app
from app.errors import InvalidRequest, NotFound
from app.fleet.models import Model
from app.runs.log import DONE
from app.runs.models import Run
from tests.unit.workers.train.train_lab import Client, Lab, random_data, slot_of, state_of, tiny_base
from workers import export
from workers import import_adapter as import_adapter_module
from workers.import_adapter import import_adapter
from workers.model.base import BaseModel
from workers.model.export import BadAdapterFile
from workers.model.forward import Work, run_pass
from workers.model.lora import Adapter
from workers.model.tiny import make_tokenizer
from workers.train import snapshots
from workers.train.loop import TrainLoop

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]

pytestmark = pytest.mark.filterwarnings("ignore")


def plain_model() -> Qwen3ForCausalLM:
    """The lab's base model as transformers has it."""
    base = tiny_base()
    model = Qwen3ForCausalLM(base.model.config)
    model.load_state_dict(base.model.state_dict())
    return model.eval()


@pytest.fixture
def base_folder(lab: Lab, tmp_path: Path) -> Path:
    """The lab's base model as its workers have found it."""
    folder = tmp_path / "models" / "tiny"
    plain_model().save_pretrained(folder)
    with lab.database.write() as session:
        session.execute(update(Model).values(source=str(folder)))
    return folder


def peft_folder(folder: Path, **options: object) -> peft.PeftModel:
    """An adapter that PEFT has made and saved, with random weights."""
    config = {"r": 4, "lora_alpha": 6, "task_type": "CAUSAL_LM", "target_modules": ATTENTION, **options}
    model = peft.get_peft_model(plain_model(), peft.LoraConfig(**config))
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data.normal_(std=0.1)
    model.save_pretrained(folder)
    return model.eval()


DATA = random_data(31, (12, 7))


def logprobs_of(model: torch.nn.Module) -> list[Tensor]:
    found = []
    for datum in DATA:
        tokens = torch.from_numpy(datum.tokens).long()[None]
        with torch.no_grad():
            logits = model(input_ids=tokens, use_cache=False).logits[0]
        targets = torch.from_numpy(datum.inputs["target_tokens"])[:, None]
        found.append(torch.log_softmax(logits.float(), -1).gather(1, targets)[:, 0])
    return found


def logprobs_with(base: BaseModel, adapter: Adapter) -> list[Tensor]:
    (output,) = run_pass(base, [Work(adapter, DATA, "cross_entropy", backward=False)], micro_batch_tokens=4096)
    assert not isinstance(output, Exception)
    return [torch.from_numpy(one["logprobs"]) for one in output.loss_fn_outputs]


def assert_equal(mine: list[Tensor], theirs: list[Tensor]) -> None:
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=0)


def imported(lab: Lab, folder: Path, client: Client, **settings: object) -> list[str]:
    changed = lab.settings.model_copy(update=settings)
    paths, _ = import_adapter(
        lab.database,
        lab.blobs,
        changed,
        source=str(folder),
        base_model="tiny",
        name="from-peft",
        owner_id=client.owner_id,
    )
    return paths


def trained(lab: Lab, loop: TrainLoop) -> Client:
    client = lab.client(rank=3)
    client.train(1)
    client.save("here")
    client.save_for_sampler(path="there")
    lab.work(loop)
    return client


def path_of(client: Client, kind: str, name: str) -> str:
    return f"tinker://{client.model_id}/{kind}/{name}"


@pytest.mark.parametrize(("kind", "name"), [("weights", "here"), ("sampler_weights", "there")])
def test_a_checkpoint_is_a_folder_that_peft_loads(lab: Lab, tmp_path: Path, kind: str, name: str) -> None:
    loop = lab.worker()
    client = trained(lab, loop)
    found = find(lab.database, path_of(client, kind, name))
    write_adapter(lab.blobs, found.snapshot_id, tmp_path)
    model = peft.PeftModel.from_pretrained(plain_model(), tmp_path)
    state = slot_of(loop, client).state
    assert state is not None
    assert_equal(logprobs_of(model), logprobs_with(lab.base, state.adapter))


def test_what_peft_saved_is_trained_on_and_sampled_from(lab: Lab, base_folder: Path, tmp_path: Path) -> None:
    theirs = peft_folder(tmp_path / "theirs")
    client = lab.client()
    training, sampling = imported(lab, tmp_path / "theirs", client)
    assert training.endswith(":train:0/weights/from-peft") and sampling.endswith(":train:0/sampler_weights/from-peft")
    loop = lab.worker()
    run = lab.client_from(training, owner_id=client.owner_id, optimizer=False)
    lab.work(loop)
    state = slot_of(loop, run).state
    assert state is not None
    assert_equal(logprobs_with(lab.base, state.adapter), logprobs_of(theirs))
    assert (run.row.lora_rank, run.row.lora_alpha) == (4, 6.0)
    assert (run.row.train_attn, run.row.train_mlp, run.row.train_unembed) == (True, False, False)
    with lab.database.read() as session:
        snapshot_id = session.scalars(select(Checkpoint.snapshot_id).distinct()).one()
    assert torch.equal(snapshots.read_adapter(lab.blobs, snapshot_id, lab.base).flat, state_of(loop, run).flat)

    before = state_of(loop, run)
    _, step = run.train(5)
    lab.work(loop)
    assert run.operation(step).state == DONE
    assert state_of(loop, run).step == 1 and not torch.equal(state_of(loop, run).flat, before.flat)


def test_it_is_loaded_into_a_run_of_the_same_layers_too(lab: Lab, base_folder: Path, tmp_path: Path) -> None:
    peft_folder(tmp_path / "theirs", target_modules=[*ATTENTION, "gate_proj", "up_proj", "down_proj", "lm_head"])
    client = lab.client(rank=4)
    training, _ = imported(lab, tmp_path / "theirs", client)
    load = client.load(training, optimizer=False)
    with_optimizer = client.load(training, optimizer=True)
    loop = lab.worker()
    lab.work(loop)
    assert client.operation(load).state == DONE
    category, error = client.error(with_optimizer)
    assert category == "user" and "no optimizer state" in error


def test_out_and_in_again_is_the_same_to_the_last_bit(lab: Lab, base_folder: Path, tmp_path: Path) -> None:
    loop = lab.worker()
    client = trained(lab, loop)
    (tmp_path / "out").mkdir()
    write_adapter(lab.blobs, find(lab.database, path_of(client, "weights", "here")).snapshot_id, tmp_path / "out")
    training, _ = imported(lab, tmp_path / "out", client)
    run = lab.client_from(training, owner_id=client.owner_id, optimizer=False)
    lab.work(loop)
    assert torch.equal(state_of(loop, run).flat, state_of(loop, client).flat)
    assert run.row.lora_alpha == client.row.lora_alpha


def test_a_copy_of_the_unembedding_beside_the_adapter_must_be_the_base_models(
    lab: Lab, base_folder: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "theirs"
    peft_folder(folder, target_modules=["q_proj", "lm_head"])
    weights = safetensors.torch.load_file(folder / "adapter_model.safetensors")
    (copy,) = [name for name in weights if "lora_" not in name]
    client = lab.client()
    assert imported(lab, folder, client)
    safetensors.torch.save_file({**weights, copy: weights[copy] + 1}, folder / "adapter_model.safetensors")
    with pytest.raises(BadAdapterFile, match=r"lm_head.*is not a LoRA weight"):
        imported(lab, folder, client)


def test_what_cannot_be_imported_leaves_nothing_behind(lab: Lab, base_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "theirs"
    peft_folder(folder)
    client = lab.client()
    with pytest.raises(InvalidRequest, match=r"SOURCE: .*TINWORKS_TENANT_STORAGE_BYTES"):
        imported(lab, folder, client, tenant_storage_bytes=100)
    with pytest.raises(BadAdapterFile, match="above the limit of 2"):
        imported(lab, folder, client, max_lora_rank=2)
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(BadAdapterFile, match=r"adapter_model.safetensors is missing"):
        imported(lab, folder, client)
    with lab.database.read() as session:
        assert session.scalars(select(Snapshot)).all() == session.scalars(select(Checkpoint)).all() == []
        assert session.scalars(select(Run.id)).all() == [client.model_id]


def test_exports_name_what_is_in_the_way(lab: Lab, tmp_path: Path) -> None:
    loop = lab.worker()
    client = trained(lab, loop)
    path = path_of(client, "weights", "here")
    with pytest.raises(InvalidRequest, match="PATH: 'here' is not of the form"):
        find(lab.database, "here")
    with pytest.raises(NotFound, match="PATH: there is no checkpoint"):
        find(lab.database, path_of(client, "weights", "nowhere"))
    snapshot_id = find(lab.database, path).snapshot_id
    file = lab.blob_folder / "snapshots" / snapshot_id / "adapter_model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(NotFound, match=r"adapter_model.safetensors is damaged"):
        write_adapter(lab.blobs, snapshot_id, tmp_path)
    with lab.database.write() as session:
        session.add(Upload(snapshot_id=snapshot_id))
    with pytest.raises(Exception, match="not stored yet"):
        find(lab.database, path)


@pytest.fixture
def command(
    lab: Lab, configure: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., list[str]]:
    """`tinworks …` on the lab's stores: what it prints, line by line. What it would become is run here."""
    configure(DATABASE_URL=lab.database.url, TINWORKS_DATA_DIR=tmp_path)

    def become(program: str, arguments: list[str]) -> None:
        modules = {"workers.export": export, "workers.import_adapter": import_adapter_module}
        inner = typer.Typer()
        inner.command()(modules[arguments[2]].main)
        assert program == sys.executable and arguments[1] == "-m"
        inner(arguments[3:])

    monkeypatch.setattr(os, "execv", become)

    def run(*words: str, status: int = 0) -> list[str]:
        result = CliRunner().invoke(app, words)
        assert result.exit_code == status, (result.output, result.exception)
        return (result.stdout if status == 0 else result.stderr).splitlines()

    return run


def test_the_merged_folder_gives_the_trainers_logprobs(
    lab: Lab, base_folder: Path, tmp_path: Path, command: Callable[..., list[str]]
) -> None:
    make_tokenizer().save_pretrained(base_folder)
    loop = lab.worker()
    client = trained(lab, loop)
    out = tmp_path / "merged"
    command("export", "--merged", path_of(client, "weights", "here"), str(out))
    state = slot_of(loop, client).state
    assert state is not None
    assert_equal(logprobs_of(AutoModelForCausalLM.from_pretrained(out)), logprobs_with(lab.base, state.adapter))
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is False
    assert (out / "tokenizer.json").read_bytes() == (base_folder / "tokenizer.json").read_bytes()
    assert (out / "generation_config.json").is_file()
    again = command("export", "--merged", path_of(client, "weights", "here"), str(out), status=1)
    assert "already" in again[-1]


def test_the_commands_print_paths_and_sentences(
    lab: Lab, base_folder: Path, tmp_path: Path, command: Callable[..., list[str]]
) -> None:
    peft_folder(tmp_path / "theirs")
    lab.client()
    options = ("--base-model", "tiny", "--name", "from-peft")
    training, sampling = command("import", str(tmp_path / "theirs"), *options)
    command("export", training, str(tmp_path / "out"))
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    assert sampling.replace("sampler_weights", "weights") == training
    assert "no worker has registered 'other'" in "".join(
        command("import", str(tmp_path / "theirs"), "--base-model", "other", "--name", "x", status=1)
    )
    assert "--name" in "".join(
        command("import", str(tmp_path / "theirs"), "--base-model", "tiny", "--name", "a/b", status=1)
    )
    lab.client()
    assert "--owner or --key" in "".join(command("import", str(tmp_path / "theirs"), *options, status=1))
    for_eve = command("import", str(tmp_path / "theirs"), *options, "--owner", "eve", status=1)
    assert "no tenant 'eve'" in "".join(for_eve)
