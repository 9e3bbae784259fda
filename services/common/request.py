"""Requests and their sampling parameters, as all services understand them."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request's tokens are chosen and when its sequences end.

    temperature 0 is greedy; top_k 0, top_p 1, min_p 0 and repetition_penalty 1 are off. logprobs None is none at
    all, 0 the chosen token's alone; prompt_logprobs: those of the prompt too. The seed is always set: the router draws
    one where the user gave none. grammar: what the text must match, as llguidance reads it; "" is anything. embed: the
    prompt's last hidden state is wanted, and no text.
    """

    max_tokens: int
    seed: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: bool = False
    grammar: str = ""
    embed: bool = False


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """What a router asks for: every prompt n times. Choices are prompt-major: prompt i owns i*n .. i*n + n-1.

    timeout_s: it ends with an error when it has not finished by then, counted from its acceptance; 0 is never. weight:
    its tenant's share of service beside those of others.
    """

    request_id: str
    model: str
    prompts: tuple[tuple[int, ...], ...]
    params: SamplingParams
    n: int = 1
    tenant: str = ""
    priority: int = 0
    traceparent: str = ""
    timeout_s: float = 0.0
    weight: float = 1.0

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.n

    @property
    def num_prompt_tokens(self) -> int:
        """Each prompt counted once, however many choices it has."""
        return sum(map(len, self.prompts))

    @property
    def most_tokens(self) -> int:
        """The most tokens that its sequences can come to hold."""
        return self.n * (self.num_prompt_tokens + len(self.prompts) * self.params.max_tokens)
