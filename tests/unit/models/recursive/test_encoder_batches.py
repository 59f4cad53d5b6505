"""Which texts share a forward pass, and that it makes no difference to their vectors."""

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from qwen_like import qwen_like, qwen_like_tokenizer
from torch.nn import functional
from transformers import BertConfig, BertModel

from retrail.models.backbone import load_backbone
from retrail.models.config import ModelConfig
from retrail.models.recursive.batching import check_vectors, distinct, token_batches
from retrail.models.recursive.encoder import EncoderConfig, LocalEncoder
from retrail.models.recursive.pooling import decoder_of, finish, hidden_states, pad, pool
from retrail.models.recursive.prompts import preset

CPU = torch.device("cpu")
TOLERANCE = 1e-5  # as LocalEncoder promises in float32
PROMPTS = preset("multi-hop")


def texts_of(count, seed=0, longest=90):
    rng = random.Random(seed)
    return ["".join(rng.choices("abc .?\n漢", k=rng.randint(0, longest))) for _ in range(count)]


def encoder(path="qwen_like", **config):
    if path == "qwen_like":
        model = qwen_like()
    else:
        model = load_backbone(ModelConfig(path=path, dtype="float32"), CPU)
    return LocalEncoder(*model, EncoderConfig(**config), PROMPTS)


@given(st.lists(st.integers(1, 60), max_size=40), st.integers(1, 200), st.integers(1, 9) | st.none())
@settings(max_examples=200, deadline=None)
def test_batches_hold_every_text_once_within_the_budget(lengths, max_tokens, max_rows):
    batches = token_batches(lengths, max_tokens, max_rows)
    flat = [n for batch in batches for n in batch]
    assert flat == sorted(range(len(lengths)), key=lambda n: -lengths[n])
    for batch in batches:
        longest, shortest = lengths[batch[0]], lengths[batch[-1]]
        assert len(batch) * longest <= max_tokens or len(batch) == 1
        assert len(batch) <= (max_rows or len(batch))
        assert shortest >= 0.8 * longest
    for batch, following in zip(batches, batches[1:], strict=False):  # no batch ends too early
        longest, candidate = lengths[batch[0]], lengths[following[0]]
        assert (len(batch) + 1) * longest > max_tokens or len(batch) == max_rows or candidate < 0.8 * longest


def test_little_is_padding():
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(5, 1, 2000), 3, 4096).astype(int).tolist()
    batches = token_batches(lengths, 16_384)
    padded = sum(len(batch) * lengths[batch[0]] for batch in batches)
    assert 1 <= padded / sum(lengths) < 1.08


def test_distinct_by_hand():
    found = distinct(["b", "a", "b", "c", "a"])
    assert (found.first, found.inverse) == ([0, 1, 3], [0, 1, 0, 2, 1])
    assert distinct([]).first == []


def alone(made, ids):
    """One text through transformers itself, in float64 from the hidden state on."""
    output = made.backbone(torch.tensor([ids]), output_hidden_states=True).hidden_states[-1][0].detach()
    vector = output.double()[-1] if made.config.pooling == "last" else output.double().mean(0)
    return (vector / vector.norm()).numpy()


@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize("padding", ["right", "left"])
@pytest.mark.parametrize("path", ["qwen_like", "tiny:qwen3", "tiny:llama"])
def test_a_text_has_the_same_vector_in_any_batch(path, padding, pooling):
    texts = texts_of(24)
    expected = None
    for max_batch_tokens in (1, 300, 100_000):
        made = encoder(path, padding=padding, pooling=pooling, max_batch_tokens=max_batch_tokens)
        if expected is None:
            expected = np.array([alone(made, made.document_tokens(text)) for text in texts])
        assert np.abs(made.encode_documents(texts) - expected).max() < TOLERANCE
        order = random.Random(max_batch_tokens).sample(range(len(texts)), len(texts))
        shuffled = made.encode_documents([texts[n] for n in order])
        assert np.abs(shuffled - expected[order]).max() < TOLERANCE  # in the order given


def test_padding_on_either_side_is_told_from_the_end_token_by_lengths():
    """The end token is the padding token: who looked for the first or last padding id would read a wrong state."""
    model, tokenizer = qwen_like()
    end = tokenizer.pad_token_id
    lists = [[5, 6, end], [7, 8, 9, 10, 11, end], [end], [12, end, end, end]]
    expected = [model.model(torch.tensor([ids])).last_hidden_state[0, -1] for ids in lists]
    for padding in ("left", "right"):
        ids_BT, lengths_B = pad(lists, end, padding)
        assert ids_BT.tolist()[0] == ([end] * 3 + lists[0] if padding == "left" else lists[0] + [end] * 3)
        hidden_BTH = hidden_states(decoder_of(model), ids_BT, lengths_B, padding, causal=True)
        for found, wanted in zip(pool(hidden_BTH, lengths_B, padding, "last"), expected, strict=True):
            assert torch.allclose(found, wanted, atol=TOLERANCE)
    with pytest.raises(ValueError, match="text 1 has no tokens at all"):
        pad([[1], []], 0)
    with pytest.raises(ValueError, match="encoder.padding='both' is not a choice"):
        pad([[1]], 0, "both")


def test_what_fills_up_is_never_read():
    model, _ = qwen_like()
    lists = [[5, 6, 7], [8] * 9]
    for padding in ("left", "right"):
        found = []
        for pad_id in (0, 200):
            ids_BT, lengths_B = pad(lists, pad_id, padding)
            hidden_BTH = hidden_states(model.model, ids_BT, lengths_B, padding, causal=True)
            found.append(pool(hidden_BTH, lengths_B, padding, "mean"))
        assert torch.equal(*found)


@pytest.mark.parametrize("path", ["tiny:qwen3", "tiny:llama"])
def test_invariant_mode_gives_the_same_bits_whatever_the_batch(path):
    made = encoder(path, invariant=True)
    texts = texts_of(20, seed=3)
    whole = made.encode_documents(texts)
    for n, text in enumerate(texts):
        assert np.array_equal(made.encode_documents([text])[0], whole[n])
    assert np.array_equal(made.encode_documents(texts[::-1]), whole[::-1])
    assert np.array_equal(made.encode_documents(texts[5:12]), whole[5:12])


def test_equal_texts_tie_to_the_bit_whatever_stands_between(monkeypatch):
    made = encoder(max_batch_tokens=200)
    forwarded = []
    forward = made._forward
    monkeypatch.setattr(made, "_forward", lambda lists: forwarded.extend(map(tuple, lists)) or forward(lists))
    texts = [text for other in texts_of(15, seed=4) for text in ("the same", other)]
    vectors = made.encode_documents(texts)
    assert all(np.array_equal(row, vectors[0]) for row in vectors[::2])
    assert len(forwarded) == len(set(forwarded)) == len({tuple(made.document_tokens(t)) for t in texts})
    # Other texts with the same tokens as well: composed otherwise, or with another end that is cut.
    short = encoder(max_document_tokens=8)
    vectors = short.encode_documents(["caf\u00e9", "cafe\u0301", "long enough", "long entire"])
    assert np.array_equal(vectors[0], vectors[1]) and np.array_equal(vectors[2], vectors[3])


def test_documents_in_chunks_are_the_same(monkeypatch):
    from retrail.models.recursive import batching as module

    made, texts = encoder(), texts_of(23, seed=5)
    whole = made.encode_documents(texts)
    monkeypatch.setattr(module, "_TOKENISED_AT_ONCE", 4)
    assert np.abs(made.encode_documents(texts) - whole).max() < TOLERANCE
    assert made.encode_documents([]).shape == (0, made.dim)
    with pytest.raises(TypeError, match="put a single text in a list"):
        made.encode_documents("text")


def test_progress_counts_documents(capsys):
    encoder(max_batch_tokens=100).encode_documents([*texts_of(9, seed=6), "x", "x"], progress=True)
    assert "documents: 100%" in capsys.readouterr().err
    encoder().encode_documents(["x"])
    assert capsys.readouterr().err == ""


def test_a_vector_that_is_no_number_is_named_by_its_document():
    made = encoder()
    with torch.no_grad():
        made.backbone.get_input_embeddings().weight[made.tokenizer.data("~")[0]] = torch.nan
    with pytest.raises(ValueError, match=r"the vector of document 2 \('bad ~ text'\) is not finite \(1 of 3 vectors"):
        made.encode_documents(["a", "b", "bad ~ text"])
    with pytest.raises(ValueError, match="x3 is zero"):
        check_vectors(np.array([[1.0, 0], [0, 1], [1, 1], [0, 0]]), lambda n: f"x{n}")


def test_bfloat16_is_the_same_in_any_batch_to_its_tolerance():
    texts = texts_of(24, seed=7)
    model, tokenizer = load_backbone(ModelConfig(path="tiny:qwen3", dtype="bfloat16"), CPU)
    one, many = (
        LocalEncoder(model, tokenizer, EncoderConfig(max_batch_tokens=n), PROMPTS).encode_documents(texts)
        for n in (1, 10_000)
    )
    assert one.dtype == np.float32 and np.abs(np.linalg.norm(one, axis=1) - 1).max() < 1e-6
    assert np.abs(one - many).max() < 2e-2


@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize("padding", ["right", "left"])
def test_a_model_that_sees_both_ways_is_masked_and_shares_no_beginnings(padding, pooling):
    torch.manual_seed(0)
    tokenizer = qwen_like_tokenizer()
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=128,
    )  # fmt: skip
    made = LocalEncoder(BertModel(config).eval(), tokenizer, EncoderConfig(padding=padding, pooling=pooling), PROMPTS)
    assert not made.causal
    assert type(made.session()).__name__ == "PlainSession"
    texts = texts_of(12, seed=8)
    expected = []
    for text in texts:
        with torch.no_grad():
            states = made.backbone(torch.tensor([made.document_tokens(text)])).last_hidden_state[0]
        expected.append(functional.normalize(states[-1] if pooling == "last" else states.mean(0), dim=0).numpy())
    assert np.abs(made.encode_documents(texts) - np.array(expected)).max() < TOLERANCE


def test_finish_by_hand():
    pooled = torch.tensor([[3.0, 4.0, 12.0]], dtype=torch.bfloat16)
    assert np.allclose(finish(pooled, 2), [[0.6, 0.8]])
    assert finish(pooled).dtype == torch.float32
    assert np.allclose(finish(pooled), [[3 / 13, 4 / 13, 12 / 13]])
    assert finish(pooled, normalise=False).tolist() == [[3.0, 4.0, 12.0]]
