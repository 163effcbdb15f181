"""A rendered chat has the very tokens that `apply_chat_template` gives."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from app.compat.template import PromptTooLong, TemplateFailed
from app.compat.tokenizer import ModelTokenizer
from app.errors import InvalidRequest
from tests.unit.app.compat.tokenizer_lab import hugging_face
from workers.model.tiny import CHAT_TEMPLATE as CHATML
from workers.model.tiny import make_tokenizer
from workers.model.tokenizer import pack_tokenizer

INDENTED = """\
{{- bos_token }}
{%- if tools %}
    {{- '<|turn|>system\\nTools:\\n' }}
    {%- for tool in tools %}
        {{- tool | tojson }}
        {{- '\\n' }}
    {%- endfor %}
{%- endif %}
{% for message in messages %}
    {% if message.role == "tool" %}
        {{ '<|turn|>tool\\n' + message.content + '<|end|>' }}
        {% continue %}
    {% endif %}
    {%- set ns = namespace(last=loop.last) %}
    {{- '<|turn|>' + message.role + '\\n' }}
    {%- if message.tool_calls %}
        {%- for call in message.tool_calls %}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson(indent=2) }}
            {{- '}</tool_call>' }}
        {%- endfor %}
    {%- endif %}
    {%- if message.content is defined %}
        {%- generation %}{{ message.content | trim }}{% endgeneration %}
    {%- endif %}
    {{- eos_token }}{% if ns.last %}!{% endif %}
{% endfor %}
{%- if add_generation_prompt %}{{ '<|turn|>assistant\\n' }}{% if thinking %}<think>{% endif %}{% endif %}
"""
REASONING = (
    "{% for m in messages %}{{ m['role'] }}:{% if m.reasoning_content is defined %}[{{ m.reasoning_content }}]"
    "{% endif %}{{ m['content'] }}{{ eos_token }}{% endfor %}{{ strftime_now('%Y') }}"
)
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "parameters": {"type": "object", "properties": {"city": {"type": "string", "description": "Städte <é>"}}},
            "name": "weather",
            "description": "What's the weather & more?",
        },
    }
]
CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief. <|end|> naïve 你好"},
    {"role": "user", "content": "  What is 2 + 2?\n\n"},
    {"role": "assistant", "content": "4 🎉"},
    {"role": "user", "content": "And 'that' \"here\"?"},
]
CALLS: list[dict[str, Any]] = [
    CHAT[0],
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Köln", "n": [1]}}}
        ],
    },
    {"role": "tool", "content": "rain", "tool_call_id": "c1"},
]
THOUGHT: list[dict[str, Any]] = [{"role": "assistant", "content": "4", "reasoning": "2 and 2"}]


def templated(source: str | dict[str, str], tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = source
    return tokenizer


def rendered(tokenizer: PreTrainedTokenizerFast, messages: Any, tools: Any = None, **options: Any) -> list[int]:
    """Our tokens of a chat."""
    packed = pack_tokenizer(tokenizer, ())
    assert packed is not None
    own = ModelTokenizer.read(packed)
    options = {"add_generation_prompt": True, "continue_final_message": False, "variables": {}} | options
    return own.encode(own.templates.render(messages, tools, most_characters=10**6, **options), add_special_tokens=False)


def expected(tokenizer: PreTrainedTokenizerFast, messages: Any, tools: Any = None, **options: Any) -> list[int]:
    options = {"add_generation_prompt": True} | options
    found = tokenizer.apply_chat_template(messages, tools=tools, tokenize=True, return_dict=False, **options)
    return list(found)


@pytest.mark.parametrize("begin_answer", [True, False])
def test_the_tiny_models_own_chat(begin_answer: bool) -> None:
    tokenizer = make_tokenizer()
    want = expected(tokenizer, CHAT, add_generation_prompt=begin_answer)
    assert rendered(tokenizer, CHAT, add_generation_prompt=begin_answer) == want


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
@pytest.mark.parametrize(
    ("source", "messages", "tools"),
    [
        (CHATML, CHAT, None),
        (INDENTED, CHAT, None),
        (INDENTED, CHAT, TOOLS),
        (INDENTED, CALLS, TOOLS),
        (REASONING, THOUGHT, None),
    ],
)
def test_other_chats(kind: str, source: str, messages: Any, tools: Any) -> None:
    tokenizer = templated(source, hugging_face(kind))
    assert rendered(tokenizer, messages, tools) == expected(tokenizer, messages, tools)


def test_variables_of_the_template() -> None:
    tokenizer = templated(INDENTED, hugging_face("byte_level"))
    with_it = rendered(tokenizer, CHAT, variables={"thinking": True})
    assert with_it == expected(tokenizer, CHAT, thinking=True)
    assert with_it != rendered(tokenizer, CHAT)


def test_named_templates_and_the_one_for_tools() -> None:
    tokenizer = templated({"default": CHATML, "tool_use": INDENTED}, hugging_face("byte_level"))
    for tools in (None, TOOLS):
        assert rendered(tokenizer, CHAT, tools) == expected(tokenizer, CHAT, tools)


@pytest.mark.parametrize("source", [CHATML, INDENTED.replace("!", "")])
@pytest.mark.parametrize("begun", ["It is", "It is \n "])
def test_a_final_message_that_is_continued(source: str, begun: str) -> None:
    tokenizer = templated(source, hugging_face("byte_level"))
    messages = [*CHAT, {"role": "assistant", "content": begun}]
    options = {"add_generation_prompt": False, "continue_final_message": True}
    assert rendered(tokenizer, messages, **options) == expected(tokenizer, messages, **options)


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ 1 / 0 }}",
        "{{ 'a' + messages[0].content_ }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{% if %}",
        "{{ messages[7].role.name }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
    ],
)
def test_a_template_that_fails_blames_the_messages(source: str) -> None:
    tokenizer = templated(source, hugging_face("byte_level"))
    with pytest.raises(TemplateFailed, match=r"^messages: "):
        rendered(tokenizer, CHAT)


def test_the_templates_own_words_reach_the_client() -> None:
    tokenizer = templated("{{ raise_exception('roles must alternate') }}", hugging_face("byte_level"))
    with pytest.raises(TemplateFailed, match="roles must alternate"):
        rendered(tokenizer, CHAT)


def test_output_without_end_is_cut_off() -> None:
    source = "{% for a in range(99999) %}{% for b in range(99999) %}{{ messages[0].content }}{% endfor %}{% endfor %}"
    with pytest.raises(PromptTooLong, match=r"more than 1000000 characters"):
        rendered(templated(source, hugging_face("byte_level")), CHAT)


def test_a_model_without_a_template_says_so() -> None:
    with pytest.raises(InvalidRequest, match="no chat template"):
        rendered(hugging_face("byte_level"), CHAT)
