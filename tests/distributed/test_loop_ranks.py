import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from dist import free_port, run_ranks
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy
from toy_objective import ToyModel, ToyObjective, toy_config

from retrail.train.distributed import Ranks, make_accelerator
from retrail.train.loop import fit
from retrail.train.optim import Optimizer
from retrail.train.sampler import Sampler, step_rows
from retrail.train.signals import Interrupted
from retrail.train.step import NonFiniteError, Stepper

pytestmark = pytest.mark.dist
HELPERS = Path(__file__).parents[1] / "helpers"


def gradients(batch_size, max_tokens, steps=3):
    """Loss and clipped-by-nothing gradients of the first steps, as lists, by parameter name."""
    config = toy_config(batch_size=batch_size, max_tokens=max_tokens)
    accelerator = make_accelerator(config.runtime)
    ranks = Ranks(accelerator)
    model, objective = ToyModel(), ToyObjective()
    optimizer = Optimizer(model, replace(config.optim, max_grad_norm=1e9), 10)
    sampler = Sampler(
        num_rows=objective.num_rows, length=objective.length, seed=3, batch_size=batch_size, max_tokens=max_tokens
    )
    stepper = Stepper(
        accelerator=accelerator,
        ranks=ranks,
        model=accelerator.prepare_model(model),
        objective=objective,
        sampler=sampler,
        optimizer=optimizer,
    )
    found = []
    optimizer.adamw.register_step_pre_hook(
        lambda *_: found.append({name: p.grad.tolist() for name, p in optimizer.parameters.items()})
    )
    reports = [stepper(step, lambda: 0) for step in range(steps)]
    ranks.close()
    return [(r.loss, r.grad_norm, r.tokens, r.logs) for r in reports], found


def whole_batch_gradients(batch_size):
    """Gradient of the first step by autograd alone, over all rows at once."""
    model, objective = ToyModel(), ToyObjective()
    batch = objective.collate(step_rows(0, seed=3, num_rows=objective.num_rows, batch_size=batch_size))
    tokens, rows = model(batch.ids, batch.segment, batch_size)
    loss = 0.7 * cross_entropy(tokens, batch.targets, ignore_index=-100)
    loss = loss + 1.3 * binary_cross_entropy_with_logits(rows, batch.labels)
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def largest_difference(one, two):
    assert one.keys() == two.keys()
    return max((torch.as_tensor(one[name]) - torch.as_tensor(two[name])).abs().max().item() for name in one)


# 8 rows over 2 ranks; 5 (uneven); 1 row (one rank is empty); 3 ranks with 7; and one row a microbatch, where a
# rank with fewer rows ends on an empty microbatch.
@pytest.mark.parametrize(
    ("world_size", "batch_size", "max_tokens"), [(2, 8, 10_000), (2, 5, 30), (2, 1, 60), (3, 7, 20), (2, 5, 1)]
)
def test_loss_and_gradients_do_not_depend_on_ranks(world_size, batch_size, max_tokens):
    reports, one = gradients(batch_size, max_tokens)
    answers = run_ranks(gradients, world_size, batch_size, max_tokens)
    for ranks_reports, ranks_gradients in answers:
        for step in range(3):
            loss, norm, tokens, logs = ranks_reports[step]
            assert loss == pytest.approx(reports[step][0], abs=1e-6)
            assert norm == pytest.approx(reports[step][1], abs=1e-5)
            assert (tokens, logs) == reports[step][2:]
        # The first step starts from the same parameters; later ones carry Adam's rounding.
        assert largest_difference(ranks_gradients[0], one[0]) < 1e-6
        assert largest_difference(ranks_gradients[2], one[2]) < 1e-4
    assert answers[0] == answers[1]
    loss, expected = whole_batch_gradients(batch_size)
    assert reports[0][0] == pytest.approx(loss, abs=1e-6)
    assert largest_difference(one[0], expected) < 1e-6


def train(run_dir, poison=None, evaluate=None, dropout=0.0, fail_at=None, **loop):
    model, objective = ToyModel(dropout), ToyObjective(poison=poison)
    if fail_at is not None:
        collate = objective.collate
        calls = []

        def failing(rows):
            calls.append(1)
            if len(calls) > fail_at:
                raise OSError("the disk of the data went away")
            return collate(rows)

        objective.collate = failing
    result = fit(
        model,
        objective,
        config=toy_config(**{"max_tokens": 10_000, **loop}),
        run_dir=run_dir,
        evaluate=evaluate,
        fingerprint={"data": "toy"},
    )
    return result, {name: p.tolist() for name, p in model.named_parameters()}


def losses(run_dir):
    return [json.loads(line)["loss"] for line in (run_dir / "log.jsonl").read_text().splitlines()]


def test_two_ranks_train_as_one(tmp_path):
    _, parameters = train(tmp_path / "one", batch_size=3)
    for world_size in (2, 4):
        run_dir = tmp_path / str(world_size)
        answers = run_ranks(lambda run_dir: train(run_dir, batch_size=3), world_size, run_dir)
        assert all(answer == answers[0] for answer in answers)
        assert losses(run_dir) == pytest.approx(losses(tmp_path / "one"), abs=1e-5)
        assert largest_difference(answers[0][1], parameters) < 1e-4


def with_own_data(run_dir):
    config = toy_config(max_tokens=10_000)
    try:
        fit(ToyModel(), ToyObjective(), config=config, run_dir=run_dir, fingerprint={"rows": os.environ["RANK"]})
    except RuntimeError as error:
        return str(error)


def test_ranks_that_prepared_other_rows_are_refused(tmp_path):
    one, two = run_ranks(with_own_data, 2, tmp_path / "run")
    assert "rank 1 has rows=1, but rank 0 has 0" in one and "rank 0 has rows=0, but rank 1 has 1" in two
    assert not (tmp_path / "run" / "checkpoints").exists() and not (tmp_path / "run" / "log.jsonl").exists()


def evaluation(model, step):
    assert os.environ["RANK"] == "0" and not hasattr(model, "module")
    return {"score": -abs(step - 6.0)}


def watched(run_dir):
    """Train while noting every file that this rank writes, deletes or renames in the run folder."""
    touched = []

    def audit(event, args):
        writes = event == "open" and len(args) > 1 and isinstance(args[1], str) and set(args[1]) & set("wxa+")
        if writes or event in ("os.mkdir", "os.rename", "os.remove", "os.rmdir"):
            touched.append((event, str(args[0])))

    sys.addaudithook(audit)
    result, parameters = train(run_dir, None, evaluation, eval_every=3, save_every=4, best_metric="score")
    return result, parameters, [entry for entry in touched if str(run_dir) in entry[1]]


def test_only_rank_0_writes_and_evaluates_and_all_agree(tmp_path):
    one, two = run_ranks(watched, 2, tmp_path / "run")
    assert one[:2] == two[:2]
    assert one[0].best["step"] == 6 and one[0].metrics == {"score": -4.0}
    assert one[2] and not two[2]


def test_resume_on_two_ranks_is_bit_identical(tmp_path):
    whole = run_ranks(lambda: train(tmp_path / "whole", dropout=0.3, save_every=3), 2)
    with pytest.raises(AssertionError, match="went away"):
        run_ranks(lambda: train(tmp_path / "parts", dropout=0.3, save_every=3, fail_at=7), 2)
    assert (tmp_path / "parts" / "checkpoints" / "step_00000006").is_dir()
    again = run_ranks(lambda: train(tmp_path / "parts", dropout=0.3, save_every=3), 2)
    assert again[0][1] == again[1][1] == whole[0][1]
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")


def poisoned(run_dir):
    model_before = None
    try:
        train(run_dir, 11, save_every=1)
    except NonFiniteError as error:
        model_before = str(error)
    return model_before


def test_nan_on_one_rank_stops_all_before_the_step(tmp_path):
    one, two = run_ranks(poisoned, 2, tmp_path / "run")
    assert one == two and one is not None
    # Exactly one rank has the row; the other is not accused.
    assert one.count("rank ") == 1 and "row11" in one
    step = int(one.split()[1].rstrip(":"))
    saved = sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir())
    assert saved == [f"step_{s:08d}" for s in (step - 2, step - 1) if s > 0]


def signalled(run_dir):
    objective = ToyObjective()
    collate = objective.collate
    calls = []

    def at_step_4(rows):
        calls.append(1)
        if len(calls) == 4 and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGTERM)
        return collate(rows)

    objective.collate = at_step_4
    try:
        fit(
            ToyModel(0.3),
            objective,
            config=toy_config(max_tokens=10_000, save_every=3),
            run_dir=run_dir,
            fingerprint={"data": "toy"},
        )
    except Interrupted as stop:
        return stop.exit_code, str(stop)
    return None


def test_signal_on_one_rank_stops_all_after_the_same_step(tmp_path):
    one, two = run_ranks(signalled, 2, tmp_path / "run")
    assert one == two and one[0] == 143 and "SIGTERM after step 4 of 10" in one[1]
    again = run_ranks(lambda: train(tmp_path / "run", dropout=0.3, save_every=3), 2)
    whole = run_ranks(lambda: train(tmp_path / "whole", dropout=0.3, save_every=3), 2)
    assert again[0][1] == whole[0][1]


def failing_evaluation(run_dir):
    def evaluate(model, step):
        raise ZeroDivisionError("no queries")

    try:
        train(run_dir, None, evaluate, eval_every=2)
    except Exception as error:
        return type(error).__name__, str(error)
    return None


def test_failure_of_rank_0_reaches_the_others(tmp_path):
    one, two = run_ranks(failing_evaluation, 2, tmp_path / "run")
    assert one == ("ZeroDivisionError", "no queries")
    assert two == ("RankError", "rank 0 failed: ZeroDivisionError: no queries")


def hang(rank_that_hangs):
    import time

    if int(os.environ["RANK"]) == rank_that_hangs:
        time.sleep(100)


def test_helper_ends_a_hang():
    with pytest.raises(AssertionError, match=r"rank\(s\) \[0, 1\] still run after 1.0 s|rank\(s\) \[1\]"):
        run_ranks(hang, 2, 1, timeout=1.0)


def talk():
    ranks = Ranks(make_accelerator(toy_config().runtime))
    rank = ranks.rank
    try:
        return (
            ranks.sum([1.0, float(rank)]),
            ranks.gather({"name": "é" * (rank + 1)}),
            ranks.union(["a"] if rank else ["b", "a"]),
            ranks.on_main(lambda: {"rank": rank}),
        )
    finally:
        ranks.close()


def test_messages():
    expected = ([2.0, 1.0], [{"name": "é"}, {"name": "éé"}], ("a", "b"), {"rank": 0})
    assert run_ranks(talk, 2) == [expected, expected]


def launch(run_dir, *options, processes=2, environment=None):
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        str(processes),
        "--master-addr",
        "127.0.0.1",
    ]
    clean = {k: v for k, v in os.environ.items() if not k.startswith("ACCELERATE")}
    process = subprocess.Popen(
        [*command, "--master-port", str(free_port()), str(HELPERS / "toy_run.py"), str(run_dir), "steps=2", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=clean | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"} | (environment or {}),
    )
    try:
        out, err = process.communicate(timeout=100)
    except subprocess.TimeoutExpired:
        # torchrun ends its ranks when asked to; killed, it would leave them behind.
        process.terminate()
        process.communicate(timeout=15)
        raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def test_torchrun_needs_no_flag_on_a_cpu(tmp_path):
    result = launch(tmp_path / "run", "processes=2", "device=auto")
    assert result.returncode == 0, result.stderr
    lines = [line for line in result.stdout.splitlines() if line.startswith("done")]
    assert sorted(line.split()[-1] for line in lines) == ["0", "1"] and len({line.split()[1] for line in lines}) == 1


@pytest.mark.parametrize(
    ("options", "environment", "message"),
    [
        (["processes=3"], {}, "runtime.num_processes=3 but 2 rank(s) run"),
        (["naive=1"], {}, "the launcher started 2 rank(s) but Accelerate sees 1"),
        ([], {"ACCELERATE_USE_FSDP": "true"}, "ACCELERATE_USE_FSDP=true asks for sharded parameters"),
    ],
)
def test_wrong_number_of_ranks_is_refused(tmp_path, options, environment, message):
    result = launch(tmp_path / "run", *options, environment=environment)
    assert result.returncode != 0
    assert message in result.stderr
    if not environment:
        assert "ACCELERATE_USE_CPU=true torchrun --nproc-per-node" in result.stderr
    assert not (tmp_path / "run").exists()


def test_accelerate_launch_on_a_cpu_is_refused(tmp_path):
    result = subprocess.run(
        [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2"]
        + [str(HELPERS / "toy_run.py"), str(tmp_path / "run"), "steps=2", "processes=2"],
        capture_output=True,
        text=True,
        timeout=110,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert result.returncode != 0
    assert "runtime.num_processes=2 but 1 rank(s) run" in result.stderr
    assert "ACCELERATE_USE_CPU=true torchrun --nproc-per-node 2" in result.stderr
