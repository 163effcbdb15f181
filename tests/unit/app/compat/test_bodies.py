"""Bodies of the OpenAI-compatible routes: what is not supported is refused by name, neutral values are not."""

from __future__ import annotations

from typing import Any

import pytest

from app.compat.errors import error_body
from app.compat.messages import for_template
from app.compat.schemas import ChatBody, CompletionBody, parse
from app.errors import InvalidRequest

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}
COMPLETION = {"model": "tiny", "prompt": "Hi"}
IMAGE = {"type": "image_url", "image_url": {"url": "x"}}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"b": 1, "a": [2]}'}}
TOOL = {"type": "function", "function": {"parameters": {"type": "object"}, "name": "f"}}


def param(kind: type[ChatBody] | type[CompletionBody], body: Any) -> str:
    """The field that the refusal of a body names."""
    with pytest.raises(InvalidRequest) as refused:
        parse(kind, body)
    return str(error_body(400, refused.value.detail)["error"]["param"])


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"frequency_penalty": -1}, "frequency_penalty"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"functions": []}, "functions"),
        ({"best_of": 2}, "best_of"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": 1000}, "n"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": ""}, "stop"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 4, "max_completion_tokens": 5}, "max_tokens"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
        ({"messages": []}, "messages"),
        ({"messages": [{"content": "Hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": "Hi", "weight": 1}]}, "messages[0].weight"),
        ({"messages": [{"role": "user", "content": "Hi"}] * 3000}, "messages"),
        ({"tools": [{"type": "retrieval"}]}, "tools[0].type"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ({"model": None}, "model"),
    ],
)
def test_a_chat_that_cannot_be_is_refused_by_field(fields: dict[str, Any], named: str) -> None:
    assert param(ChatBody, CHAT | fields) == named


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 3, "n": 2}, "best_of"),
        ({"logprobs": 21}, "logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"echo": True, "logprobs": 1, "stream": True}, "echo"),
        ({"messages": []}, "messages"),
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [[1], "a"]}, "prompt"),
        ({"prompt": ["a"] * 600, "n": 2}, "prompt"),
    ],
)
def test_a_completion_that_cannot_be_is_refused_by_field(fields: dict[str, Any], named: str) -> None:
    assert param(CompletionBody, COMPLETION | fields) == named


def test_the_defaults_that_clients_send_are_taken() -> None:
    neutral = {"presence_penalty": 0.0, "frequency_penalty": 0, "logit_bias": {}, "response_format": {"type": "text"}}
    parse(ChatBody, CHAT | neutral | {"tool_choice": "auto", "seed": None, "store": False, "parallel_tool_calls": True})
    parse(CompletionBody, COMPLETION | {"suffix": None, "best_of": 1, "user": "me", "stop": None})


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]])],
)
def test_a_prompt_has_four_forms(prompt: Any, prompts: list[Any]) -> None:
    assert parse(CompletionBody, COMPLETION | {"prompt": prompt}).prompts == prompts


def test_messages_reach_the_template_as_it_wants_them() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    answered = {"role": "assistant", "content": None, "tool_calls": [CALL], "refusal": None, "audio": None}
    body = parse(ChatBody, CHAT | {"messages": [{"role": "user", "content": parts}, answered]})
    user, assistant = for_template(body.messages)
    assert user == {"role": "user", "content": "one\ntwo"}
    function = {"name": "f", "arguments": {"b": 1, "a": [2]}}
    assert assistant == {"role": "assistant", "tool_calls": [{**CALL, "function": function}]}
    assert list(assistant["tool_calls"][0]["function"]["arguments"]) == ["b", "a"]


@pytest.mark.parametrize("arguments", ["{", "[1]"])
def test_arguments_of_calls_are_json_objects(arguments: str) -> None:
    call = {"function": {"name": "f", "arguments": arguments}}
    body = parse(ChatBody, CHAT | {"messages": [{"role": "assistant", "tool_calls": [call]}]})
    with pytest.raises(InvalidRequest, match=r"^messages\[0\].tool_calls\[0\].function.arguments: "):
        for_template(body.messages)


def test_tools_keep_the_order_of_their_keys() -> None:
    body = parse(ChatBody, CHAT | {"tools": [TOOL]})
    assert body.tools is not None
    assert str(body.tools[0].raw) == str(TOOL)
