"""Prefix sessions against plain passes, row by row: the same states, and no token read twice."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from state_toy import tiny_encoder

from retrail.models.backbone import load_backbone
from retrail.models.config import ModelConfig
from retrail.models.protocols import State
from retrail.models.recursive.prefix_cache import PrefixSession, unsupported
from retrail.models.recursive.sessions import CachedSession, PlainSession

BACKBONES = {}


def backbone(path="tiny:qwen3"):
    if path not in BACKBONES:
        BACKBONES[path] = load_backbone(ModelConfig(path=path, dtype="float32"), torch.device("cpu"))[0]
    return BACKBONES[path]


def plain(model, tokens):
    with torch.no_grad():
        return (
            model.base_model(input_ids=torch.tensor([list(tokens)]), use_cache=False).last_hidden_state[0, -1].numpy()
        )


def cosine(a, b):
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


def check(model, session, lists, owners):
    with torch.no_grad():
        vectors, computed, reused = session.encode(lists, owners)
    for tokens, vector, own, old in zip(lists, vectors, computed, reused, strict=True):
        assert own + old == len(tokens)
        assert cosine(vector, plain(model, tokens)) > 1 - 1e-5
        assert vector == pytest.approx(plain(model, tokens), abs=1e-3)
    return computed


@settings(max_examples=25, deadline=None)
@given(data=st.data(), path=st.sampled_from(["tiny:qwen3", "tiny:llama"]), small=st.booleans())
def test_equal_to_plain_passes_and_no_token_is_read_twice(data, path, small):
    model = backbone(path)
    session = PrefixSession(model, max_tokens=40 if small else None)
    token = st.integers(5, 8)  # few different ones, so that much is shared
    known = {}  # of each owner, beginnings that were read; and lists whose state is known
    for _ in range(data.draw(st.integers(1, 4))):
        lists = data.draw(st.lists(st.lists(token, min_size=1, max_size=12), min_size=1, max_size=6))
        owners = [data.draw(st.integers(0, 1)) for _ in lists]
        computed = check(model, session, lists, owners)
        before = {owner: (set(read), set(ends)) for owner, (read, ends) in known.items()}
        total = 0
        for owner in set(owners):
            read, ends = before.get(owner, (set(), set()))
            fresh = set()
            for tokens, whose in zip(lists, owners, strict=True):
                if whose == owner and tuple(tokens) not in ends:
                    fresh |= {tuple(tokens[:n]) for n in range(1, len(tokens) + 1)} - read
                    fresh.add(tuple(tokens))  # the state of its last token is needed, though it may have been read
            total += len(fresh)
            read, ends = known.setdefault(owner, (set(), set()))
            read |= fresh
            ends |= {tuple(t) for t, whose in zip(lists, owners, strict=True) if whose == owner}
        assert sum(computed) == total


def test_equal_lists_cost_nothing_the_second_time():
    model, tokens = backbone(), [5, 6, 7, 8, 9]
    session = PrefixSession(model)
    assert check(model, session, [tokens, tokens, tokens[:3]], [0, 0, 0]) == [5, 0, 0]
    assert check(model, session, [tokens, tokens[:3], tokens[:2], [*tokens, 4]], [0, 0, 0, 0]) == [0, 0, 1, 1]
    assert check(model, session, [tokens], [1]) == [5]
    session.forget(0)
    session.forget(7)
    assert check(model, session, [tokens], [0]) == [5]


@pytest.mark.parametrize("tokens_that_fit", [0, 7, 20])
def test_memory_that_ends_changes_no_vector(tokens_that_fit):
    model = backbone()
    size = 2 * 2 * 2 * 16 * 4  # layers, keys and values, heads, their size, bytes
    session = PrefixSession(model, max_bytes_per_owner=tokens_that_fit * size)
    rng = np.random.default_rng(0)
    head = rng.integers(5, 90, 6).tolist()
    check(model, session, [[*head, 1]], [0])
    level = [[*head, *rng.integers(5, 90, 5).tolist(), 1] for _ in range(3)]
    check(model, session, level, [0, 0, 0])
    check(model, session, [[*part[:-1], 30, 31, 1] for part in level], [0, 0, 0])
    memory = session._memories[0]
    assert memory.count <= tokens_that_fit and (memory.count > 0) == (tokens_that_fit >= 7)


TEXTS = ["Ada was born in Graz.", "真是太好了。", "", "Is it so?", '"Yes!"', "(no!)", "ends in a word", "x" * 90]


@pytest.mark.parametrize("path", ["tiny:qwen3", "tiny:llama"])
def test_states_of_a_search_are_those_without_a_cache(path):
    encoder = tiny_encoder(path=path)
    session = encoder.session()
    assert isinstance(session, CachedSession)
    states = [State("Which river?")]
    for n, text in enumerate(TEXTS):
        states.append(State("Which river?", (text,), "continuation"))
        states.append(State("Which river?", (text, TEXTS[n - 1]), "continuation"))
        states.append(State("Which river?", (text, TEXTS[n - 1]), "recovery_view"))
        states.append(State("Which river?", (text, TEXTS[n - 1], TEXTS[n - 2]), "continuation"))
    states.append(State("Which river?", tuple(TEXTS[:3]), "feedback"))
    for size in (1, 5, 40):  # one at a time, in levels, at once
        session = encoder.session()
        for start in range(0, len(states), size):
            part = states[start : start + size]
            ours, theirs = session.encode(part, [0] * len(part)), encoder.encode(part)
            assert (ours.vectors_SD * theirs.vectors_SD).sum(1) == pytest.approx(np.ones(len(part)), abs=1e-5)
            assert ours.notes == theirs.notes
            lengths = [len(encoder.tokens(state)) for state in part]
            assert [c.prompt_tokens + c.reused_tokens for c in ours.costs] == lengths
        if size == 1:
            assert session._tokens._memories[0].count < sum(len(encoder.tokens(state)) for state in states)


def test_what_allows_no_cache():
    assert unsupported(backbone()) is None
    encoder = tiny_encoder(invariant=True)
    assert isinstance(encoder.session(), PlainSession)
    encoder = tiny_encoder()
    config = encoder.backbone.config
    config._attn_implementation = "flex_attention"
    try:
        assert "flex_attention" in unsupported(encoder.backbone) and isinstance(encoder.session(), PlainSession)
        with pytest.raises(ValueError, match="this model allows no prefix cache: its attention is flex_attention"):
            PrefixSession(encoder.backbone)
    finally:
        config._attn_implementation = "sdpa"
    with pytest.raises(ValueError, match="no tokens at all"):
        PrefixSession(backbone()).encode([[1], []], [0, 0])
