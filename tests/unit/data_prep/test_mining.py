import subprocess
import sys
import textwrap

import numpy as np
import pytest

from retrail.data_prep.mining import Mined, MiningRule, Ranked, join, mine_negatives, ranked_blocks


def block(positive, gold, rows, scores):
    return Ranked(
        np.array(positive, float), np.array(gold, np.int64), np.array(rows, np.int64), np.array(scores, np.float32)
    )


def lists(mined: Mined):
    return [mined.of(i).tolist() for i in range(len(mined))]


def mine(ranked, *, text_keys=None, **rule):
    return lists(join(mine_negatives([ranked], MiningRule(**rule), text_keys=text_keys)))


# Scores 0.9 0.8 0.7 0.6 and padding; the positive is row 1 with 0.8.
TINY = block([0.8], [[1, -1]], [[5, 1, 6, 7, -1]], [[0.9, 0.8, 0.7, 0.6, -np.inf]])


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ({}, [5, 6, 7]),
        ({"count": 2}, [5, 6]),
        ({"count": 100}, [5, 6, 7]),
        ({"absolute_margin": 0.0}, [6, 7]),
        ({"absolute_margin": 0.15}, [7]),
        ({"relative_margin": 0.2}, [7]),  # at most 0.64
        ({"relative_margin": 0.05}, [6, 7]),  # at most 0.76
        ({"absolute_margin": 0.05, "relative_margin": 0.2}, [7]),
        ({"absolute_margin": 0.5}, []),
        ({"ranks": (3, 3)}, [6]),
        ({"ranks": (4, 90)}, [7]),
        ({"ranks": (50, 90)}, []),
    ],
)
def test_by_hand(rule, expected):
    assert mine(TINY, **rule) == [expected]


def test_a_relative_margin_stays_a_margin_below_zero():
    ranked = block([-0.5], [[0]], [[1, 2, 3]], [[-0.48, -0.51, -0.6]])
    assert mine(ranked, relative_margin=0.1) == [[3]]  # at most -0.55, not -0.45


def test_copies_of_a_right_document_are_no_negatives():
    keys = np.array([7, 8, 7, 9, 8], np.uint64)
    ranked = block([0.9, 0.9], [[0, -1], [1, 3]], [[2, 1, 3], [4, 3, 2]], [[0.5, 0.4, 0.3], [0.5, 0.4, 0.3]])
    assert mine(ranked, text_keys=keys) == [[1, 3], [2]]
    assert mine(ranked) == [[2, 1, 3], [4, 2]]


def random_ranked(rng, queries, candidates, documents):
    rows = np.stack([rng.permutation(documents)[:candidates] for _ in range(queries)])
    scores = -np.sort(-rng.uniform(-1, 1, (queries, candidates)).astype(np.float32), axis=1)
    rows[rng.random(rows.shape) < 0.1] = -1
    gold = np.where(rng.random((queries, 3)) < 0.7, rng.integers(documents, size=(queries, 3)), -1)
    return Ranked(rng.uniform(-1, 1, queries), gold, rows, scores)


def brute(ranked, rule, keys):
    """Slow and obvious."""
    result = []
    for q, positive in enumerate(ranked.positive_Q):
        gold = [g for g in ranked.gold_QG[q] if g >= 0]
        kept = []
        for rank in range(rule.ranks[0], rule.ranks[1] + 1):
            if rank > ranked.rows_QC.shape[1]:
                break
            row, score = int(ranked.rows_QC[q, rank - 1]), float(ranked.scores_QC[q, rank - 1])
            if row < 0 or row in gold or keys[row] in [keys[g] for g in gold]:
                continue
            if rule.absolute_margin is not None and score > positive - rule.absolute_margin:
                continue
            if rule.relative_margin is not None and score > positive - rule.relative_margin * abs(positive):
                continue
            kept.append(row)
        result.append(kept[: rule.count])
    return result


def test_against_the_brute_force_whatever_the_blocks():
    rng = np.random.default_rng(0)
    for trial in range(20):
        ranked = random_ranked(rng, 37, int(rng.integers(1, 25)), 40)
        keys = rng.integers(0, 25, 40).astype(np.uint64)
        first = int(rng.integers(1, 10))
        rule = MiningRule(
            count=int(rng.integers(1, 9)),
            absolute_margin=[None, 0.0, 0.1][trial % 3],
            relative_margin=[None, 0.05][trial % 2],
            ranks=(first, first + int(rng.integers(0, 30))),
        )
        expected = brute(ranked, rule, keys)
        for size in (1, 5, 37, 100):
            parts = [
                Ranked(*(getattr(ranked, name)[s : s + size] for name in Ranked.__slots__)) for s in range(0, 37, size)
            ]
            mined = join(mine_negatives(parts, rule, text_keys=keys))
            assert lists(mined) == expected, (trial, size)
            assert mined.offsets.dtype == np.int64 and len(mined.scores) == len(mined.rows)


def test_a_margin_that_leaves_little_keeps_every_query():
    """5 % of relative margin and three negatives wanted: queries with fewer, and with none, keep their place."""
    rng = np.random.default_rng(1)
    scores = -np.sort(-rng.uniform(0.7, 0.82, (500, 20)).astype(np.float32), axis=1)
    rows = np.tile(np.arange(1, 21), (500, 1))
    ranked = Ranked(rng.uniform(0.7, 0.85, 500), np.zeros((500, 1), np.int64), rows, scores)
    sizes = np.diff(join(mine_negatives([ranked], MiningRule(count=3, relative_margin=0.05))).offsets)
    assert len(sizes) == 500
    assert {0, 1, 2, 3} == set(sizes.tolist())


def test_nothing_at_all():
    empty = join(mine_negatives([], MiningRule()))
    assert (len(empty), len(empty.rows)) == (0, 0)
    none = Ranked(np.zeros(2), np.zeros((2, 0), np.int64), np.zeros((2, 0), np.int64), np.zeros((2, 0), np.float32))
    assert mine(none) == [[], []]


def test_broken_scores_are_named_by_their_query():
    bad = block([0.1, np.nan], [[0], [0]], [[1], [1]], [[0.5], [0.5]])
    good = block([0.1] * 3, [[0]] * 3, [[1]] * 3, [[0.5]] * 3)
    with pytest.raises(ValueError, match="query 4: a score is NaN"):
        join(mine_negatives([good, bad], MiningRule()))
    with pytest.raises(ValueError, match=r"do not fit together"):
        join(mine_negatives([Ranked(np.zeros(3), *(getattr(bad, n) for n in Ranked.__slots__[1:]))], MiningRule()))


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({"count": 0}, "count=0"),
        ({"absolute_margin": -0.1}, "absolute_margin=-0.1"),
        ({"relative_margin": float("nan")}, "relative_margin=nan"),
        ({"ranks": (0, 5)}, "no window"),
        ({"ranks": (6, 5)}, "no window"),
    ],
)
def test_bad_rules(rule, message):
    with pytest.raises(ValueError, match=message):
        MiningRule(**rule)


def exact(documents):
    def search(queries, depth):
        scores = queries @ documents.T
        order = np.argsort(-scores, axis=1, kind="stable")[:, :depth]
        return order, np.take_along_axis(scores, order, axis=1)

    return search


def test_searching_in_blocks():
    rng = np.random.default_rng(2)
    documents = rng.normal(size=(60, 8)).astype(np.float32)
    queries = rng.normal(size=(23, 8)).astype(np.float32)
    gold = np.stack([rng.integers(60, size=23), np.full(23, -1)], axis=1)
    results = set()
    for size in (1, 4, 50):
        blocks = list(ranked_blocks(queries, gold, exact(documents), documents.__getitem__, depth=10, block=size))
        positive = np.concatenate([b.positive_Q for b in blocks])
        np.testing.assert_allclose(positive, (queries * documents[gold[:, 0]]).sum(1), rtol=1e-5)
        for b in blocks:  # where the search saw the positive, its very score is compared with
            seen = b.rows_QC == b.gold_QG[:, :1]
            assert (b.positive_Q[seen.any(1)] == b.scores_QC[seen]).all()
        results.add(str(lists(join(mine_negatives(blocks, MiningRule(count=4, absolute_margin=0.2))))))
    assert len(results) == 1
    with pytest.raises(ValueError, match="depth=0"):
        next(ranked_blocks(queries, gold, exact(documents), documents.__getitem__, depth=0))
    with pytest.raises(ValueError, match="23 query vectors, but gold rows of 22"):
        next(ranked_blocks(queries, gold[1:], exact(documents), documents.__getitem__, depth=1))


def test_half_a_million_pairs_in_fixed_memory():
    """A new process, so that its peak is of the mining alone: what 500,000 queries need beyond 50,000 is the result."""
    program = textwrap.dedent("""
        import resource, sys
        import numpy as np
        from retrail.data_prep.mining import MiningRule, Ranked, mine_negatives

        def blocks(queries, size=4096, candidates=30):
            rng = np.random.default_rng(0)
            rows = np.argsort(rng.random((size, candidates)), axis=1)
            scores = -np.sort(-rng.random((size, candidates)).astype(np.float32), axis=1)
            for start in range(0, queries, size):
                n = min(size, queries - start)
                gold = np.full((n, 2), start % 30)
                yield Ranked(rng.random(n), gold, rows[:n] + start % 7, scores[:n])

        total = 0
        for part in mine_negatives(blocks(int(sys.argv[1])), MiningRule(count=3, relative_margin=0.05)):
            total += len(part)
        print(total, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    """)
    peaks = []
    for queries in (50_000, 500_000):
        done = subprocess.run([sys.executable, "-c", program, str(queries)], capture_output=True, text=True, check=True)
        total, peak = done.stdout.split()
        assert int(total) == queries
        peaks.append(float(peak))
    assert peaks[1] - peaks[0] < 8  # MB; 500,000 rankings of 30 would be 180
