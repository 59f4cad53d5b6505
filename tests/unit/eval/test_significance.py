"""Paired comparison against exact enumeration."""

import itertools

import numpy as np
import pytest

from retrail.eval.significance import paired


def exact_p(differences):
    mean = abs(sum(differences))
    signs = itertools.product((-1, 1), repeat=len(differences))
    flipped = [abs(sum(s * d for s, d in zip(sign, differences, strict=True))) for sign in signs]
    return sum(value >= mean - 1e-12 for value in flipped) / len(flipped)


@pytest.mark.parametrize("seed", range(4))
def test_p_equals_all_sign_flips(seed):
    rng = np.random.default_rng(seed)
    a = {f"q{n}": float(v) for n, v in enumerate(rng.integers(0, 2, 12))}
    b = {f"q{n}": float(v) for n, v in enumerate(rng.random(12))}
    expected = exact_p([a[q] - b[q] for q in a])
    assert paired(a, b, repetitions=40_000).p == pytest.approx(expected, abs=0.012)


def test_interval_and_mean():
    a = {str(n): float(n % 2) for n in range(400)}
    b = dict.fromkeys(a, 0.25)
    found = paired(a, b)
    # The mean of 400 values of +.75 and -.25: .25, standard error .5 / 20.
    assert found.difference == pytest.approx(0.25)
    assert found.low == pytest.approx(0.25 - 1.96 * 0.025, abs=0.004)
    assert found.high == pytest.approx(0.25 + 1.96 * 0.025, abs=0.004)
    assert found.p == pytest.approx(1 / 10_001) and found.queries == 400
    other = paired(b, a)
    assert other.difference == -found.difference and other.p == pytest.approx(found.p)


def test_equal_systems():
    a = {"x": 1.0, "y": 0.0}
    same = paired(a, dict(reversed(a.items())))
    assert (same.difference, same.low, same.high, same.p) == (0.0, 0.0, 0.0, 1.0)


def test_what_cannot_be_paired():
    with pytest.raises(ValueError, match="do not share 2 queries, first 'x'"):
        paired({"x": 1.0}, {"y": 1.0})
    with pytest.raises(ValueError, match="no queries"):
        paired({}, {})
