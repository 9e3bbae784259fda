"""Log-probabilities, penalties, bias and min_tokens on the real weights in float32, against transformers' own: each
request alone, and all 24 at once."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList

from services.common.models.resolve import ModelFiles
from services.common.request import SamplingParams
from services.common.text.tokenizer import TextEncoder
from services.worker.core.plan import TokenLogprobs
from services.worker.executor.torch_executor import TorchExecutor
from tests.golden.prompts import LONG
from tests.golden.test_golden import CLOSE, Prompts
from tests.harness import Generated, LocalSystem

pytestmark = pytest.mark.golden
NUM_TOKENS = 8
TOP = 5
TOLERANCE = 1e-3
# Tokens that the model likes: a bias on them changes texts.
LIKED = {28: 2.5, 198: -100.0, 260: -1.5, 281: 4.0, 339: -100.0}


class Frequency(LogitsProcessor):  # type: ignore[misc]
    """OpenAI's formula; transformers has none of its own."""

    def __init__(self, num_prompt: int, presence: float, frequency: float) -> None:
        self._num_prompt, self._presence, self._frequency = num_prompt, presence, frequency

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        counts = torch.bincount(input_ids[0, self._num_prompt :], minlength=scores.shape[1]).float()
        return scores - self._frequency * counts - self._presence * (counts > 0)


@dataclass(frozen=True)
class Case:
    """Parameters of ours, and what transformers' generate is asked for instead."""

    ours: dict[str, Any]
    theirs: dict[str, Any]
    penalties: tuple[float, float] = (0.0, 0.0)
    ends: bool = False  # the end token ends it


CASES = {
    "plain": Case({}, {}),
    "presence": Case({"presence_penalty": 1.5}, {}, (1.5, 0.0)),
    "frequency": Case({"frequency_penalty": 1.2, "presence_penalty": -0.5}, {}, (-0.5, 1.2)),
    "repetition": Case({"repetition_penalty": 1.4}, {"repetition_penalty": 1.4}),
    "bias": Case(
        {"logit_bias": LIKED},
        {"sequence_bias": {(t,): float("-inf") if b == -100 else b for t, b in LIKED.items()}},
    ),
    "min_tokens": Case({"min_tokens": NUM_TOKENS - 2}, {"min_new_tokens": NUM_TOKENS - 2}, ends=True),
}


# Each case has four prompts. Where a text would end at once there is something for min_tokens to hold off.
TEXTS = ["Once upon a", "The capital of France is", "In 2024, the population of 3 cities was", LONG[:500]]
ANSWERED = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n{}"
SAID = [
    ANSWERED.format("What is the capital of France?", "The capital of France is Paris."),
    ANSWERED.format("Say yes.", "Yes."),
    ANSWERED.format("What is 2 + 2?", "2 + 2 = 4."),
    ANSWERED.format("Name a colour.", "Blue"),
]


@pytest.fixture(scope="module")
def prompts(files: ModelFiles) -> Prompts:
    encoder = TextEncoder(files.tokenizer_json)
    return tuple(
        tuple(encoder.encode_raw((SAID if case_of(index).ends else TEXTS)[index // len(CASES)])) for index in range(24)
    )


def case_of(index: int) -> Case:
    return list(CASES.values())[index % len(CASES)]


def params(case: Case) -> SamplingParams:
    return SamplingParams(
        max_tokens=NUM_TOKENS,
        temperature=0.0,
        ignore_eos=not case.ends,
        logprobs=TOP,
        prompt_logprobs=True,
        **case.ours,
    )


@dataclass(frozen=True)
class Reference:
    """logits: before any processor, scores: after all, [tokens, vocabulary]. prompt: of the whole prompt."""

    tokens: list[int]
    logits: torch.Tensor
    scores: torch.Tensor
    prompt: torch.Tensor


@pytest.fixture(scope="module")
def references(transformers_model: Any, files: ModelFiles, prompts: Prompts) -> list[Reference]:
    out = []
    for index, prompt in enumerate(prompts):
        case, ids = case_of(index), torch.tensor([prompt])
        own = [Frequency(len(prompt), *case.penalties)] if any(case.penalties) else []
        result = transformers_model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NUM_TOKENS,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=list(files.eos_token_ids) if case.ends else None,
            output_logits=True,
            output_scores=True,
            return_dict_in_generate=True,
            logits_processor=LogitsProcessorList(own),
            **case.theirs,
        )
        with torch.inference_mode():
            whole = transformers_model(ids).logits[0]
        out.append(
            Reference(
                result.sequences[0, len(prompt) :].tolist(),
                torch.cat(list(result.logits)),
                torch.cat(list(result.scores)),
                whole,
            )
        )
    return out


def compare_logprobs(got: TokenLogprobs, logits: torch.Tensor, token: int) -> None:
    want = torch.log_softmax(logits, dim=-1)
    assert abs(got.chosen - float(want[token])) < TOLERANCE
    assert len(got.top) == TOP
    values = want.topk(TOP).values.tolist()
    for (ours, value), best in zip(got.top, values, strict=True):
        assert abs(value - best) < TOLERANCE
        assert abs(value - float(want[ours])) < TOLERANCE


def compare(got: Generated, scores: list[TokenLogprobs], want: Reference, prompt: tuple[int, ...], what: str) -> int:
    """Returns how many tokens were compared: up to a close call, from which on both may be right."""
    for position, token in enumerate(want.tokens):
        best = want.scores[position].topk(2).values
        if float(best[0] - best[1]) < CLOSE:
            return position
        assert got.tokens[position] == token, f"{what}: token {position}"
        compare_logprobs(got.logprobs[position], want.logits[position], token)
    assert len(got.tokens) == len(want.tokens), f"{what}: ends elsewhere"
    assert len(scores) == len(prompt) - 1
    for position, score in enumerate(scores):
        compare_logprobs(score, want.prompt[position], prompt[position + 1])
    return len(want.tokens)


def run(executor: TorchExecutor, files: ModelFiles, prompts: Prompts, which: range) -> dict[int, Any]:
    """Generated and the prompt's scores, of requests that run together."""
    system = LocalSystem([executor], eos=files.eos_token_ids, token_budget=64)
    scores: dict[int, list[TokenLogprobs]] = {}
    for index in which:
        system.submit(str(index), prompts[index], params(case_of(index)))
    while system.step():
        for worker in system.workers.values():
            for sequence in worker.batch.sequences.values():
                scores[int(sequence.request_id)] = sequence.scores
    generated = system.run()
    return {index: (generated[str(index)], scores[index]) for index in which}


@pytest.mark.parametrize("together", [False, True], ids=["alone", "24 at once"])
def test_equals_transformers(
    executor: TorchExecutor,
    files: ModelFiles,
    prompts: Prompts,
    references: list[Reference],
    together: bool,
) -> None:
    groups = [range(24)] if together else [range(index, index + 1) for index in range(24)]
    results: dict[int, Any] = {}
    for group in groups:
        results |= run(executor, files, prompts, group)
    compared = sum(
        compare(*results[index], references[index], prompts[index], f"prompt {index}") for index in range(24)
    )
    assert compared > 24 * NUM_TOKENS * 0.85, "close calls are rare"


def test_the_parameters_change_something(references: list[Reference]) -> None:
    """Else the comparison would show nothing."""
    changed = {
        list(CASES)[index % len(CASES)]
        for index, want in enumerate(references)
        if want.logits.argmax(dim=-1).tolist() != want.tokens
    }
    assert changed >= {"presence", "frequency", "repetition", "bias"}, changed
    held = [want for index, want in enumerate(references) if case_of(index).ends]
    assert any(2 in want.logits[: NUM_TOKENS - 2].argmax(dim=-1).tolist() for want in held), "an end was held off"
