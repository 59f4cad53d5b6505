import pytest
import torch

from retrail.train.config import RuntimeConfig
from retrail.train.distributed import check_world_size, launched_processes, make_accelerator


@pytest.mark.parametrize(
    ("environment", "expected"),
    [({}, 1), ({"WORLD_SIZE": "4"}, 4), ({"OMPI_COMM_WORLD_SIZE": "3"}, 3), ({"WORLD_SIZE": " "}, 1)],
)
def test_launched(environment, expected):
    assert launched_processes(environment) == expected


@pytest.mark.parametrize(("asked", "launched", "seen"), [(None, 1, 1), (1, 1, 1), (None, 4, 4), (4, 4, 4)])
def test_agreement(asked, launched, seen):
    check_world_size(asked=asked, launched=launched, seen=seen, cpu=True)


@pytest.mark.parametrize(
    ("asked", "launched", "seen", "cpu", "message"),
    [
        (2, 1, 1, True, "num_processes=2 but 1 rank.*ACCELERATE_USE_CPU=true torchrun --nproc-per-node 2"),
        (2, 1, 1, False, "num_processes=2 but 1 rank.* Use: torchrun --nproc-per-node 2"),
        (1, 2, 2, True, "num_processes=1 but 2 rank.*python -m retrail.scripts.train"),
        (None, 2, 1, True, "started 2 rank.*sees 1.*torchrun --nproc-per-node 2"),
        (2, 2, 1, True, "started 2 rank.*sees 1"),
        (None, 1, 2, True, "started 1 rank.*sees 2"),
    ],
)
def test_disagreement_names_both_numbers_and_the_command(asked, launched, seen, cpu, message):
    with pytest.raises(RuntimeError, match=message):
        check_world_size(asked=asked, launched=launched, seen=seen, cpu=cpu)


@pytest.mark.parametrize(
    ("precision", "bf16", "expected"),
    [("auto", False, "no"), ("auto", True, "bf16"), ("no", True, "no"), ("bf16", False, "bf16")],
)
def test_precision_on_a_cpu(precision, bf16, expected):
    accelerator = make_accelerator(RuntimeConfig(device="cpu", mixed_precision=precision), bf16_parameters=bf16)
    assert accelerator.mixed_precision == expected
    assert accelerator.device.type == "cpu" and accelerator.num_processes == 1


def test_threads():
    before = torch.get_num_threads()
    try:
        make_accelerator(RuntimeConfig(device="cpu", threads=1))
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


def test_absent_cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="runtime.device=cuda, but PyTorch sees no CUDA device"):
        make_accelerator(RuntimeConfig(device="cuda"))


@pytest.mark.parametrize("name", ["ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED"])
def test_sharded_modes_are_refused(monkeypatch, name):
    monkeypatch.setenv(name, "true")
    with pytest.raises(RuntimeError, match=f"{name}=true asks for sharded parameters"):
        make_accelerator(RuntimeConfig(device="cpu"))
