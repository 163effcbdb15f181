"""What each field of the OpenAI-compatible requests does."""

from __future__ import annotations

from app.compat.schemas import NEUTRAL
from tests.e2e.field_checks import Check, decides, differs, inert, refused
from tests.e2e.field_probes_compat import by_key, chat, completion, render

TEMPLATE = "the base model's chat template decides, and this one prints roles and contents only"
CALL = {"type": "function", "id": "1", "index": 0, "function": {"name": "f", "arguments": "{}"}}
TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "d", "parameters": {"type": "object"}, "strict": True},
}
M = "messages.0"
ASSISTANT = {"role": "assistant", "content": "x"}

BOTH: tuple[Check, ...] = tuple(
    check
    for body, probe in (("CompletionBody", completion), ("ChatBody", chat))
    for check in (
        differs(f"{body}.model", probe, {"model": "$sampler_weights"}, {}),
        refused(f"{body}.model", probe, {"model": "no/such"}),
        differs(f"{body}.max_tokens", probe, {"max_tokens": 2}, {}),
        differs(f"{body}.temperature", probe, {"temperature": 0}, {}),
        differs(f"{body}.top_p", probe, {"top_p": 1e-6}, {}),
        differs(f"{body}.top_k", probe, {"top_k": 1}, {}),
        differs(f"{body}.n", probe, {"n": 2}, {}),
        differs(f"{body}.seed", probe, {"seed": 2}, {}),
        differs(f"{body}.stop", probe, {"stop": list("abcdeinorst ")}, {}),
        differs(f"{body}.stream", probe, {"stream": True}, {}),
        differs(
            f"{body}.stream_options & StreamOptions.include_usage",
            probe,
            {"stream": True, "stream_options": {"include_usage": True}},
            {"stream": True},
        ),
        refused(f"{body}.stream_options", probe, {"stream_options": {"include_usage": True}}),
        refused(
            "StreamOptions.include_obfuscation",
            probe,
            {"stream": True, "stream_options": {"include_obfuscation": True}},
        ),
        inert(f"{body}.user", probe, {"user": "me"}, {}, why="OpenAI's name for the client's own bookkeeping"),
        *(refused(f"NEUTRAL.{name}", probe, {name: "odd"}) for name in NEUTRAL),
        *(
            inert(f"NEUTRAL.{name}", probe, {name: values[0]}, {}, why="the neutral value, which clients send")
            for name, values in NEUTRAL.items()
            if name != "tool_choice" or probe is chat
        ),
    )
)

COMPLETIONS: tuple[Check, ...] = (
    differs("CompletionBody.prompt", completion, {"prompt": "Cats"}, {}),
    refused("CompletionBody.prompt", completion, {"prompt": 7}),
    decides("CompletionBody.best_of", completion, {"best_of": 1}, {"best_of": 2}, "best_of"),
    differs("CompletionBody.echo", completion, {"echo": True}, {}),
    differs("CompletionBody.logprobs", completion, {"logprobs": 2}, {"logprobs": 1}),
)

CHATS: tuple[Check, ...] = (
    differs("ChatBody.messages & Message.content", chat, {f"{M}.content": "Cats"}, {}),
    differs("Message.role", render, {f"{M}.role": "system"}, {}),
    differs(
        "TextPart.text & TextPart.type",
        render,
        {f"{M}.content": [{"type": "text", "text": "a"}]},
        {f"{M}.content": [{"type": "text", "text": "b"}]},
    ),
    refused("TextPart.type", render, {f"{M}.content": [{"type": "image_url", "text": "a"}]}, "content[0].type"),
    differs("ChatBody.max_completion_tokens", chat, {"max_tokens": None, "max_completion_tokens": 2}, {}),
    refused("ChatBody.max_completion_tokens", chat, {"max_completion_tokens": 2}),
    differs("ChatBody.logprobs", chat, {"logprobs": True}, {}),
    differs("ChatBody.top_logprobs", chat, {"logprobs": True, "top_logprobs": 2}, {"logprobs": True}),
    refused("ChatBody.top_logprobs", chat, {"top_logprobs": 2}),
    differs("ChatBody.add_generation_prompt", render, {"add_generation_prompt": False}, {}),
    differs(
        "ChatBody.continue_final_message",
        render,
        {"messages": [ASSISTANT], "continue_final_message": True},
        {"messages": [ASSISTANT]},
    ),
    refused("ChatBody.chat_template_kwargs", render, {"chat_template_kwargs": {"tools": []}}),
    inert("ChatBody.chat_template_kwargs", render, {"chat_template_kwargs": {"x": 1}}, {}, why=TEMPLATE),
    inert(
        "ChatBody.tools & ChatBody.tool_choice & ChatBody.parallel_tool_calls & Tool.type & Tool.function"
        " & FunctionSpec.name & FunctionSpec.description & FunctionSpec.parameters & FunctionSpec.strict",
        render,
        {"tools": [TOOL], "tool_choice": "auto", "parallel_tool_calls": False},
        {},
        why=TEMPLATE,
    ),
    refused("Tool.type", render, {"tools": [{**TOOL, "type": "x"}]}, "tools[0].type"),
    refused("Tool.function", render, {"tools": [{"type": "function"}]}, "tools[0].function"),
    refused("FunctionSpec.name", render, {"tools": [{**TOOL, "function": {"name": ""}}]}, "tools[0].function.name"),
    refused("ChatBody.tool_choice", render, {"tools": [TOOL], "tool_choice": "required"}),
    refused("ChatBody.parallel_tool_calls", render, {"parallel_tool_calls": 7}),
    inert(
        "Message.name & Message.tool_calls & Message.tool_call_id & Message.reasoning_content & Message.reasoning"
        " & ToolCall.id & ToolCall.type & ToolCall.index & ToolCall.function & CalledFunction.name"
        " & CalledFunction.arguments",
        render,
        {
            "messages": [
                {
                    **ASSISTANT,
                    "name": "n",
                    "tool_calls": [CALL],
                    "tool_call_id": "1",
                    "reasoning_content": "r",
                    "reasoning": "r",
                }
            ]
        },
        {"messages": [ASSISTANT]},
        why=TEMPLATE,
    ),
    *(
        refused(f"{model}.{name}", render, {"messages": [{**ASSISTANT, "tool_calls": [call]}]}, f"tool_calls[0].{path}")
        for model, name, path, call in (
            ("ToolCall", "type", "type", {**CALL, "type": "x"}),
            ("ToolCall", "function", "function", {"type": "function"}),
            (
                "CalledFunction",
                "arguments",
                "function.arguments",
                {"function": {"name": "f", "arguments": "{"}},
            ),
        )
    ),
    *(
        refused(f"Message.{name}", render, {f"{M}.{name}": "x"})
        for name in ("refusal", "function_call", "audio", "annotations")
    ),
    decides(
        "GET /v1/models authorization:",
        by_key,
        {"authorization": "Bearer tml-x"},
        {"authorization": ""},
        "Authorization",
    ),
)

COMPAT = (*BOTH, *COMPLETIONS, *CHATS)
