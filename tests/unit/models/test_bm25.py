"""BM25 against a brute-force twin, and the inputs on which BM25 packages fail."""

import math
import random
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrail.data_prep.corpus import Corpus, Node
from retrail.models.bm25 import BM25, split_words, top_k
from retrail.models.protocols import Retriever


def brute_force(texts: list[list[str]], query: list[str], k1: float, b: float) -> list[float]:
    """The formula, term by term, over ready-made tokens."""
    mean = sum(map(len, texts)) / len(texts)
    scores = []
    for text in texts:
        score = 0.0
        for term in query:
            df = sum(term in other for other in texts)
            tf = text.count(term)
            if tf:
                idf = math.log(1 + (len(texts) - df + 0.5) / (df + 0.5))
                score += idf * tf / (tf + k1 * (1 - b + b * len(text) / mean))
        scores.append(score)
    return scores


def search(texts: list[str], query: str, k: int = 10, **options) -> list[str]:
    """Ids (positions as text) that BM25 returns."""
    [hits] = BM25([str(i) for i in range(len(texts))], texts, **options).search([query], k=k)
    return list(hits.ids)


def test_hand_computed_score():
    # N=3, mean length 2; "b" stands in 2 documents, "a" in one.
    [hits] = BM25(["x", "y", "z"], ["a b", "b b b", "c"], language=None, k1=1.0, b=0.5).search(["a b"], k=3)
    idf_a, idf_b = math.log(1 + 2.5 / 1.5), math.log(1 + 1.5 / 2.5)
    expected_x = (idf_a + idf_b) * 1 / (1 + 1 * (0.5 + 0.5 * 2 / 2))
    expected_y = idf_b * 3 / (3 + 1 * (0.5 + 0.5 * 3 / 2))
    assert hits.ids == ("x", "y")
    assert hits.scores == pytest.approx((expected_x, expected_y), rel=1e-6)


@pytest.mark.parametrize("seed", range(30))
def test_equals_brute_force_on_random_corpora(seed):
    rng = random.Random(seed)
    words = [f"w{i}" for i in range(rng.choice([3, 20, 200]))]
    texts = [rng.choices(words, k=rng.choice([0, 1, 5, 40])) for _ in range(rng.randint(1, 40))]
    k1, b = rng.choice([0.0, 0.9, 2.0]), rng.choice([0.0, 0.4, 1.0])
    if not any(texts):
        texts[0] = ["w0"]
    index = BM25([str(i) for i in range(len(texts))], map(" ".join, texts), k1=k1, b=b, language=None)
    queries = [rng.choices([*words, "unknown"], k=rng.randint(0, 30)) for _ in range(10)]
    for query, hits in zip(queries, index.search([" ".join(q) for q in queries], k=1000), strict=True):
        expected = brute_force(texts, query, k1, b)
        np.testing.assert_allclose(index.scores(" ".join(query)), expected, atol=1e-5)
        found = {int(i): score for i, score in zip(hits.ids, hits.scores, strict=True)}
        assert found == pytest.approx({i: s for i, s in enumerate(expected) if s > 0}, abs=1e-5)


def test_agrees_with_bm25s_own_retrieval():
    import bm25s

    rng = random.Random(5)
    texts = [" ".join(rng.choices([f"w{i}" for i in range(300)], k=30)) for _ in range(200)]
    index = bm25s.BM25(k1=0.9, b=0.4, method="lucene")
    index.index([text.split() for text in texts], show_progress=False)
    ours = BM25([str(i) for i in range(200)], texts, language=None)
    for query in ("w1 w2 w3", "w7 w7 w9", "w299"):
        np.testing.assert_allclose(ours.scores(query), index.get_scores(query.split()), atol=1e-5)


def test_is_a_retriever_and_fills_cost():
    index = BM25(["a", "b"], ["cat", "dog"])
    assert isinstance(index, Retriever)
    results = index.search(["dog", "cat", ""], k=1)
    assert [hits.ids for hits in results] == [("b",), ("a",), ()]
    assert all(hits.cost.seconds > 0 for hits in results)
    assert index.search([], k=3) == []


def test_a_batch_gives_what_single_queries_give():
    rng = random.Random(0)
    texts = [" ".join(rng.choices("abcdefghij", k=9)) for _ in range(50)]
    index = BM25([str(i) for i in range(50)], texts)
    queries = ["a b", "c c d", "", "zz", "j"]
    together = index.search(queries, k=7)
    for query, hits in zip(queries, together, strict=True):
        [alone] = index.search([query], k=7)
        assert (alone.ids, alone.scores) == (hits.ids, hits.scores)


def test_the_order_of_query_words_changes_no_score():
    rng = random.Random(1)
    words = [f"w{i}" for i in range(30)]
    index = BM25([str(i) for i in range(60)], [" ".join(rng.choices(words, k=20)) for _ in range(60)])
    query = rng.choices(words, k=25)
    assert index.scores(" ".join(query)).tolist() == index.scores(" ".join(reversed(query))).tolist()


# --- inputs on which bm25s and others fail -----------------------------------------------------------------


def test_k_beyond_the_corpus():
    assert search(["apple pie", "apple", "pear"], "apple", k=1000) == ["1", "0"]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("texts", [[], [""], ["", "   ", "\n"], ["?", "--- ...", "!!"]])
def test_nothing_to_find(texts):
    assert search(texts, "apple") == []


def test_empty_texts_shift_no_ids():
    assert search(["", "apple", "", "pear", ""], "pear") == ["3"]


def test_single_letter_documents():
    assert search(["x y", "y z"], "x") == ["0"]


@pytest.mark.parametrize("query", ["", " ", "?", "zzz", "the"])
def test_a_query_without_known_terms_finds_nothing(query):
    assert search(["apple", "pear"], query) == []


def test_a_query_of_stop_words_finds_nothing():
    assert search(["the apple", "the pear"], "The", stop_words={"the"}) == []
    assert search(["the apple", "the pear"], "The") == ["0", "1"]


def test_documents_that_share_no_term_are_not_returned():
    assert search(["apple", "pear", "plum"], "plum", k=3) == ["2"]


def test_ties_keep_the_order_of_the_corpus():
    texts = ["same words here"] * 50 + ["words"]
    assert search(texts, "same", k=50) == [str(i) for i in range(50)]
    assert search(texts, "same", k=7) == [str(i) for i in range(7)]


def test_c_plus_plus_and_c_sharp():
    texts = ["The C language.", "The C++ language (C++11)", "The C# language", "the r language"]
    assert search(texts, "C++") == ["1"]
    assert search(texts, "c#") == ["2"]
    assert search(texts, "C") == ["0"]
    assert search(texts, "C++20?") == ["1"]


@pytest.mark.parametrize(
    ("text", "query"),
    [
        ("un café noir", "cafe"),
        ("un cafe noir", "CAFÉ"),
        ("un cafe\u0301 noir", "café"),  # composed and decomposed accents
        ("Łódź", "lodz"),
        ("Straße", "STRASSE"),
        ("Smørrebrød", "smorrebrod"),
        ("Tiếng Việt", "tieng viet"),
        ("ＦＵＬＬ width", "full"),
        ("Москва — столица", "москва"),
        ("Ёлка", "елка"),
        ("Ελλάδα", "ελλαδα"),
        ("हिन्दी भाषा", "भाषा"),
        ("اللغة العربية", "العربية"),
        ("東京都に住む", "東京"),
        ("東京都に住む", "都"),
        ("カタカナ", "ｶﾀｶﾅ"),
        ("한국어 형태소", "한국어를"),
        ("ภาษาไทยง่าย", "ไทย"),
        ("where? here!", "where?"),
    ],
)
def test_unicode_matches(text, query):
    assert search(["something else", text], query) == ["1"]


def test_accents_that_carry_meaning_stay():
    assert split_words("йод") == ["йод"]  # not "иод"
    assert split_words("हिन्दी") == ["हिन्दी"]  # one word, vowel signs and all


def test_cjk_tokens():
    assert split_words("東京都", query=True) == ["東京", "京都"]
    assert split_words("東京都") == ["東", "京", "都", "東京", "京都"]
    assert split_words("Python入門3", query=True) == ["python", "入門", "3"]


def test_words():
    assert split_words("Don't re-read user's os_path.join(b'abc') 3.11, I'm") == (
        ["don't", "re", "read", "user's", "os", "path", "join", "b", "abc", "3", "11", "i'm"]
    )
    assert split_words("Don’t") == ["don't"]
    assert split_words("c#minor F## a+ b+++") == ["c#", "minor", "f", "a", "b"]


@given(st.text(st.characters(max_codepoint=127), max_size=60))
@settings(max_examples=150, deadline=None)
def test_plain_ascii_takes_the_same_tokens_by_either_path(text):
    assert split_words(text) == split_words(f"{text} \u2014")  # a dash is no token, but not ASCII


@given(st.text(max_size=40))
@settings(max_examples=150, deadline=None)
def test_any_text_can_be_indexed_and_found(text):
    index = BM25(["a", "b"], ["filler", text])
    hits = index.search([text], k=2)[0]
    assert ("b" in hits.ids) == bool(split_words(text, query=True))


def test_stemming_follows_the_language():
    assert search(["running dogs"], "dog runs") == ["0"]
    assert search(["running dogs"], "dog", language=None) == []
    assert search(["die Häuser"], "Haus", language="german") == ["0"]


def test_repeated_query_terms_add_up():
    index = BM25(["a"], ["cat dog"])
    assert index.scores("cat cat cat")[0] == pytest.approx(3 * index.scores("cat")[0], rel=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"k1": -1}, "bm25.k1=-1"),
        ({"k1": math.nan}, "bm25.k1=nan"),
        ({"b": 1.5}, "bm25.b=1.5"),
        ({"language": "klingon"}, "klingon.*english"),
        ({"stop_words": "the"}, "collection"),
    ],
)
def test_bad_settings(options, message):
    with pytest.raises(ValueError, match=message):
        BM25(["a"], ["b"], **options)


def test_bad_input():
    with pytest.raises(ValueError, match="2 ids but 1 texts"):
        BM25(["a", "b"], ["c"])
    with pytest.raises(ValueError, match="'a' at position 2"):
        BM25(["a", "b", "a"], ["c", "d", "e"])
    with pytest.raises(ValueError, match="k=0"):
        BM25(["a"], ["b"]).search(["b"], k=0)
    with pytest.raises(TypeError, match="in a list"):
        BM25(["a"], ["b"]).search("b", k=1)


def test_from_corpus():
    corpus = Corpus.from_nodes(
        [
            Node("d1", None, "Fruit", "all about fruit"),
            Node("d2", None, "Stone", "all about stones"),
            Node("p1", "d1", "Apple", "a red one"),
            Node("p2", "d1", "Pear", "a green one"),
        ]
    )
    index = BM25.from_corpus(corpus)
    assert index.ids == ("p1", "p2", "d2")
    assert index.search(["apple", "green", "fruit"], k=3)[0].ids == ("p1",)
    assert [hits.ids for hits in index.search(["green", "fruit"], k=3)] == [("p2",), ()]
    upper = BM25.from_corpus(corpus, list(corpus.children(None)), language=None)
    assert upper.ids == ("d1", "d2")
    assert upper.search(["stones"], k=1)[0].ids == ("d2",)


def test_description_tells_indexes_apart():
    described = {
        BM25(["a"], ["b"]).description,
        BM25(["a"], ["b c"]).description,
        BM25(["a"], ["b"], k1=1).description,
        BM25(["a"], ["b"], language=None).description,
    }
    assert len(described) == 4


@given(st.lists(st.integers(-3, 3), max_size=30), st.integers(1, 40))
def test_top_k_is_a_stable_sort_cut_off(scores, k):
    expected = sorted(range(len(scores)), key=lambda i: -scores[i])[:k]
    assert top_k(np.array(scores, dtype=np.float32), k).tolist() == expected


def test_imports_no_torch():
    code = (
        "import sys, retrail.models.bm25 as m; m.BM25(['a'], ['b']).search(['b'], k=1); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
