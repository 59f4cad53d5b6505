"""Any sentence-transformers model as a state encoder.

Shapes: N texts, B texts of a batch, D dimensions.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from ...data_prep.hits import Cost
from ..config import check_positive
from ..protocols import EncoderSession, State, StateVectors
from ..sentence import open_encoder
from ..tokenizer import SafeTokenizer
from .batching import check_vectors, distinct, encode_distinct, encode_texts, scaled
from .contract import weights_fingerprint
from .end_token import EndToken, find_end_token
from .fitting import StateFitter
from .pooling import finish, pad, real_positions
from .prompts import RENDERER_VERSION, PromptConfig, preset, render
from .sessions import PlainSession


class SentenceEncoder:
    """A `StateEncoder` whose vectors are those of `SentenceTransformer.encode`, made with less padding.

    Texts are sorted by tokens (sentence-transformers: by characters), and batches hold a number of tokens, not texts.
    Text stays data: a "[SEP]" in a document, of which sentence-transformers makes a control token, is plain text. What
    the fast way does not know (chat templates, other modalities, tokenizers that write control tokens from text ...)
    goes through `SentenceTransformer.encode` itself: `fast` says which way is taken.

    Args:
        model: `package:minilm`, a folder, a Hub id, or a loaded SentenceTransformer.
        prompts: how states are written (None: `plain`, after the model's own `query` prompt where it has one).
        device: as in torch; None lets sentence-transformers choose.
        max_state_tokens, max_document_tokens: tokens of a text (None: what the model was made for, which caps both).
            Longer states give up their oldest observations, with a note; longer documents are cut.
        max_batch_tokens: tokens of a forward pass, padding included; on a GPU more is faster until memory ends (None:
            65,536 there; 4,096 on a CPU, where larger batches are no faster).

    Raises:
        ImportError, ValueError: as `open_encoder`.
    """

    def __init__(
        self,
        model: Any,
        prompts: PromptConfig | None = None,
        *,
        device: str | None = None,
        max_state_tokens: int | None = None,
        max_document_tokens: int | None = None,
        max_batch_tokens: int | None = None,
    ) -> None:
        for key, value in (("state", max_state_tokens), ("document", max_document_tokens), ("batch", max_batch_tokens)):
            check_positive(f"encoder.max_{key}_tokens", value)
        self.source = model if isinstance(model, str) else ""
        self.model = open_encoder(model, device) if isinstance(model, str) else model
        self.model.eval()
        self.max_batch_tokens = max_batch_tokens or (4096 if self.model.device.type == "cpu" else 65_536)
        own = {key: text or "" for key, text in (self.model.prompts or {}).items()}
        self.document_prompt: str = own.get("document", "")
        self.prompts = _plain(own.get("query", "")) if prompts is None else prompts
        limit = self.model.max_seq_length
        self.max_state_tokens = _least(max_state_tokens, limit)
        self.max_document_tokens = _least(max_document_tokens, limit)
        self._tokenizer, self._end = _fast_way(self.model)
        self.fitter = self._fitter()

    @property
    def fast(self) -> bool:
        """Whether texts are tokenised and batched here, not by sentence-transformers."""
        return self._end is not None

    @property
    def dim(self) -> int:
        """D."""
        return int(self.model.get_embedding_dimension())

    @property
    def contract(self) -> Mapping[str, object]:
        """See `StateEncoder`."""
        end = self._end
        return {
            "format": 1,
            "kind": "sentence_transformers",
            "source": self.source,
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "dim": self.dim,
            "modules": [_described(module) for module in self.model],
            "normalise": True,
            "begin_tokens": None if end is None else list(end.begin),
            "end_token": None if end is None else {"id": end.id, "text": end.text},
            "tokenizer": getattr(self._tokenizer, "fingerprint", None),
            "max_document_tokens": self.max_document_tokens,
            "document_prompt": self.document_prompt,
            "weights": weights_fingerprint(self.model.named_parameters()),
            "max_state_tokens": self.max_state_tokens,
            "renderer": RENDERER_VERSION,
            "prompts_sha256": self.prompts.sha256,
            "prompts": self.prompts.as_dict(),
        }

    def tokens(self, state: State) -> list[int]:
        """The ids that are encoded.

        Raises:
            ValueError: sentence-transformers tokenises for this model.
        """
        if self._end is None:
            raise ValueError(f"{self.source or 'this model'} is tokenised by sentence-transformers itself")
        assert self.fitter is not None
        return self._framed(self.fitter.fit(state).ids)

    def encode(self, states: Sequence[State]) -> StateVectors:
        """One vector a state.

        Raises:
            ValueError: a state that cannot be written or fitted, or a vector that is not finite.
        """
        started = time.perf_counter()
        if self._end is not None:
            assert self.fitter is not None
            fitted = [self.fitter.fit(state) for state in states]
            notes = [f.notes for f in fitted]
            vectors_SD, costs = self._encode_tokens([self._framed(f.ids) for f in fitted])
        else:
            texts, notes, costs = self._texts(states)
            vectors_SD = self._encode_texts(texts)
        check_vectors(vectors_SD, lambda n: f"state {n} ({states[n].role} of the query {states[n].query[:80]!r})")
        return StateVectors(vectors_SD, tuple(scaled(costs, time.perf_counter() - started)), tuple(notes))

    def encode_documents(self, texts: Sequence[str], *, progress: bool = False) -> np.ndarray:
        """Unit vectors, float32 (N, D), in the order given, after the model's `document` prompt where it has one.

        Raises:
            ValueError: a vector that is not finite; names the document by its position and first words.
        """
        if isinstance(texts, str):
            raise TypeError("encode_documents() takes a sequence of texts; put a single text in a list")
        same = distinct(texts)
        texts_N = [texts[n] for n in same.first]
        if self.fast:
            vectors_ND = encode_texts(texts_N, self.dim, self._document_tokens, self._encode_tokens, progress=progress)
        else:
            vectors_ND = self._encode_texts([self.document_prompt + text for text in texts_N], progress)
        check_vectors(vectors_ND, lambda n: f"document {same.first[n]} ({texts_N[n][:80]!r})")
        return vectors_ND[same.inverse]

    def session(self) -> EncoderSession:
        """A session that remembers nothing."""
        return PlainSession(self)

    def _fitter(self) -> StateFitter | None:
        tokenizer, limit = self._tokenizer, self.max_state_tokens
        if tokenizer is None:
            return None
        room = 10**9 if limit is None else limit - self._frame_tokens()
        if room < 1:
            raise ValueError(f"encoder.max_state_tokens={limit} holds no text beside the tokens of the model's own")
        return StateFitter(tokenizer, self.prompts, room, "end", f"encoder.max_state_tokens={limit}")

    def _frame_tokens(self) -> int:
        if self._end is not None:
            return len(self._end.begin) + 1
        assert self._tokenizer is not None
        return int(self._tokenizer.hf.num_special_tokens_to_add(pair=False))

    def _framed(self, ids: Sequence[int]) -> list[int]:
        assert self._end is not None
        return [*self._end.begin, *ids, self._end.id]

    def _document_tokens(self, text: str) -> list[int]:
        assert self._tokenizer is not None
        room = None if self.max_document_tokens is None else max(0, self.max_document_tokens - self._frame_tokens())
        return self._framed(self._tokenizer.data(self.document_prompt + text)[:room])

    def _encode_tokens(
        self, token_lists: Sequence[list[int]], done: Callable[[int], object] | None = None
    ) -> tuple[np.ndarray, list[Cost]]:
        """As `encode_distinct`."""
        with torch.no_grad():
            return encode_distinct(token_lists, self._forward, self.dim, max_tokens=self.max_batch_tokens, done=done)

    def _forward(self, token_lists: list[list[int]]) -> np.ndarray:
        assert self._tokenizer is not None
        hf, device = self._tokenizer.hf, self.model.device
        ids_BT, lengths_B = pad(token_lists, int(hf.pad_token_id or 0), hf.padding_side)
        mask_BT = real_positions(lengths_B, ids_BT.shape[1], hf.padding_side).long()
        features: dict[str, Any] = {"input_ids": ids_BT.to(device), "attention_mask": mask_BT.to(device)}
        if "token_type_ids" in hf.model_input_names:
            features["token_type_ids"] = torch.zeros_like(features["input_ids"])
        pooled_BD = self.model({**features, "modality": "text"})["sentence_embedding"]
        return finish(pooled_BD, self.model.truncate_dim).cpu().numpy()

    def _texts(self, states: Sequence[State]) -> tuple[list[str], list[tuple[str, ...]], list[Cost]]:
        """Texts of states for sentence-transformers, notes, and costs (no tokens where none can be counted)."""
        even = Cost(seconds=1.0)
        if self.fitter is None:
            texts = [render(self.prompts, state).text for state in states]
            return texts, [() for _ in states], [even for _ in states]
        fitted = [self.fitter.fit(state) for state in states]
        decode = self.fitter.tokenizer.hf.decode
        # What was not cut is given as it is: decoding would lose, for instance, upper case.
        pairs = zip(fitted, states, strict=True)
        texts = [decode(f.ids) if f.notes else render(self.prompts, state).text for f, state in pairs]
        return texts, [f.notes for f in fitted], [replace(even, prompt_tokens=len(f.ids)) for f in fitted]

    def _encode_texts(self, texts: Sequence[str], progress: bool = False) -> np.ndarray:
        if not texts:
            return np.zeros((0, self.dim), np.float32)
        vectors_ND = self.model.encode(
            list(texts), prompt="", normalize_embeddings=True, show_progress_bar=progress, convert_to_numpy=True
        )
        return np.ascontiguousarray(vectors_ND, dtype=np.float32)


def _plain(query_prompt: str) -> PromptConfig:
    head = query_prompt.replace("{", "{{").replace("}", "}}") + "{query}"
    return replace(preset("plain"), head=head)


def _least(*limits: int | None) -> int | None:
    return min((limit for limit in limits if limit is not None), default=None)


def _described(module: Any) -> dict[str, object]:
    settings: dict[str, Any] = getattr(module, "get_config_dict", dict)()
    return {"type": type(module).__name__, **{key: str(value) for key, value in settings.items()}}


class _Tokenizer:
    """A tokenizer of transformers as it is, where sentence-transformers has the last word."""

    control_ids: frozenset[int] = frozenset()

    def __init__(self, hf: Any) -> None:
        self.hf = hf

    def data(self, text: str) -> list[int]:
        """Token ids, as sentence-transformers makes them."""
        return list(self.hf(text, add_special_tokens=False).input_ids)


def _fast_way(model: Any) -> tuple[Any, EndToken | None]:
    """The tokenizer (None: none to count with), and the end token (None: texts cannot be tokenised here)."""
    from sentence_transformers.sentence_transformer.modules import Transformer
    from transformers import PreTrainedTokenizerBase

    first = model[0]
    hf = getattr(first, "tokenizer", None)
    if not isinstance(hf, PreTrainedTokenizerBase):
        return None, None
    plain = (
        type(first) is Transformer
        and set(first.modality_config) == {"text"}
        and not first.do_lower_case
        and not first.can_flatten_inputs
        and not first.processing_kwargs
        and first.document_length is None
        and all(getattr(module, "include_prompt", True) for module in model)
    )
    if plain:
        try:
            safe = SafeTokenizer(hf)
            return safe, find_end_token(safe, "auto", None)
        except ValueError:
            pass
    return _Tokenizer(hf), None
