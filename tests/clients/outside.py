"""litellm and langchain-openai on a running system, in a virtual environment of their own (they pin other versions):

    python3 -m venv build/clients
    build/clients/bin/python -m pip install litellm==1.110.2 langchain-openai==1.7.4
    build/clients/bin/python tests/clients/outside.py http://127.0.0.1:8000

One line for each check; exit code 1 if one failed.
"""

import asyncio
import math
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import litellm
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAIEmbeddings

sys.path.insert(0, str(Path(__file__).parent))
from tasks import CAPITAL, MODEL, PARAMETERS, REPORT, TOOL, WEATHER, City, GetWeather

litellm.suppress_debug_info = True
Check = Callable[[str], None]
QUESTION = CAPITAL[0]["content"]


# -- litellm


def _options(url: str, **more: Any) -> dict[str, Any]:
    return {"model": f"openai/{MODEL}", "api_base": f"{url}/v1", "api_key": "none", "temperature": 0, **more}


def litellm_chat(url: str) -> None:
    """Whole and streamed are the same."""
    options = _options(url, messages=CAPITAL, max_tokens=30)
    whole = litellm.completion(**options)
    text = whole.choices[0].message.content
    assert "Paris" in text, text
    assert whole.usage.completion_tokens > 0
    parts = [chunk.choices[0].delta.content or "" for chunk in litellm.completion(**options, stream=True)]
    assert "".join(parts) == text, parts


def litellm_async(url: str) -> None:
    """Several at once."""

    async def ask() -> list[str]:
        options = _options(url, messages=CAPITAL, max_tokens=10)
        return [a.choices[0].message.content for a in await asyncio.gather(*(litellm.acompletion(**options),) * 4)]

    assert len(set(asyncio.run(ask()))) == 1


def litellm_completions(url: str) -> None:
    """The older route."""
    options = _options(url, prompt="The capital of France is", max_tokens=5)
    answer = litellm.text_completion(**options | {"model": f"text-completion-openai/{MODEL}"})
    assert "Paris" in answer.choices[0].text, answer


def litellm_schema(url: str) -> None:
    """A pydantic model as the form of the answer."""
    answer = litellm.completion(**_options(url, messages=CAPITAL, response_format=City, max_tokens=200))
    City.model_validate_json(answer.choices[0].message.content)


def litellm_tools(url: str) -> None:
    """A call, its result, an answer."""
    options = _options(url, tools=[TOOL], max_tokens=200)
    asked = litellm.completion(**options, messages=WEATHER, tool_choice="required").choices[0].message
    call = asked.tool_calls[0]
    GetWeather.model_validate_json(call.function.arguments)
    result = {"role": "tool", "tool_call_id": call.id, "content": REPORT}
    answer = litellm.completion(**options, messages=[*WEATHER, asked.model_dump(), result], tool_choice="none")
    assert answer.choices[0].message.content


def litellm_embeddings(url: str) -> None:
    """Numbers, one list for each text."""
    options = {"model": f"openai/{MODEL}", "api_base": f"{url}/v1", "api_key": "none", "encoding_format": "float"}
    answer = litellm.embedding(**options, input=["a cat", "a dog"])
    assert len(answer.data) == 2
    assert all(math.isfinite(x) for x in answer.data[0]["embedding"])


def litellm_anthropic(url: str) -> None:
    """The same server by Anthropic's API."""
    options = {"model": f"anthropic/{MODEL}", "api_base": url, "api_key": "none", "temperature": 0, "max_tokens": 30}
    assert "Paris" in litellm.completion(**options, messages=CAPITAL).choices[0].message.content


def litellm_responses(url: str) -> None:
    """And by the responses API."""
    answer = litellm.responses(**_options(url, input=QUESTION, max_output_tokens=30))
    texts = [part.text for item in answer.output if item.type == "message" for part in item.content]
    assert "Paris" in "".join(texts), answer


def litellm_errors(url: str) -> None:
    """A bad request is one of litellm's own errors."""
    message = ""
    try:
        litellm.completion(**_options(url, messages=CAPITAL, max_tokens=-5))
    except litellm.BadRequestError as error:
        message = str(error)
    assert "max_tokens" in message, message


# -- langchain


def _model(url: str, **more: Any) -> ChatOpenAI:
    return ChatOpenAI(model=MODEL, base_url=f"{url}/v1", api_key="none", max_retries=0, temperature=0, **more)


def langchain_invoke(url: str) -> None:
    """An answer, with what it took."""
    answer = _model(url, max_tokens=30).invoke(QUESTION)
    assert "Paris" in answer.text, answer
    assert answer.usage_metadata["output_tokens"] > 0


def langchain_stream(url: str) -> None:
    """Parts that add up to the answer."""
    model = _model(url, max_tokens=30)
    parts = [part.text for part in model.stream(QUESTION)]
    assert len(parts) > 2
    assert "".join(parts) == model.invoke(QUESTION).text


def langchain_batch(url: str) -> None:
    """Several at once."""
    answers = _model(url, max_tokens=10).batch([QUESTION] * 4)
    assert len({answer.text for answer in answers}) == 1


def langchain_tools(url: str) -> None:
    """A call, its result, an answer."""
    model = _model(url, max_tokens=200)
    asked = model.bind_tools([GetWeather], tool_choice="required").invoke([HumanMessage(WEATHER[0]["content"])])
    (call, *_) = asked.tool_calls
    assert call["name"] == "GetWeather"
    GetWeather.model_validate(call["args"])
    result = ToolMessage(REPORT, tool_call_id=call["id"])
    final = model.bind_tools([GetWeather], tool_choice="none").invoke([HumanMessage("Hi"), asked, result])
    assert final.text


def langchain_structured(url: str) -> None:
    """By each method, from a model and from a schema."""
    model = _model(url, max_tokens=200)
    for method in ("json_schema", "function_calling"):
        assert isinstance(model.with_structured_output(City, method=method).invoke(QUESTION), City), method
    schema = {"title": "weather", "description": "d", **PARAMETERS}
    assert set(model.with_structured_output(schema, method="json_schema").invoke(QUESTION)) == {"city", "unit"}


def langchain_responses(url: str) -> None:
    """By the responses API."""
    assert "Paris" in _model(url, max_tokens=30, use_responses_api=True).invoke(QUESTION).text


def langchain_embeddings(url: str) -> None:
    """Without tiktoken, whose tables are not this model's."""
    made = OpenAIEmbeddings(
        model=MODEL, base_url=f"{url}/v1", api_key="none", check_embedding_ctx_length=False, max_retries=0
    )
    vectors = made.embed_documents(["a cat", "a dog"])
    assert len(vectors) == 2
    assert len(vectors[0]) == len(made.embed_query("a cat")) > 10


CHECKS: list[Check] = [value for name, value in list(globals().items()) if name.startswith(("litellm_", "langchain_"))]


def passes(check: Check, url: str) -> bool:
    """Run one and say how it went."""
    try:
        check(url)
    except Exception:  # noqa: BLE001 - it is printed, and fails the run
        print(f"FAILED {check.__name__}\n{traceback.format_exc(limit=-4)}", flush=True)
        return False
    print(f"ok     {check.__name__}", flush=True)
    return True


def main(url: str, *names: str) -> int:
    """All checks, or those with such a name."""
    chosen = [check for check in CHECKS if not names or check.__name__ in names]
    failed = [check.__name__ for check in chosen if not passes(check, url)]
    print(f"{len(chosen) - len(failed)} of {len(chosen)} passed")
    return 1 if failed or not chosen else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
