"""Models without their weights: shapes that ship with the toolkit, so that a run can be planned without a download."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from .backbone import keep_first_layers, resolve, tiny_twin
from .config import ModelConfig

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

# As in the `config.json` of the model's Hub repository; Qwen3 technical report, arXiv 2505.09388, table 1.
_QWEN3: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 151_936,
    "head_dim": 128,
    "max_position_embeddings": 40_960,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
    "bos_token_id": 151_643,
    "eos_token_id": 151_645,
}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "Qwen/Qwen3-8B": _QWEN3
    | {
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
    },
}
"""Settings of `transformers.AutoConfig.for_model`, by Hub id."""


def empty_backbone(config: ModelConfig) -> PreTrainedModel:
    """The model with its shapes and types and no weights, on torch's meta device; nothing is downloaded.

    `dtype=auto` is bfloat16, which it is on a GPU.

    Raises:
        FileNotFoundError: its shape ships with the toolkit no more than its files lie on this machine.
        ValueError: more layers asked for than there are.
    """
    import torch
    from transformers import AutoModelForCausalLM

    dtype = {"float32": torch.float32, "float16": torch.float16}.get(config.dtype, torch.bfloat16)
    settings = _settings(config)
    attention = "sdpa" if config.attention == "auto" else config.attention
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(settings, dtype=dtype, attn_implementation=attention)
    if config.num_layers is not None:
        keep_first_layers(model, config.num_layers)
    return model  # type: ignore[no-any-return]


def _settings(config: ModelConfig) -> PretrainedConfig:
    import torch
    from transformers import AutoConfig

    if config.path.startswith("tiny:"):
        return tiny_twin(config.path.removeprefix("tiny:"), torch.device("cpu"), torch.float32, "sdpa")[0].config
    if config.path in ARCHITECTURES:
        return AutoConfig.for_model(**ARCHITECTURES[config.path])
    path = resolve(config.path)
    try:
        return AutoConfig.from_pretrained(path, revision=config.revision, local_files_only=True)  # type: ignore[no-any-return]
    except OSError as error:
        raise FileNotFoundError(
            f"model.path={config.path!r}: its shape neither lies on this machine nor ships with the toolkit "
            f"({', '.join(ARCHITECTURES)}); give a folder that holds its config.json"
        ) from error


def tokenizer_at_hand(config: ModelConfig) -> tuple[PreTrainedTokenizerBase, bool]:
    """The model's own tokenizer where it lies on this machine, else SmolLM2's; and whether it is the model's own.

    Raises:
        FileNotFoundError: neither is there; says what to install.
    """
    import torch
    from transformers import AutoTokenizer

    if config.path.startswith("tiny:"):
        return tiny_twin(config.path.removeprefix("tiny:"), torch.device("cpu"), torch.float32, "sdpa")[1], True
    try:
        own = AutoTokenizer.from_pretrained(resolve(config.path), revision=config.revision, local_files_only=True)
    except OSError:
        if Path(config.path).expanduser().is_dir() or config.path == "package:smollm2":
            raise
        return AutoTokenizer.from_pretrained(resolve("package:smollm2")), False
    return own, True
