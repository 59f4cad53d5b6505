"""Language models behind one interface: a local chat model here, a server in `lm_server.py`, a cache in `lm_cache.py`.

Shapes: P prompts, L labels, B rows of a batch, T longest row, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ..data_prep.hits import Cost
from .config import ModelConfig
from .protocols import Completion, LanguageModel, Prompt
from .tokenizer import SafeTokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_SERVER = "server:"


def open_language_model(name: str, *, device: str = "auto", cache: str | None = None) -> LanguageModel:
    """The language model of that name, behind a disk cache where `cache` names its file.

    name: `server:MODEL@http://host:port/v1` for an OpenAI-compatible server (its key in RETRAIL_LM_KEY), else what
        `ModelConfig.path` takes: a folder, a Hub id or `package:smollm2`.

    Raises:
        ValueError: a server without a model or an address.
    """
    model: LanguageModel
    if name.startswith(_SERVER):
        from .lm_server import ServedLanguageModel

        served, at, address = name.removeprefix(_SERVER).partition("@")
        if not (served and at and address.startswith(("http://", "https://"))):
            raise ValueError(f"{name!r} names no server; write server:MODEL@http://HOST:PORT/v1")
        model = ServedLanguageModel(served, address)
    else:
        from .backbone import load_backbone, pick_device

        model = LocalLanguageModel(*load_backbone(ModelConfig(path=name), pick_device(device)), name=name)
    if cache is None:
        return model
    from .lm_cache import CachedLanguageModel

    return CachedLanguageModel(model, cache)


class LocalLanguageModel:
    """A chat model on this machine; greedy, so that the same prompt has the same answer.

    The words of a prompt's user are data: no control token comes of them. Thinking is off.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        name: str = "local",
        max_batch_tokens: int = 16_384,
    ) -> None:
        """`max_batch_tokens`: padded tokens of one forward pass; more is faster on a GPU until memory ends."""
        self._model: Any = model.eval()
        self._tokenizer = SafeTokenizer(tokenizer)
        self._max_batch_tokens = max_batch_tokens
        self._context = int(getattr(model.config.get_text_config(), "max_position_embeddings", 1 << 30))
        self._name = name

    @property
    def description(self) -> str:
        """As `LanguageModel.description`."""
        return f"{self._name} {self._tokenizer.fingerprint[:16]} {self._model.dtype} greedy"

    def generate(
        self, prompts: Sequence[Prompt], *, max_tokens: int, schema: Mapping[str, object] | None = None
    ) -> list[Completion]:
        """As `LanguageModel.generate`.

        Raises:
            ValueError: a schema (this backend cannot enforce one), or a prompt that does not fit the model's context.
        """
        if schema is not None:
            raise ValueError("a local model cannot be held to a JSON schema; use a server that can, or ask in words")
        rows = [self._ids(prompt) for prompt in prompts]
        self._check_context(rows, max_tokens)
        out: dict[int, Completion] = {}
        for group in self._batches([len(row) + max_tokens for row in rows]):
            for i, answer in zip(group, self._write([rows[i] for i in group], max_tokens), strict=True):
                out[i] = answer
        return [out[i] for i in range(len(rows))]

    def label_logprobs(self, prompts: Sequence[Prompt], labels: Sequence[str]) -> np.ndarray:
        """As `LanguageModel.label_logprobs`: (P, L); labels of several tokens take their product.

        Raises:
            ValueError: no labels, an empty one, or two that are the same tokens.
        """
        ids = [self._tokenizer.data(label) for label in labels]
        if not ids or not all(ids) or len(set(map(tuple, ids))) < len(ids):
            raise ValueError(f"labels={list(labels)} must be different and not empty")
        heads = [self._ids(prompt) for prompt in prompts]
        self._check_context(heads, max(map(len, ids)))
        rows = [(head, label) for head in heads for label in ids]
        values = np.empty(len(rows))
        for group in self._batches([len(head) + len(label) for head, label in rows]):
            values[group] = self._log_probs([rows[i] for i in group])
        return values.reshape(len(prompts), len(labels))

    def _ids(self, prompt: Prompt) -> list[int]:
        before, after = self._tokenizer.chat_frame(prompt.system)
        return [*before, *self._tokenizer.data(prompt.user), *after]

    def _check_context(self, rows: Sequence[Sequence[int]], more: int) -> None:
        longest = max(map(len, rows), default=0)
        if longest + more > self._context:
            raise ValueError(
                f"a prompt of {longest} tokens and an answer of {more} do not fit the {self._context} positions of "
                f"{self._name}; shorten the passages or ask for fewer tokens"
            )

    def _batches(self, lengths: Sequence[int]) -> Iterator[list[int]]:
        """Indices of rows of similar length, padded size within the limit."""
        group: list[int] = []
        for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
            if group and lengths[group[0]] * (len(group) + 1) > self._max_batch_tokens:
                yield group
                group = []
            group.append(i)
        if group:
            yield group

    @torch.no_grad()
    def _write(self, rows: Sequence[list[int]], max_tokens: int) -> list[Completion]:
        ids_BT, mask_BT = self._padded(rows, left=True)
        hf = self._tokenizer.hf
        end = self._model.generation_config.eos_token_id
        ends = set(end if isinstance(end, list) else [end]) | {hf.eos_token_id}
        ends.discard(None)
        out_BT = self._model.generate(
            input_ids=ids_BT,
            attention_mask=mask_BT,
            max_new_tokens=max_tokens,
            do_sample=False,
            temperature=None,
            top_p=None,
            top_k=None,
            eos_token_id=sorted(ends),
            pad_token_id=hf.pad_token_id if hf.pad_token_id is not None else min(ends),
        )
        answers = []
        for row, written in zip(rows, out_BT[:, ids_BT.shape[1] :].tolist(), strict=True):
            stop = next((n for n, token in enumerate(written) if token in ends), len(written))
            cost = Cost(
                requests=1,
                forwards=stop + 1,
                prompt_tokens=len(row),
                generated_tokens=min(stop + 1, len(written)),
                max_concurrency=1,
            )
            text = str(hf.decode(written[:stop], skip_special_tokens=True))
            answers.append(Completion(text, cost, stop == len(written)))
        return answers

    @torch.no_grad()
    def _log_probs(self, rows: Sequence[tuple[list[int], list[int]]]) -> list[float]:
        ids_BT, mask_BT = self._padded([head + label for head, label in rows], left=False)
        longest = max(len(label) for _, label in rows)
        # Logits are wanted at the label's places alone: never a (tokens x vocabulary) matrix.
        hidden_BTH = self._model.base_model(input_ids=ids_BT, attention_mask=mask_BT, use_cache=False)[0]
        first_B = torch.tensor([len(head) - 1 for head, _ in rows], device=ids_BT.device)
        place_BK = first_B[:, None] + torch.arange(longest, device=ids_BT.device)
        place_BK = place_BK.clamp(max=ids_BT.shape[1] - 2)
        row_B = torch.arange(len(rows), device=ids_BT.device)[:, None]
        logp_BKV = self._model.get_output_embeddings()(hidden_BTH[row_B, place_BK]).float().log_softmax(-1)
        logp_BK = logp_BKV.gather(2, ids_BT[row_B, place_BK + 1][..., None])[..., 0].double().cpu()
        return [float(logp_BK[n, : len(label)].sum()) for n, (_, label) in enumerate(rows)]

    def _padded(self, rows: Sequence[list[int]], *, left: bool) -> tuple[Tensor, Tensor]:
        width = max(map(len, rows))
        ids, mask = np.zeros((len(rows), width), dtype=np.int64), np.zeros((len(rows), width), dtype=np.int64)
        for n, row in enumerate(rows):
            where = slice(width - len(row), width) if left else slice(0, len(row))
            ids[n, where], mask[n, where] = row, 1
        device = self._model.device
        return torch.from_numpy(ids).to(device), torch.from_numpy(mask).to(device)
