"""Tokenisation that keeps data and control apart.

Text from documents, queries and models is *data*: whatever it says, it must never become a control token.
`split_special_tokens=True` of transformers is not enough: it leaves added tokens that are not marked special
(`<think>`, `<tool_call>` of Qwen3) atomic. So data goes through a copy of the tokenizer without added tokens.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_USER_MARK = "@@user-content-goes-here@@"


class SafeTokenizer:
    """A tokenizer with two doors: `data` for text of unknown origin, `control` for our own templates.

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
        self.control_ids = frozenset(int(token["id"]) for token in spec["added_tokens"])
        self.control_tokens = tuple(str(token["content"]) for token in spec["added_tokens"])
        spec["added_tokens"], spec["post_processor"] = [], None
        spec["truncation"] = spec["padding"] = None
        self._plain = Tokenizer.from_str(json.dumps(spec))
        self.fingerprint = _fingerprint(spec, self.control_tokens, tokenizer.chat_template)
        for token in self.control_tokens:
            self._check_plain(self._plain.encode(token, add_special_tokens=False).ids, token)

    def data(self, text: str) -> list[int]:
        """Token ids of text of unknown origin; no control token is ever among them."""
        return list(self._plain.encode(text, add_special_tokens=False).ids)

    def data_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`data` of many texts at once (parallel in the tokenizer's own threads)."""
        return [list(e.ids) for e in self._plain.encode_batch_fast(list(texts), add_special_tokens=False)]

    def control(self, text: str) -> list[int]:
        """Token ids of a template of ours, in which control tokens are meant as such."""
        ids: Any = self.hf(text, add_special_tokens=False).input_ids
        return list(ids)

    def chat_frame(self, system: str) -> tuple[list[int], list[int]]:
        """Token ids before and after the user's words in a chat of one turn, up to the answer's first token.

        Thinking is switched off (an open `<think>` ruins a yes/no answer). A tokenizer without chat template
        gets the plain frame "system, blank line, words, newline".
        """
        if not self.hf.chat_template:
            return self.control(system + "\n\n"), self.control("\n")
        messages = [{"role": "system", "content": system}, {"role": "user", "content": _USER_MARK}]
        rendered = self.hf.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, enable_thinking=False
        )
        if not isinstance(rendered, str) or rendered.count(_USER_MARK) != 1:
            raise ValueError("the chat template does not print the user's message exactly once")
        before, after = rendered.split(_USER_MARK)
        if after.rstrip().endswith("<think>"):
            raise ValueError("the chat template ends in an open <think>, so the next token is no yes or no")
        return self.control(before), self.control(after)

    def single(self, context: str, word: str) -> int:
        """The id of `word` after `context`, asserted to be exactly one token that leaves the context alone."""
        head, whole = self.data(context), self.data(context + word)
        if whole[:-1] != head or len(whole) != len(head) + 1:
            raise ValueError(
                f"{word!r} after {context!r} is {len(whole) - len(head)} tokens, not one; choose other label words"
            )
        return whole[-1]

    def _check_plain(self, ids: Sequence[int], text: str) -> None:
        if self.control_ids.intersection(ids):
            raise ValueError(
                f"this tokenizer turns the plain text {text!r} into a control token even without its added tokens; "
                "it cannot be used safely with documents of unknown origin"
            )


def _fingerprint(spec: dict[str, Any], control_tokens: Sequence[str], chat_template: object) -> str:
    body = json.dumps([spec["model"], spec["pre_tokenizer"], spec["normalizer"], list(control_tokens), chat_template])
    return hashlib.sha256(body.encode()).hexdigest()
