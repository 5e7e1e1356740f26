"""Why the core refuses a request. Each carries the numbers that its message names."""

from __future__ import annotations


class RequestRefused(ValueError):  # noqa: N818 (a refusal is an answer, not a fault)
    """Base of what `add_request` raises; nothing was added."""


class RequestTooLong(RequestRefused):
    """The prompt leaves no room for one more token in the context."""

    def __init__(self, num_prompt_tokens: int, max_model_len: int, num_pool_tokens: int) -> None:
        self.num_prompt_tokens = num_prompt_tokens
        self.max_model_len = max_model_len
        self.num_pool_tokens = num_pool_tokens
        super().__init__(
            f"the prompt has {num_prompt_tokens} tokens, but the context holds {max_model_len} with the answer "
            f"(KV pool: {num_pool_tokens} tokens); shorten the prompt"
        )


class QueueFull(RequestRefused):
    """As many requests wait as may."""

    def __init__(self, num_waiting: int, limit: int) -> None:
        self.num_waiting = num_waiting
        self.limit = limit
        super().__init__(f"{num_waiting} requests are waiting and the limit is {limit}; try again later")


class SloMiss(RequestRefused):
    """Its first token is predicted for later than it is due, and misses are to be refused.

    `predicted`, `slo`: seconds after the request's arrival. `retry_after`: seconds until the same would be let in if
    nothing else arrived.
    """

    def __init__(self, predicted: float, slo: float, retry_after: float) -> None:
        self.predicted = predicted
        self.slo = slo
        self.retry_after = retry_after
        super().__init__(
            f"the first token is predicted after {predicted * 1000:,.0f} ms, but is due after {slo * 1000:,.0f} ms; "
            f"try again in {retry_after:.1f} s, or ask for a later one"
        )


class DuplicateRequest(RequestRefused):
    """The id belongs to a request that is still alive."""

    def __init__(self, request_id: str) -> None:
        super().__init__(f"request id {request_id!r} is in use; choose another")


class EmptyPrompt(RequestRefused):
    """There is no token to compute."""

    def __init__(self) -> None:
        super().__init__("the prompt has no tokens; give at least one")
