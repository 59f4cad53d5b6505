"""The state encoder: a causal language model, the state of one end token, scaled to length 1.

Shapes: S states, N documents, B texts of a batch, D dimensions.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch

from ...data_prep.hits import Cost
from ..backbone import load_backbone, pick_device
from ..config import EncoderConfig, ModelConfig
from ..protocols import EncoderSession, State, StateVectors
from ..tokenizer import SafeTokenizer
from .batching import check_vectors, distinct, encode_distinct, encode_texts, scaled
from .contract import weights_fingerprint
from .end_token import EndToken, find_end_token
from .fitting import FittedState, StateFitter
from .pooling import decoder_of, finish, hidden_states, pad, pool
from .prompts import RENDERER_VERSION, PromptConfig
from .sessions import CachedSession, PlainSession, prefix_session

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# Documents whose token ids are in memory together.


class LocalEncoder:
    """A `StateEncoder` on this machine.

    A text has the same vector in any batch, with padding on either side or none, to 1e-5 in every dimension in float32
    (2e-2 in bfloat16), as sums are taken in another order; with `invariant` to the bit. Texts with the same tokens are
    encoded once a call, so that they tie exactly.

    Args:
        backbone: a causal LM, or its decoder; LoRA may be on it. In a training loop its mode is restored after a call.
        tokenizer: as transformers loads it.
        config, prompts: settings.
        source: where the model came from, for the contract.

    Raises:
        ValueError: no end token, or a budget that holds nothing beside it.
    """

    def __init__(
        self,
        backbone: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        config: EncoderConfig,
        prompts: PromptConfig,
        *,
        source: str = "",
    ) -> None:
        self.backbone, self.config, self.prompts, self.source = backbone, config, prompts, source
        self.tokenizer = SafeTokenizer(tokenizer)
        settings: Any = self._decoder.config.get_text_config()
        self.end: EndToken = find_end_token(self.tokenizer, config.end_token, settings.eos_token_id)
        self.pad_id = int(tokenizer.pad_token_id or 0)  # any id would do
        context = getattr(settings, "max_position_embeddings", None)
        self.max_state_tokens = min(config.max_state_tokens, context or config.max_state_tokens)
        self.max_document_tokens = min(config.max_document_tokens, context or config.max_document_tokens)
        self._hidden = int(settings.hidden_size)
        if config.dimensions is not None and config.dimensions > self._hidden:
            raise ValueError(f"encoder.dimensions={config.dimensions}, but the model has {self._hidden}")
        frame = len(self.end.begin) + 1
        for key in ("max_state_tokens", "max_document_tokens"):
            if getattr(self, key) <= frame:
                raise ValueError(f"encoder.{key}={getattr(config, key)} holds no text beside {frame} tokens of ours")
        short = self.max_state_tokens < config.max_state_tokens
        capped = f" (cut to {context}, the context of the model)" if short else ""
        setting = f"encoder.max_state_tokens={config.max_state_tokens}{capped}"
        self._room = self.max_state_tokens - frame, config.query_cut, setting
        self.fitter = self.fitter_of(prompts)

    @classmethod
    def open(cls, model: ModelConfig, config: EncoderConfig, prompts: PromptConfig, *, device: str = "auto") -> Self:
        """Load a model and encode with it. Raises as `load_backbone` and the class."""
        backbone, tokenizer = load_backbone(model, pick_device(device), lm_head=False)
        source = model.path if model.revision is None else f"{model.path}@{model.revision}"
        return cls(backbone, tokenizer, config, prompts, source=source)

    @property
    def dim(self) -> int:
        """D."""
        return self.config.dimensions or self._hidden

    @property
    def device(self) -> torch.device:
        """Where the embedding lives."""
        embedding: Any = self.backbone.get_input_embeddings()
        return embedding.weight.device  # type: ignore[no-any-return]

    @cached_property
    def causal(self) -> bool:
        """Whether a token sees nothing that follows it: tried out, as configurations name it in many ways."""
        ids = [self.end.id, self.pad_id, (self.end.id + 1) % 100]
        with self.reading():
            first, second = (
                self._decoder(
                    input_ids=torch.tensor([[*ids, last]], device=self.device), use_cache=False
                ).last_hidden_state[0, :3]
                for last in (1, 2)
            )
        return bool(torch.allclose(first.float(), second.float(), rtol=1e-5, atol=1e-6))

    @property
    def contract(self) -> Mapping[str, object]:
        """See `StateEncoder`. The weights are looked at anew each time, because training changes them."""
        decoder = self._decoder
        return {
            "format": 1,
            "kind": "causal_lm",
            "source": self.source,
            "dtype": str(decoder.dtype).removeprefix("torch."),
            "dim": self.dim,
            "pooling": self.config.pooling,
            "normalise": self.config.normalise,
            "begin_tokens": list(self.end.begin),
            "end_token": {"id": self.end.id, "text": self.end.text},
            "tokenizer": self.tokenizer.fingerprint,
            "max_document_tokens": self.max_document_tokens,
            "weights": weights_fingerprint(decoder.named_parameters()),
            "max_state_tokens": self.max_state_tokens,
            "query_cut": self.config.query_cut,
            "renderer": RENDERER_VERSION,
            "prompts_sha256": self.prompts.sha256,
            "prompts": self.prompts.as_dict(),
        }

    def fitter_of(self, prompts: PromptConfig) -> StateFitter:
        """What renders states in other words, within the same budget (training on paraphrases)."""
        return StateFitter(self.tokenizer, prompts, *self._room)

    def framed(self, ids: Sequence[int]) -> list[int]:
        """The ids of a text between begin tokens, where the tokenizer has them, and the one end token."""
        return [*self.end.begin, *ids, self.end.id]

    def tokens(self, state: State) -> list[int]:
        """The ids that are encoded: begin tokens where the tokenizer has them, the state, one end token."""
        return self.prepare(state).ids

    def prepare(self, state: State) -> FittedState:
        """As `tokens`, with the notes on what was cut. Raises ValueError as `StateFitter.fit`."""
        fitted = self.fitter.fit(state)
        return FittedState(self.framed(fitted.ids), fitted.notes)

    def document_tokens(self, text: str) -> list[int]:
        """The ids of a document, cut to `max_document_tokens`: begin tokens, raw text, one end token."""
        room = self.max_document_tokens - len(self.end.begin) - 1
        return self.framed(self.tokenizer.data(text)[:room])

    def encode(self, states: Sequence[State]) -> StateVectors:
        """One vector a state; a state that stands twice is encoded once, and costs nothing the second time.

        Raises:
            ValueError: as `prepare`, or a vector that is not finite; names the state.
        """
        started = time.perf_counter()
        fitted = [self.prepare(state) for state in states]
        vectors_SD, costs = self.encode_tokens([f.ids for f in fitted])
        check_vectors(vectors_SD, lambda n: f"state {n} ({states[n].role} of the query {states[n].query[:80]!r})")
        costs = scaled(costs, time.perf_counter() - started)
        return StateVectors(vectors_SD, tuple(costs), tuple(f.notes for f in fitted))

    def encode_documents(self, texts: Sequence[str], *, progress: bool = False) -> np.ndarray:
        """Unit vectors, float32 (N, D), in the order given; no instruction, and the same vector for equal documents.

        Raises:
            ValueError: a vector that is not finite; names the document by its position and first words.
        """
        if isinstance(texts, str):
            raise TypeError("encode_documents() takes a sequence of texts; put a single text in a list")
        same = distinct(texts)
        texts_N = [texts[n] for n in same.first]
        vectors_ND = encode_texts(texts_N, self.dim, self.document_tokens, self.encode_tokens, progress=progress)
        check_vectors(vectors_ND, lambda n: f"document {same.first[n]} ({texts_N[n][:80]!r})")
        return vectors_ND[same.inverse]

    def encode_tokens(
        self, token_lists: Sequence[list[int]], done: Callable[[int], object] | None = None
    ) -> tuple[np.ndarray, list[Cost]]:
        """Vectors, float32 (N, D), and cost of complete id lists, as `encode_distinct`."""
        rows = 1 if self.config.invariant else None
        with self.reading():
            return encode_distinct(
                token_lists, self._forward, self.dim, max_tokens=self.config.max_batch_tokens, max_rows=rows, done=done
            )

    def session(self) -> EncoderSession:
        """A session that reuses keys and values of common beginnings, where that gives the same vectors.

        It does not with `invariant`, another pooling than `last`, or attention in both directions: then each state is
        encoded whole.
        """
        if self.config.invariant or self.config.pooling != "last" or not self.config.normalise or not self.causal:
            return PlainSession(self)
        session = prefix_session(self.backbone)
        return PlainSession(self) if session is None else CachedSession(self, session)

    @property
    def _decoder(self) -> Any:
        return decoder_of(self.backbone)

    def _forward(self, token_lists: Sequence[Sequence[int]]) -> np.ndarray:
        ids_BT, lengths_B = pad(token_lists, self.pad_id, self.config.padding)
        ids_BT, lengths_B = ids_BT.to(self.device), lengths_B.to(self.device)
        even = all(len(ids) == len(token_lists[0]) for ids in token_lists)
        side = "right" if even else self.config.padding
        hidden_BTH = hidden_states(self._decoder, ids_BT, lengths_B, side, self.causal)
        pooled_BH = pool(hidden_BTH, lengths_B, side, self.config.pooling)
        return finish(pooled_BH, self.config.dimensions, self.config.normalise).cpu().numpy()

    @contextmanager
    def reading(self) -> Iterator[None]:
        """No gradients and no dropout; a model in training goes on training afterwards."""
        training = self.backbone.training
        if training:
            self.backbone.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            if training:
                self.backbone.train()
