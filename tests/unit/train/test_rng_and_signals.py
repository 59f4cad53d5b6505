import json
import os
import random
import signal
import threading

import numpy as np
import pytest
import torch

from retrail.train.rng import preserved_rng, rng_state, seed_all, set_rng_state
from retrail.train.signals import SignalFlag, StopWaiting


def draw():
    # gauss() and standard_normal() keep a second value for the next call: part of the state.
    return random.gauss(0, 1), random.random(), np.random.standard_normal(3).tolist(), torch.randn(3).tolist()


def test_state_survives_json():
    seed_all(1, 2)
    draw()
    random.gauss(0, 1), np.random.standard_normal()
    state = json.loads(json.dumps(rng_state()))
    expected = [draw(), draw()]
    seed_all(9)
    set_rng_state(state)
    assert [draw(), draw()] == expected


def test_seeds_of_ranks_differ_and_repeat():
    draws = []
    for parts in ((0, 0), (0, 1), (1, 0), (0, 0)):
        seed_all(*parts)
        draws.append(draw())
    assert draws[0] == draws[3]
    for part in range(4):
        assert len({str(d[part]) for d in draws[:3]}) == 3


def test_preserved_even_if_it_fails():
    seed_all(3)
    expected = draw()
    seed_all(3)
    with pytest.raises(KeyError), preserved_rng():
        draw()
        raise KeyError
    assert draw() == expected


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_flag_rises_and_handlers_come_back(signum):
    before = signal.getsignal(signum)
    with SignalFlag() as flag:
        assert flag.signum == 0
        os.kill(os.getpid(), signum)
        assert flag.signum == signum
        with pytest.raises(StopWaiting), flag.raising():
            pytest.fail("a signal that came before must not wait either")
    assert signal.getsignal(signum) is before


def test_waiting_is_cut_short():
    with SignalFlag() as flag:
        with pytest.raises(StopWaiting), flag.raising():
            os.kill(os.getpid(), signal.SIGTERM)
            for _ in range(1000):
                pass
            pytest.fail("not raised")
        assert flag.signum == signal.SIGTERM


def test_outside_the_main_thread_it_says_so(caplog):
    def body():
        with SignalFlag() as flag:
            assert flag.signum == 0

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert "outside the main thread" in caplog.text
