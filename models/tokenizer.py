"""Tokenisation that keeps data and control apart.

Text from documents, queries and models is *data*: whatever it says, it must never become a control token.
`split_special_tokens=True` of transformers is not enough: it leaves added tokens that are not marked special
(`<think>`, `<tool_call>` of Qwen3) atomic. So data goes through a copy of the tokenizer without added tokens.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_USER_MARK = "@@user-content-goes-here@@"
_OPEN_THOUGHT = re.compile(r"<[^<>/]*think[^<>/]*>\s*\Z", re.IGNORECASE)


class SafeTokenizer:
    """A tokenizer with two doors: `data` for text of unknown origin, `control` for our own templates.

    `fingerprint` changes with everything that decides which ids a text becomes, the chat template included.

    Raises:
        ValueError: the tokenizer has no fast backend, or its model itself can produce control tokens from text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Build the data-only copy and check it on every control token of the vocabulary."""
        from tokenizers import Tokenizer

        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ValueError(f"{type(tokenizer).__name__} has no fast backend; retrail needs a tokenizer.json")
        self.hf = tokenizer
        spec = json.loads(backend.to_str())
        control = {int(token["id"]): str(token["content"]) for token in spec["added_tokens"]}
        self.control_ids = frozenset(control)
        spec["added_tokens"], spec["post_processor"] = [], None
        spec["truncation"] = spec["padding"] = None
        self._plain = Tokenizer.from_str(json.dumps(spec))
        self.fingerprint = _fingerprint(spec, control, tokenizer.chat_template)
        for token in control.values():
            self._check_plain(token)

    def data(self, text: str) -> list[int]:
        """Token ids of text of unknown origin; no control token is ever among them."""
        return list(self._plain.encode(text, add_special_tokens=False).ids)

    def control(self, text: str) -> list[int]:
        """Token ids of a template of ours, in which control tokens are meant as such."""
        ids: Any = self.hf(text, add_special_tokens=False).input_ids
        return list(ids)

    def chat_frame(self, system: str) -> tuple[list[int], list[int]]:
        """Token ids before and after the user's words in a chat of one turn, up to the answer's first token.

        Thinking is switched off (an open `<think>` ruins a yes/no answer). A tokenizer without chat template
        gets the plain frame "system, blank line, words, newline"; a template that knows no system role gets the
        system's words at the beginning of the user's turn.

        Raises:
            ValueError: the template drops or repeats the user's words, or ends in an open <think>.
        """
        if not self.hf.chat_template:
            return self.control(system + "\n\n"), self.control("\n")
        rendered = self._chat(system)
        if rendered.count(_USER_MARK) != 1:
            raise ValueError("the chat template does not print the user's message exactly once")
        before, after = rendered.split(_USER_MARK)
        if _OPEN_THOUGHT.search(after):
            raise ValueError(
                "the chat template ends in an open <think>, even with enable_thinking=False, so the next token is no "
                "answer; use a model that can answer without thinking, or change its chat template"
            )
        return self.control(before), self.control(after)

    def single(self, context: str, word: str) -> int:
        """The id of `word` after `context`, asserted to be exactly one token that leaves the context alone.

        Raises:
            ValueError: it is not.
        """
        head, whole = self.data(context), self.data(context + word)
        if whole[: len(head)] != head or len(whole) != len(head) + 1:
            raise ValueError(
                f"this tokenizer writes {word!r} after {context!r} as {self._pieces(whole, len(head))}, not as one "
                "token of its own, so there is no single logit to read; set decision.head=pointer, or give the model a "
                "prompt in models/prompts.py whose yes and no are single tokens"
            )
        return whole[-1]

    def _chat(self, system: str) -> str:
        from jinja2.exceptions import TemplateError

        user = {"role": "user", "content": _USER_MARK}
        try:
            return self._render([{"role": "system", "content": system}, user])
        except TemplateError:  # how a template says that it has no system role
            return self._render([{"role": "user", "content": f"{system}\n\n{_USER_MARK}"}])

    def _render(self, messages: list[dict[str, str]]) -> str:
        return str(
            self.hf.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, enable_thinking=False)
        )

    def _pieces(self, whole: Sequence[int], known: int) -> str:
        # The context may have merged with the word: then only the whole tells what happened.
        start = known if len(whole) > known else 0
        return " + ".join(repr(self.hf.decode([token])) for token in whole[start:])

    def _check_plain(self, token: str) -> None:
        if self.control_ids.intersection(self.data(token)):
            raise ValueError(
                f"this tokenizer turns the plain text {token!r} into a control token even without its added tokens; "
                "it cannot be used safely with documents of unknown origin"
            )


def _fingerprint(spec: dict[str, Any], control: dict[int, str], chat_template: object) -> str:
    body = [spec["model"], spec["pre_tokenizer"], spec["normalizer"], sorted(control.items()), chat_template]
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
