"""A language model behind any OpenAI-compatible server (vLLM, SGLang, llama.cpp ...), by the client `openai`."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np

from ..data_prep.hits import Cost
from .protocols import Completion, Prompt

T = TypeVar("T")

KEY = "RETRAIL_LM_KEY"
_MOST_ALTERNATIVES = 20

# How the chat templates of the common families write control tokens.
_CONTROL = re.compile(
    r"<(?=[|｜][^<>]{1,60}[|｜]>|/?(?:s|bos|eos|think|tool_call|tool_response|start_of_turn|end_of_turn)>)"
    r"|\[(?=/?INST\])"
)


class LanguageModelError(RuntimeError):
    """A server did not answer; the message names it and the model."""


class ContextOverflow(LanguageModelError):
    """The prompt and its answer do not fit the model's context."""


class AuthError(LanguageModelError):
    """The server refused the key."""


class RateLimited(LanguageModelError):
    """The server kept refusing because of too many requests."""


class ServerError(LanguageModelError):
    """The server failed, could not be reached, or answered something that is no completion."""


class ServedLanguageModel:
    """Chat completions, several requests in flight; the key comes from the environment and is shown nowhere.

    Most servers turn control tokens in a message's text into such, so that a document could end the user's turn. A
    space after their first character prevents that for the forms of the common families, and it cannot for others.
    Retries (429, 5xx, lost connections) are the client's: bounded, with exponential waits.
    """

    def __init__(
        self,
        model: str,
        base_url: str,
        *,
        key_variable: str = KEY,
        concurrency: int = 8,
        timeout: float = 120.0,
        max_retries: int = 5,
    ) -> None:
        """`concurrency`: requests in flight; more is faster until the server refuses. `timeout`: seconds a request."""
        from openai import OpenAI

        self._name, self._url, self._concurrency = model, base_url.rstrip("/"), concurrency
        self._client = OpenAI(
            api_key=os.environ.get(key_variable) or "none", base_url=base_url, timeout=timeout, max_retries=max_retries
        )

    @property
    def description(self) -> str:
        """As `LanguageModel.description`: sampling is off."""
        return f"{self._name} at {self._url} temperature 0"

    def __repr__(self) -> str:
        return f"ServedLanguageModel({self._name!r}, {self._url!r})"

    def generate(
        self, prompts: Sequence[Prompt], *, max_tokens: int, schema: Mapping[str, object] | None = None
    ) -> list[Completion]:
        """As `LanguageModel.generate`.

        Raises:
            LanguageModelError: one of its kinds, once the retries are used up.
        """
        more: dict[str, Any] = {}
        if schema is not None:
            more["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": dict(schema)}}

        def ask(prompt: Prompt) -> Completion:
            answer = self._complete(prompt, max_tokens=max_tokens, **more)
            choice = answer.choices[0]
            return Completion(choice.message.content or "", _cost(answer.usage), choice.finish_reason == "length")

        return self._all(ask, prompts)

    def label_logprobs(self, prompts: Sequence[Prompt], labels: Sequence[str]) -> np.ndarray:
        """As `LanguageModel.label_logprobs`, read from the alternatives of the first token; others are -inf.

        Raises:
            ServerError: the server gives no log-probabilities.
            LanguageModelError: as `generate`.
        """

        def ask(prompt: Prompt) -> list[float]:
            answer = self._complete(prompt, max_tokens=1, logprobs=True, top_logprobs=_MOST_ALTERNATIVES)
            found = answer.choices[0].logprobs
            if found is None or not found.content:
                raise ServerError(f"{self}: no log-probabilities in the answer; judge with a server that gives them")
            first = {one.token: one.logprob for one in found.content[0].top_logprobs}
            return [first.get(label, -np.inf) for label in labels]

        return np.array(self._all(ask, prompts), dtype=float).reshape(len(prompts), len(labels))

    def _all(self, ask: Callable[[Prompt], T], prompts: Sequence[Prompt]) -> list[T]:
        with ThreadPoolExecutor(self._concurrency) as pool:
            return list(pool.map(ask, prompts))

    def _complete(self, prompt: Prompt, **settings: Any) -> Any:
        import openai

        messages: Any = [
            {"role": "system", "content": prompt.system},
            {"role": "user", "content": plain_text(prompt.user)},
        ]
        try:
            answer = self._client.chat.completions.create(
                model=self._name, messages=messages, temperature=0.0, **settings
            )
            if not getattr(answer, "choices", None):
                raise ServerError(f"{self}: an answer without choices")
            return answer
        except (openai.AuthenticationError, openai.PermissionDeniedError) as error:
            raise AuthError(f"{self}: the key was refused; set {KEY}") from error
        except openai.RateLimitError as error:
            raise RateLimited(f"{self}: too many requests, after all retries") from error
        except openai.BadRequestError as error:
            kind = ContextOverflow if "context" in str(error).lower() else ServerError
            raise kind(f"{self}: {error}") from error
        except openai.OpenAIError as error:
            raise ServerError(f"{self}: {error}") from error
        except ValueError as error:  # a body that is no JSON
            raise ServerError(f"{self}: an answer that is no JSON ({error})") from error


def plain_text(text: str) -> str:
    """The text with a space in everything that looks like a control token: `< |im_end|>`."""
    return _CONTROL.sub(lambda match: match.group() + " ", text)


def _cost(usage: Any) -> Cost:
    if usage is None:
        return Cost(requests=1, max_concurrency=1)
    details = getattr(usage, "prompt_tokens_details", None)
    cached = int(getattr(details, "cached_tokens", None) or 0)
    return Cost(
        requests=1,
        prompt_tokens=usage.prompt_tokens - cached,
        reused_tokens=cached,
        generated_tokens=usage.completion_tokens or 0,
        max_concurrency=1,
    )
