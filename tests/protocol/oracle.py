"""What a journal may hold, said independently of who wrote it: a pure function of prompt, prefix and salt."""

from collections.abc import Iterable
from functools import cache

from services.common.request import GenerateRequest, SamplingParams
from services.worker.core.plan import BatchRow, SequenceState
from services.worker.executor.fake import FakeExecutor

BLOCK_SIZE = 4
# Large, so that two salts hardly ever agree on a token by chance.
VOCABULARY = 50_000
EOS = frozenset(range(256, VOCABULARY, 16))
STOP = ("a",)
LETTERS = "abcdefghijklm"


def decode(token: int) -> str:
    return LETTERS[token % len(LETTERS)]


@cache
def successor(tokens: tuple[int, ...], choice: int, seed: int, salt: int) -> int:
    """The token that a worker with this salt gives after these, computed alone and from the start."""
    blocks = -(-len(tokens) // BLOCK_SIZE)
    params = SamplingParams(max_tokens=1, seed=seed)
    state = SequenceState(1, "alone", choice, 0, 1, 1, params, len(tokens), list(tokens))
    state.block_table = list(range(blocks))
    executor = FakeExecutor(blocks, BLOCK_SIZE, VOCABULARY, salt=salt)
    token = executor.execute([BatchRow(state, 0, len(tokens))], [[]])[0].token_id
    assert token is not None
    return token


def is_valid(request: GenerateRequest, choice: int, output: tuple[int, ...], salts: Iterable[int]) -> bool:
    """True if the last token of this output is what some worker gives after those before it."""
    tokens = request.prompts[choice // request.n] + output[:-1]
    return any(successor(tokens, choice, request.params.seed, salt) == output[-1] for salt in salts)


def end_of(request: GenerateRequest, output: tuple[int, ...]) -> str | None:
    """How a choice with this output has ended by the request's own rules; None if it goes on."""
    if output and (output[-1] in EOS or (request.params.stop and decode(output[-1]) in request.params.stop)):
        return "stop"
    return "length" if len(output) >= request.params.max_tokens else None
