"""What a slate looks like as tokens, and that its budget holds."""

from bisect import bisect_left
from dataclasses import replace
from functools import lru_cache

import pytest
import torch
from fakes import WORDS, make_slate
from hypothesis import given, settings
from hypothesis import strategies as st

from retrail.models.backbone import tiny_twin
from retrail.models.config import DecisionConfig
from retrail.models.decision.layout import SlateLayout
from retrail.models.protocols import Candidate, Slate
from retrail.models.tokenizer import SafeTokenizer

SAFE = SafeTokenizer(tiny_twin("llama", torch.device("cpu"), torch.float32, "sdpa")[1])
SLATE = Slate(
    "who pays?",
    (
        Candidate("a", "Fees", "The owner pays.", "Guide > Money"),
        Candidate("b", "", "Nobody.", "Guide > Money"),
        Candidate("c", "Loose", "No page."),
        Candidate("d", "Late", "Pay more.", "Guide > Money"),
    ),
)


def layout_of(**decision):
    return SlateLayout(SAFE, DecisionConfig(**{"head": "yes_no", **decision}))


def text(ids):
    return SAFE.hf.decode(ids)


def spans(packed):
    return [
        text(packed.trunk[start : end + 1]).removeprefix(" ")
        for start, end in zip(packed.starts, packed.ends, strict=True)
    ]


def test_trunk_reads_as_written():
    packed = layout_of().render(SLATE)
    body = text(packed.trunk).partition("<|im_start|>user\n")[2]
    assert body == (
        "Query: who pays?\n\nCandidates:\n# Guide > Money\n[1] Fees: The owner pays.\n[2] Nobody.\n"
        "[3] Loose: No page.\n# Guide > Money\n[4] Late: Pay more.\n\nQuery: who pays?\n"
        "For each candidate: is it worth opening to find what the query asks for? Write the candidate, "
        "a colon, and yes or no.<|im_end|>\n<|im_start|>assistant\n"
        "<think>\n\n</think>\n\n"
    )
    assert [text(branch) for branch in packed.branches] == ["[1] Fees:", "[2]:", "[3] Loose:", "[4] Late:"]
    assert spans(packed) == ["Fees: The owner pays.", "Nobody.", "Loose: No page.", "Late: Pay more."]
    assert packed.notes == ((),)
    assert packed.num_tokens == len(packed.trunk) + len(packed.tree.ids)


def test_ids_are_never_shown():
    slate = Slate("q", (Candidate("secret-id-7", "t", "x"),))
    packed = layout_of().render(slate)
    assert "secret" not in text(packed.trunk) + text(packed.branches[0])


def test_branch_may_leave_the_title_out():
    assert [text(branch) for branch in layout_of(branch="tag").render(SLATE).branches] == [
        "[1]:", "[2]:", "[3]:", "[4]:"
    ]  # fmt: skip


def test_pointer_reads_the_trunk_alone():
    layout = layout_of(head="pointer")
    packed = layout.render(SLATE)
    assert packed.branches == [] and len(packed.ends) == 4 and layout.label_ids is None
    cue = layout.prompt.cue
    assert cue.startswith(" ") and len(cue) > 10
    assert f"# Guide > Money\n[1] Fees: The owner pays.{cue}\n[2] Nobody.{cue}\n[3] Loose" in text(packed.trunk)
    assert spans(packed) == [
        f"Fees: The owner pays.{cue}",
        f"Nobody.{cue}",
        f"Loose: No page.{cue}",
        f"Late: Pay more.{cue}",
    ]
    assert text(packed.trunk[packed.queries[0].start :]) == f"\nQuery: who pays?{cue}"
    assert layout.render_choice(SLATE) == packed


def test_choice_labels_close_with_a_bracket():
    packed = layout_of().render_choice(SLATE)
    assert text(packed.trunk).endswith("</think>\n\n[")
    assert [text(label) for label in packed.branches] == ["1]", "2]", "3]", "4]"]


def test_no_label_begins_another():
    labels = layout_of().render_choice(make_slate(255, words=1)).branches
    assert len(labels) == len({tuple(label) for label in labels}) == 255
    for short in labels:
        assert sum(long[: len(short)] == short for long in labels) == 1


def test_questions_choose_branches_and_ends():
    layout = layout_of()
    every, some = layout.render(SLATE), layout.render(SLATE, questions=[3, 1])
    assert some.trunk == every.trunk
    assert some.branches == [every.branches[3], every.branches[1]]
    assert some.ends == [every.ends[3], every.ends[1]] and some.starts == [every.starts[3], every.starts[1]]
    assert layout.render(SLATE, questions=[]).branches == []


@pytest.mark.parametrize("question", [4, -1])
def test_question_about_nobody_is_refused(question):
    with pytest.raises(ValueError, match=f"candidate {question} of a slate of 4"):
        layout_of().render(SLATE, questions=[question])


def test_empty_slate_is_refused():
    with pytest.raises(ValueError, match="no candidates"):
        layout_of().render(Slate("where?", ()))


def test_what_is_cut_is_noted():
    layout = layout_of(max_candidate_tokens=9, max_brief_tokens=5, max_query_tokens=6)
    slate = Slate(
        "a query", (Candidate("p", "", "0123456789", "a long heading"), Candidate("i", "0123", "45", "", True))
    )
    packed = layout.render(slate)
    [notes] = packed.notes
    assert notes == (
        "query cut from 8 to 6 tokens",
        "heading above p cut from 15 to 9 tokens",
        "text of p cut from 11 to 9 tokens",
        "text of i cut from 9 to 5 tokens",
    )
    assert "Query: a que\n\nCandidates:\n# a long h\n[1] 01234567\n[2] 0123\n\nQuery: a que\n" in text(packed.trunk)
    assert [text(branch) for branch in packed.branches] == ["[1]:", "[2] 0123:"]
    long_title = Slate("q", (Candidate("p", "0123456789", "x"),))
    assert text(layout.render(long_title).branches[0]) == "[1] 01234567:"


def test_a_long_query_may_lose_its_middle():
    packed = layout_of(max_query_tokens=6, query_cut="middle").render(Slate("abcdefghij", (Candidate("p", "", "x"),)))
    assert packed.notes == (("query cut from 11 to 6 tokens, its middle left out",),)
    assert "Query: abhij\n" in text(packed.trunk)  # a space and two letters, then the last three
    odd = layout_of(max_query_tokens=5, query_cut="middle").render(Slate("abcdefghij", (Candidate("p", "", "x"),)))
    assert "Query: abij\n" in text(odd.trunk)
    fits = layout_of(max_query_tokens=11, query_cut="middle").render(Slate("abcdefghij", (Candidate("p", "", "x"),)))
    assert fits.notes == ((),) and "Query: abcdefghij\n" in text(fits.trunk)


def test_texts_are_tokenised_once(monkeypatch):
    seen = []
    data = SafeTokenizer.data
    monkeypatch.setattr(SafeTokenizer, "data", lambda self, words: (seen.append(words), data(self, words))[1])
    layout = layout_of()
    slate = make_slate(8)
    layout.render(slate)
    seen.clear()
    layout.render(slate)
    layout.render(slate, questions=[1, 2])
    layout.render_choice(slate)
    list(map(layout.num_tokens, slate.candidates))
    layout.render(Slate(slate.query, slate.candidates[::-1]))
    assert seen == []
    layout.render(Slate("another query", slate.candidates))
    assert seen == [" another query"]


def test_rendering_again_gives_the_same():
    """No list that is remembered grows in a caller's hands."""
    layout = layout_of()
    first = layout.render(SLATE)
    first.trunk.append(1)
    first.branches[0].append(1)
    again = layout.render(SLATE)
    assert again.trunk == first.trunk[:-1] and again.branches[0] == first.branches[0][:-1]
    layout.render_choice(SLATE).branches[0].append(1)
    assert text(layout.render_choice(SLATE).branches[0]) == "1]"


words = st.lists(st.sampled_from([*WORDS, "[12]", "漢字"]), max_size=30).map(" ".join)
candidates = st.builds(Candidate, st.just("x"), words, words, words, st.booleans())


@lru_cache
def small_layout(head, branch):
    return layout_of(head=head, branch=branch, max_candidate_tokens=20, max_brief_tokens=9, max_query_tokens=16)


@given(
    st.text("ab ", max_size=40),
    st.lists(candidates, min_size=1, max_size=8),
    st.sampled_from(["pointer", "yes_no"]),
    st.sampled_from(["tag", "tag_title"]),
    st.integers(0, 4),
)
@settings(max_examples=80, deadline=None)
def test_budget_is_an_upper_bound(query, chosen, head, branch, copies):
    """The frame, the longest query and the sum over candidates are never less than the tokens that are read."""
    layout = small_layout(head, branch)
    slate = Slate(query, tuple(replace(c, id=str(n)) for n, c in enumerate((chosen * 4**copies)[:254])))
    budget = sum(layout.num_tokens(c) for c in slate.candidates)
    frame = layout.config.max_slate_tokens - layout.max_candidate_tokens_per_slate
    for packed in (layout.render(slate), layout.render_choice(slate), layout.render_choice(slate, none=True)):
        assert packed.num_tokens <= frame + budget


@pytest.mark.parametrize("head", ["pointer", "yes_no"])
def test_slate_that_cannot_hold_one_candidate_is_refused(head):
    settings = {"head": head, "max_candidate_tokens": 100, "max_query_tokens": 50}
    fits = bisect_left(range(2000), True, key=lambda n: n > 0 and _fits(max_slate_tokens=n, **settings))
    with pytest.raises(ValueError, match=rf"max_slate_tokens={fits - 1} cannot hold one candidate.*=100.*=50"):
        layout_of(max_slate_tokens=fits - 1, **settings)
    layout = layout_of(max_slate_tokens=fits, **settings)
    worst = Candidate("x", "t" * 100, "x" * 100, "g" * 100)
    packed = layout.render(Slate("q" * 50, (worst,)))
    assert packed.num_tokens <= fits


def _fits(**decision):
    try:
        layout_of(**decision)
    except ValueError:
        return False
    return True
