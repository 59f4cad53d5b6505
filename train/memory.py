"""What a training run takes of a GPU's memory, from the shapes of the model alone.

Weights, gradients and AdamW's two moments are counted parameter by parameter in the types in which the loop holds them:
a frozen bfloat16 weight takes 2 bytes, a float32 LoRA weight 4 + 4 + 8. By runtime, with W ranks, P weights,
G gradients, O moments (bytes), and U the largest unit that is gathered, a decoder layer or the embeddings (ZeRO,
arXiv 1910.02054):

    ddp     P + G + O, and G again for W > 1: the buckets that are sent
    zero2   P + (G + O) / W
    zero3   (P + G + O) / W + 2 U for W > 1: the layer at work and the next
    fsdp2   as zero3, and all that belongs to no layer, which stays gathered until the backward pass

Activations are what autograd keeps for the backward pass of a Llama or Qwen3 decoder in `b` bytes a number (2 under
bf16), for each token and layer, with H hidden, A query, K key and I inner width, h + k heads, n the padded slate:

    2 (4 H + 4)           inputs of both norms in float32, and their scales
    3 b A + 4 h + b n     queries, keys, values (keys repeated for all heads), log-sums, the mask as a bias
    4 (A + K + h + k)     inputs of Qwen3's norms of queries and keys, and their scales
    3 b I                 gate, activated gate, up
    inputs of matrices that train: b (2 H + A + I), once each; LoRA in mixed precision copies the input of every
        adapted matrix and keeps the attention's output too: b A + b (their widths); and b r for each of rank r
    2 b H + b (A + K)     normalised values, where the norms' own weights train

With checkpointing a layer keeps its input (b H), and one layer at a time is computed again. A last norm, and the
softmax over the vocabulary V for R label tokens of a multiple-choice question (4 V R), come on top. Left out: CUDA's
own memory, workspaces and fragments, for which `fits` leaves a tenth of the GPU free.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from .optim import trainable

RUNTIMES = ("ddp", "fsdp2", "zero2", "zero3")
GPUS = {"80 GB": 80e9, "141 GB": 141e9}
_USABLE = 0.9


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes that parameters take: all weights, gradients and moments of the trained ones; units of gathering.

    unit: weights of the largest decoder layer, or of the embeddings; outside: of all that belongs to no layer.
    """

    weights: int
    gradients: int
    moments: int
    unit: int
    outside: int

    @classmethod
    def of(cls, model: nn.Module) -> Held:
        """What training `model` holds (meta tensors do as well as real ones)."""
        sizes = {id(p): p.numel() * p.element_size() for p in model.parameters()}
        trained = sum(sizes[id(p)] for p in trainable(model).values())
        layers = [{id(p) for p in layer.parameters()} for layer in _layers(model)]
        inside = set[int]().union(*layers)
        others = [size for key, size in sizes.items() if key not in inside]
        largest = max([*others, *(sum(sizes[key] for key in layer) for layer in layers)])
        return cls(sum(sizes.values()), trained, 2 * trained, largest, sum(others))

    def per_gpu(self, runtime: str, world: int) -> float:
        """Bytes on each of `world` GPUs, see the head of this file."""
        whole = self.weights + self.gradients + self.moments
        if world == 1:
            return whole
        if runtime == "ddp":
            return whole + self.gradients
        if runtime == "zero2":
            return self.weights + (self.gradients + self.moments) / world
        gathered = 2 * self.unit + (self.outside if runtime == "fsdp2" else 0)
        # More than the whole model is never gathered.
        return whole / world + min(gathered, self.weights)


@dataclass(frozen=True, slots=True)
class Activations:
    """What decides how much a forward pass leaves for the backward pass.

    layers: those from the first that trains to the last; nothing below is kept.
    adapted: widths of the inputs of a layer's LoRA matrices together; ranks: their ranks together (0: no LoRA).
    copies: LoRA under mixed precision copies its inputs.
    """

    layers: int
    hidden: int
    query: int
    key: int
    inner: int
    heads: int
    key_heads: int
    vocab: int
    number_bytes: int
    qk_norm: bool
    adapted: int = 0
    ranks: int = 0
    copies: bool = False

    @classmethod
    def of(cls, model: nn.Module, config: Any, *, mixed: bool, number_bytes: int) -> Activations:
        """Of a decoder with the transformers settings `config`; `mixed`: under autocast to `number_bytes`."""
        layers = _layers(model)
        trained = [n for n, layer in enumerate(layers) if any(p.requires_grad for p in layer.parameters())]
        first = trained[0] if trained else len(layers)
        shape = cls(
            layers=len(layers) - first,
            hidden=config.hidden_size,
            query=config.num_attention_heads * config.head_dim,
            key=config.num_key_value_heads * config.head_dim,
            inner=config.intermediate_size,
            heads=config.num_attention_heads,
            key_heads=config.num_key_value_heads,
            vocab=config.vocab_size,
            number_bytes=number_bytes,
            qk_norm=any(name.endswith("q_norm") for name, _ in layers[0].named_modules()),
        )
        lora: list[Any] = [m for m in layers[first].modules() if hasattr(m, "lora_A")] if trained else []
        if not lora:
            return shape
        widths, ranks = sum(m.in_features for m in lora), sum(next(iter(m.r.values())) for m in lora)
        return replace(shape, adapted=widths, ranks=ranks, copies=mixed)

    def layer(self, slate: int) -> int:
        """Bytes that one layer keeps of one token, in slates padded to `slate` tokens."""
        b, H, A, K, I = self.number_bytes, self.hidden, self.query, self.key, self.inner  # noqa: E741
        kept = 2 * (4 * H + 4) + 3 * b * A + 4 * self.heads + b * slate + 3 * b * I
        if self.qk_norm:
            kept += 4 * (A + K + self.heads + self.key_heads)
        if self.ranks:
            kept += b * self.ranks
            return kept + (b * (A + self.adapted) if self.copies else b * (2 * H + A + I))
        return kept + b * (2 * H + A + I) + 2 * b * H + (b * (A + K) if self.qk_norm else 0)

    def bytes(self, tokens: int, slate: int, *, checkpointing: bool, label_rows: int = 0) -> int:
        """Bytes of a microbatch of `tokens`, in slates padded to `slate`, with `label_rows` label tokens."""
        layer = tokens * self.layer(slate)
        ends = tokens * self.hidden * (4 + self.number_bytes) + 4 * self.vocab * label_rows
        if not checkpointing or not self.layers:
            return self.layers * layer + ends
        return self.layers * tokens * self.hidden * self.number_bytes + layer + ends


def fits(num_bytes: float) -> list[str]:
    """Names of the GPUs on which so much finds room, with a tenth left free."""
    return [name for name, size in GPUS.items() if num_bytes <= _USABLE * size]


def _layers(model: nn.Module) -> list[nn.Module]:
    """The decoder layers of a model, or of the model inside; ValueError if there are none."""
    for module in model.modules():
        layers = getattr(module, "layers", None)
        if isinstance(layers, nn.ModuleList):
            return list(layers)
    raise ValueError(f"{type(model).__name__} has no decoder layers whose memory could be estimated")
