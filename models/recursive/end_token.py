"""The one token that ends every text, whose state is the vector."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..tokenizer import SafeTokenizer


@dataclass(frozen=True, slots=True)
class EndToken:
    """The end token, where it is known from (`tokenizer`, `model` or `setting`), and what the tokenizer begins with."""

    id: int
    text: str
    origin: str
    begin: tuple[int, ...] = ()


def find_end_token(tokenizer: SafeTokenizer, setting: str, model_end: int | list[int] | None) -> EndToken:
    """The end token of `encoder.end_token`.

    `auto` takes what the tokenizer's post-processor appends to a text (Qwen3-Embedding: <|endoftext|>, which is not its
    end-of-sequence token, and is its padding token), else the end-of-sequence token of the model's configuration, else
    that of the tokenizer.

    Args:
        tokenizer: the model's.
        setting: `auto`, or the text of a control token.
        model_end: `eos_token_id` of the model's configuration; of several the first.

    Raises:
        ValueError: there is none, there are several, or it is a word that texts may contain.
    """
    begin, after = _around(tokenizer)
    if setting != "auto":
        ids = tokenizer.control(setting)
        if len(ids) != 1:
            raise ValueError(f"encoder.end_token={setting!r} is {len(ids)} tokens of this tokenizer; name a single one")
        return _checked(tokenizer, EndToken(ids[0], setting, "setting", begin))
    if len(after) > 1:
        names = tokenizer.hf.convert_ids_to_tokens(after)
        raise ValueError(f"this tokenizer ends texts with {names}; name one of them in encoder.end_token")
    if after:
        return _checked(tokenizer, EndToken(after[0], _name(tokenizer, after[0]), "tokenizer", begin))
    if isinstance(model_end, list):
        model_end = model_end[0] if model_end else None
    found, origin = (model_end, "model") if model_end is not None else (tokenizer.hf.eos_token_id, "tokenizer")
    if found is None:
        raise ValueError(
            "this tokenizer appends no end token, and neither it nor the model names an end-of-sequence token: name a "
            "control token in encoder.end_token"
        )
    end: Any = found
    return _checked(tokenizer, EndToken(int(end), _name(tokenizer, int(end)), origin, begin))


def _around(tokenizer: SafeTokenizer) -> tuple[tuple[int, ...], list[int]]:
    """What the post-processor puts before and after a text."""
    text = "a"
    plain = tokenizer.control(text)
    whole: Any = tokenizer.hf(text).input_ids
    for start in range(len(whole) - len(plain) + 1):
        if whole[start : start + len(plain)] == plain:
            return tuple(whole[:start]), list(whole[start + len(plain) :])
    raise ValueError(f"this tokenizer writes {text!r} as {plain} alone and as {whole} with what it adds, which differ")


def _name(tokenizer: SafeTokenizer, token: int) -> str:
    return str(tokenizer.hf.convert_ids_to_tokens(token))


def _checked(tokenizer: SafeTokenizer, end: EndToken) -> EndToken:
    if end.id not in tokenizer.control_ids:
        raise ValueError(
            f"the end token {end.text!r} ({end.origin}) is a word that texts may contain, so that a text could have "
            "several; name a control token in encoder.end_token"
        )
    return end
