"""The estimate of memory: by hand, and against what torch really keeps."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from retrail.models.architectures import empty_backbone
from retrail.models.backbone import add_adapter
from retrail.models.config import AdapterConfig, ModelConfig
from retrail.train.config import OptimConfig
from retrail.train.memory import Activations, Held, fits
from retrail.train.optim import Optimizer

TOKENS = 96
# 7 adapted matrices of rank 4 in a layer; by hand: 4 x (in + out), with H 64, A 64, K 32, I 128.
LORA_WEIGHTS = 4 * (2 * (64 + 64) + 2 * (64 + 32) + 3 * (64 + 128))


def tiny(kind, dtype, adapter, layers=2):
    """A real tiny model as training holds it."""
    config = empty_backbone(ModelConfig(path=kind)).config
    config.num_hidden_layers, config.layer_types = layers, ["full_attention"] * layers
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    return add_adapter(model, adapter).train()


def decoder_of(model):
    return (model.get_base_model() if hasattr(model, "get_base_model") else model).base_model


def kept_bytes(model, *, mixed):
    """Bytes of all that autograd keeps of a forward pass of the decoder, the model's own weights left out."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept, alive = {}, []

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)
        return tensor

    ids = torch.arange(TOKENS)[None] % 200
    mask = torch.ones(1, 1, TOKENS, TOKENS, dtype=torch.bool).tril()
    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        torch.autocast("cpu", dtype=torch.bfloat16, enabled=mixed),
    ):
        decoder_of(model)(input_ids=ids, attention_mask=mask, use_cache=False)
    return sum(kept.values())


@pytest.mark.parametrize("kind", ["tiny:llama", "tiny:qwen3"])
@pytest.mark.parametrize("mixed", [True, False])
@pytest.mark.parametrize("adapter", [AdapterConfig(rank=4), AdapterConfig(kind="full")], ids=["lora", "full"])
def test_activations_are_what_autograd_keeps(kind, mixed, adapter):
    dtype = torch.bfloat16 if mixed else torch.float32
    models = [tiny(kind, dtype, adapter, layers) for layers in (2, 3)]
    shapes = [Activations.of(m, decoder_of(m).config, mixed=mixed, number_bytes=dtype.itemsize) for m in models]
    kept = [kept_bytes(model, mixed=mixed) for model in models]
    # However many tokens there are: a bfloat16 copy of the adapter's weights.
    once = 2 * LORA_WEIGHTS if mixed and adapter.kind == "lora" else 0
    assert kept[1] - kept[0] - once == TOKENS * shapes[0].layer(TOKENS)
    estimate = shapes[1].bytes(TOKENS, TOKENS, checkpointing=False)
    assert kept[1] - 3 * once == pytest.approx(estimate, rel=0.06)


def test_only_layers_from_the_first_trained_one_keep_anything():
    model = tiny("tiny:qwen3", torch.float32, AdapterConfig(rank=4, last_layers=1))
    shape = Activations.of(model, decoder_of(model).config, mixed=False, number_bytes=4)
    assert shape.layers == 1
    estimate = shape.bytes(TOKENS, TOKENS, checkpointing=False)
    assert kept_bytes(model, mixed=False) == pytest.approx(estimate, rel=0.1)


def test_a_layer_by_hand():
    shape = Activations(
        layers=3, hidden=10, query=8, key=4, inner=20, heads=2, key_heads=1, vocab=50, number_bytes=2, qk_norm=True,
        adapted=30, ranks=6, copies=True,
    )  # fmt: skip
    norms, attention, qk, mlp = 2 * 44, 3 * 16 + 8 + 2 * 7, 4 * (12 + 3), 120
    assert shape.layer(7) == norms + attention + qk + mlp + 2 * 6 + 2 * (8 + 30)
    ends = 5 * 10 * 6 + 4 * 50 * 9
    assert shape.bytes(5, 7, checkpointing=False, label_rows=9) == 3 * 5 * shape.layer(7) + ends
    assert shape.bytes(5, 7, checkpointing=True, label_rows=9) == 3 * 5 * 20 + 5 * shape.layer(7) + ends


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_weights_gradients_and_moments_are_those_of_a_real_step(kind):
    model = tiny("tiny:qwen3", torch.bfloat16, AdapterConfig(kind=kind, rank=4))
    optimizer = Optimizer(model, OptimConfig(), 10)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(input_ids=torch.arange(9)[None]).logits.sum().backward()

    def size(tensors):
        return sum(t.numel() * t.element_size() for t in tensors)

    held = Held.of(model)
    assert held.weights == size(model.parameters())
    assert held.gradients == size(optimizer.gradients())
    optimizer.step(0)
    assert held.moments == size(t for name, t in optimizer.tensors().items() if not name.startswith("step:"))


def test_runtimes_by_hand():
    held = Held(weights=1000, gradients=80, moments=160, unit=50, outside=200)
    assert {held.per_gpu(runtime, 1) for runtime in ("ddp", "fsdp2", "zero2", "zero3")} == {1240}
    assert held.per_gpu("ddp", 8) == 1240 + 80
    assert held.per_gpu("zero2", 8) == 1000 + 240 / 8
    assert held.per_gpu("zero3", 8) == 1240 / 8 + 100
    assert held.per_gpu("fsdp2", 8) == 1240 / 8 + 300
    assert Held(1000, 80, 160, unit=600, outside=200).per_gpu("fsdp2", 8) == 1240 / 8 + 1000


def test_qwen3_8b():
    model = empty_backbone(ModelConfig(path="Qwen/Qwen3-8B", dtype="bfloat16"))
    assert sum(p.numel() for p in model.parameters()) == 8_190_735_360
    with torch.device("meta"):
        wrapped = add_adapter(model, AdapterConfig(rank=32))
    assert {p.device.type for p in wrapped.parameters()} == {"meta"}
    held = Held.of(wrapped)
    # By hand, a layer: H 4096, A 4096, K 1024, I 12288, rank 32; in + out of q, k, v, o, gate, up, down.
    trained = 36 * 32 * (2 * 8192 + 2 * 5120 + 3 * 16_384)
    assert (held.gradients, held.moments) == (4 * trained, 8 * trained)
    assert held.weights == 2 * 8_190_735_360 + 4 * trained
    assert held.unit == 2 * 151_936 * 4096
    assert held.outside == 2 * (2 * 151_936 * 4096 + 4096)


def test_fits():
    assert fits(72e9) == ["80 GB", "141 GB"] and fits(73e9) == ["141 GB"] and fits(130e9) == []
