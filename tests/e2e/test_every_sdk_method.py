"""Every public method of the official SDK's clients and every command of its command line, found by inspection.

Each either works or is refused on purpose, as the table in `sdk_methods` says; `docs/compatibility.md` is that table as
a page. Write it anew with `make compatibility`.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import click
import huggingface_hub
import pytest
import tinker
from tinker.cli.__main__ import main_cli

from tests.e2e.sdk_methods import COMMANDS, METHODS, Call, World
from tests.e2e.service import Service
from tests.e2e.tenant import Tenant

PAGE = Path(__file__).resolve().parents[2] / "docs" / "compatibility.md"
CLIENTS = (
    tinker.ServiceClient,
    tinker.TrainingClient,
    tinker.SamplingClient,
    tinker.RestClient,
    tinker.AdminClient,
)
pytestmark = pytest.mark.filterwarnings("ignore")


def public_methods(client: type) -> list[str]:
    """Names of what users call, without the `…_async` twins."""
    names = [name for name, member in inspect.getmembers_static(client) if not name.startswith("_")]
    called = [name for name in names if callable(getattr(client, name))]
    return sorted(name for name in called if name.removesuffix("_async") not in called or not name.endswith("_async"))


def commands(group: click.Group = main_cli, path: Sequence[str] = ()) -> Iterator[str]:
    """Every command that does something, by its words."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, click.Group):
            yield from commands(command, (*path, name))
        else:
            yield " ".join((*path, name))


CONVENTIONS = """
## Conventions

Where Tinker's documentation says nothing, we have chosen:

- [losses.md](losses.md): every loss with its formula, inputs and configuration; `stable_reinforce` is our own formula.
- [optimizers.md](optimizers.md): AdamW and Dimuon, what an empty or a refused step does.
- [models.md](models.md): which matrices carry LoRA in each family, and how adapters are exported.
- LoRA's scale is `TINWORKS_LORA_ALPHA / rank`; A is drawn from the seed and the module's name, B is zero.
- Log-probabilities of samples are those of the untempered distribution, whatever temperature, top-k and top-p say.
- A stop token or string stays in the tokens of its sequence; at least one token is always sampled.
- A name that a run has given to a checkpoint is refused a second time, unless `overwrite=True`.
- `prompt_alt_tokens_k` draws from the whole vocabulary at the request's temperature.
- [openai.md](openai.md): what the OpenAI-compatible routes take and refuse.
"""

FOUND = [(client.__name__, name) for client in CLIENTS for name in public_methods(client)]


@pytest.fixture(scope="module")
def world(service: Service, tmp_path_factory: pytest.TempPathFactory) -> World:
    """Shared by all calls: each makes what it changes."""
    ada, bob = (Tenant(service.base_url, f"tml-{uuid.uuid4().hex}") for _ in range(2))
    made = World(ada, bob, tmp_path_factory.mktemp("home"))
    made.TrainingClient.save_weights_and_get_sampling_client().result(60)
    return made


def answer_of(value: Any) -> Any:
    """What a future holds; anything else as it is."""
    return value.result(60) if callable(getattr(value, "result", None)) else value


async def awaited(function: Callable[..., Any], args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """What an asynchronous method gives in the end: some give a future."""
    value = await function(*args, **keywords)
    return await value if inspect.isawaitable(value) else value


def check(world: World, call: Call, ask: Callable[[], Any]) -> None:
    if call.refused is None:
        assert call.holds(ask(), world)
        return
    with pytest.raises(tinker.TinkerError, match=call.refused):
        ask()


@pytest.mark.parametrize(("client", "name"), FOUND, ids=[".".join(found) for found in FOUND])
def test_every_method_works_or_is_refused_on_purpose(world: World, client: str, name: str) -> None:
    assert name in METHODS[client], f"{client}.{name} is not in the table: call it, and say what is right"
    call = METHODS[client][name]

    def ask(suffix: str) -> Any:
        args, keywords = call.arguments(world)
        on = call.on(world) if call.on else getattr(world, client)
        method = getattr(on, name + suffix)
        return asyncio.run(awaited(method, args, dict(keywords))) if suffix else answer_of(method(*args, **keywords))

    check(world, call, lambda: ask(""))
    if hasattr(getattr(tinker, client), f"{name}_async"):
        check(world, call, lambda: ask("_async"))


class Hub:
    """A Hugging Face Hub of our own making, in the place of `huggingface_hub.HfApi`."""

    uploaded: list[str] = []

    def whoami(self) -> dict[str, str]:
        return {"name": "me"}

    def create_repo(self, **options: Any) -> None:
        assert options["repo_id"] == "me/adapter"

    def upload_folder(self, *, folder_path: str, **options: Any) -> None:
        type(self).uploaded = sorted(path.name for path in Path(folder_path).iterdir())


@pytest.mark.parametrize("words", list(commands()))
def test_every_command_works_or_is_refused_on_purpose(world: World, words: str) -> None:
    assert words in COMMANDS, f"`tinker {words}` is not in the table: run it, and say what is right"
    command = COMMANDS[words]
    environment: dict[str, str | None] = {"HOME": str(world.home)}
    if words == "auth logout":
        world.tenant.invoke("auth", "login", typed=f"{world.tenant.key}\n", **environment)
    typed = command.typed(world) if command.typed else None
    with patch.object(huggingface_hub, "HfApi", Hub):
        result = world.tenant.invoke(*words.split(), *command.arguments(world), typed=typed, **environment)
    if command.refused is not None:
        assert command.refused in repr(result.exception)
        return
    assert result.exit_code == 0, result.output + repr(result.exception)
    assert command.prints in result.output
    if words == "checkpoint push-hf":
        assert {"adapter_config.json", "adapter_model.safetensors"} <= set(Hub.uploaded)


def test_the_table_names_nothing_that_is_not_there() -> None:
    assert {(client, name) for client, calls in METHODS.items() for name in calls} == set(FOUND)
    assert set(COMMANDS) == set(commands())


def page() -> str:
    """The table as Markdown."""
    lines = [
        "# Compatibility",
        "",
        f"What Tinworks does with each public method of the official SDK ({tinker.__version__}) and each command of",
        "its command line. `tests/e2e/test_every_sdk_method.py` calls them all against a running service and keeps",
        "this page; `make compatibility` writes it anew. A method's deprecated `…_async` twin does what the method",
        "does.",
    ]
    for client, calls in METHODS.items():
        lines += ["", f"## {client}", "", "| method | status | note |", "|---|---|---|"]
        lines += [row(f"`{name}`", call.refused, call.note) for name, call in sorted(calls.items())]
    lines += ["", "## Command line", "", "| command | status | note |", "|---|---|---|"]
    lines += [row(f"`tinker {name}`", command.refused, command.note) for name, command in sorted(COMMANDS.items())]
    return "\n".join([*lines, CONVENTIONS])


def row(name: str, refused: str | None, note: str) -> str:
    """One line of a table."""
    return f"| {name} | {'works' if refused is None else 'refused'} | {note} |"


def test_the_page_says_what_is_so() -> None:
    if os.environ.get("TINWORKS_WRITE_DOCS"):
        PAGE.write_text(page())
    assert PAGE.read_text() == page(), "docs/compatibility.md is not what the table says; run `make compatibility`"
