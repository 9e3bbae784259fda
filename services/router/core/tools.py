"""Tools as a model is told of them, and the grammar of a call that must come."""

import json
from collections.abc import Callable, Sequence
from typing import Any

from services.common.text.grammar import WHITESPACE
from services.router.core.calls import FORMATS

# What a model is told whose template has no tools: in the words of Hermes' format, which many have learnt.
INSTRUCTIONS = """You may call functions. These are their signatures, within <tools></tools>:
<tools>
{tools}
</tools>
For each call answer with a JSON object of the function's name and its arguments, within <tool_call></tool_call>:
<tool_call>
{{"name": "...", "arguments": {{...}}}}
</tool_call>"""
MAX_CALLS = 16


def as_text(messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A conversation with tools for a template that knows none: everything in the messages' content."""
    out = [_as_text(message) for message in messages]
    if not tools:
        return out
    told = INSTRUCTIONS.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    if out and out[0]["role"] == "system":
        first = {**out[0], "content": f"{out[0]['content']}\n\n{told}"}
        return [first, *out[1:]]
    return [{"role": "system", "content": told}, *out]


def _as_text(message: dict[str, Any]) -> dict[str, Any]:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    if not message.get("tool_calls"):
        return message
    calls = "\n".join(
        f"<tool_call>\n{json.dumps(call['function'], ensure_ascii=False)}\n</tool_call>"
        for call in message["tool_calls"]
    )
    content = "\n".join(text for text in (message["content"], calls) if text)
    return {"role": message["role"], "content": content}


def call_grammar(
    form: str, functions: Sequence[tuple[str, dict[str, Any]]], several: bool, special_id: Callable[[str], int | None]
) -> str:
    """In Lark's notation: one call, or several, of these functions: names with the schemas of their arguments.
    special_id: of a mark that is a control token."""
    style = FORMATS[form]
    rules = []
    for index, (name, schema) in enumerate(functions):
        head = json.dumps(f'{{"name": {json.dumps(name)}, "{style.arguments}": ')
        rules.append(f'object{index}: {head} arguments{index} "}}"')
        rules.append(f"arguments{index}: %json {json.dumps(_closed(schema))}")
    one = " | ".join(f"object{index}" for index in range(len(functions)))
    more = f"{{0,{MAX_CALLS - 1}}}" if several else ""
    if style.closing:
        rules.append(f'call: "{style.opening}\\n" object "\\n{style.closing}"')
        start = 'call ("\\n" call)' + more if several else "call"
    elif style.opening:
        rules.append("call: object")
        token = special_id(style.opening)
        mark = f'"{style.opening}"' if token is None else f"<[{token}]>"
        start = f'{mark} "[" call' + (f' (", " call){more}' if several else "") + ' "]"'
    else:
        rules.append("call: object")
        start = "call"
    return "\n".join([f"start: {start}", f"object: {one}", *rules])


def _closed(schema: dict[str, Any]) -> dict[str, Any]:
    """Arguments are an object, whatever the schema leaves open."""
    return {"type": "object", **schema, "x-guidance": {"whitespace_pattern": WHITESPACE}}
