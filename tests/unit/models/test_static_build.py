"""Building stores of static slates: sizes, room, damage, and builds that were killed."""

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from decision_toy import tiny_decision, toy_corpus
from static_toy import KINDS, first, store_of

from retrail.models.decision import static_build
from retrail.models.decision.scorer import LocalScorer
from retrail.models.decision.static import MANIFEST, UNFINISHED, StaticError, StaticSlates
from retrail.models.decision.static_build import build_static, plan_static


def test_sizes_are_those_that_were_planned(tmp_path):
    for head, readout in KINDS:
        model, layout = first(head, readout)
        scorer, corpus = LocalScorer(model, layout), toy_corpus()
        plan = plan_static(scorer, corpus, 2)
        store = build_static(scorer, corpus, plan, tmp_path / head / readout)
        assert plan.kept and not plan.left_out
        for slate in plan.kept:
            assert store.get(slate.key).num_bytes == slate.num_bytes
            assert 0 < store.sizes[slate.key] - slate.num_bytes < 4000
        assert plan.num_bytes == sum(slate.num_bytes for slate in plan.kept)


def test_the_cap_keeps_upper_levels(tmp_path):
    model, layout = first(max_candidates=6)
    scorer, corpus = LocalScorer(model, layout), toy_corpus()
    whole = plan_static(scorer, corpus, 2)
    assert [slate.level for slate in whole.kept] == [0, 1, 1, 1]
    cap = sum(slate.num_bytes for slate in whole.kept[:2])
    plan = plan_static(scorer, corpus, 2, cap)
    assert (plan.kept, plan.left_out) == (whole.kept[:2], whole.kept[2:])
    assert len(plan_static(scorer, corpus, 2, cap - 1).kept) == 1
    first_line, second_line = plan.lines()
    assert first_line.startswith("level 1: 1 slates, 4 candidates, 0.") and "do not fit" not in first_line
    assert "level 2: 1 slates" in second_line and "2 more (" in second_line and "do not fit max_gb" in second_line
    store = build_static(scorer, corpus, plan, tmp_path / "store")
    assert len(store) == 2 and json.loads((store.path / MANIFEST).read_text())["levels"] == [1, 1]
    with pytest.raises(ValueError, match="max_gb is too small for the first slate, which takes .* GB"):
        build_static(scorer, corpus, plan_static(scorer, corpus, 2, 10), tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_a_full_disk_is_known_beforehand(tmp_path, monkeypatch):
    model, layout = first()
    free = static_build.shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(static_build.shutil, "disk_usage", lambda path: free)
    with pytest.raises(OSError, match="the slates need .* GB and the disk has 1e-06 GB left; set max_gb or levels"):
        store_of(model, layout, tmp_path)


def test_a_cut_or_missing_file_is_refused(tmp_path):
    store = store_of(*first(), tmp_path)
    file = store.path / f"{next(iter(store.sizes))}.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-10])
    with pytest.raises(StaticError, match=f"has {len(whole) - 10:,} bytes instead of {len(whole):,}: it was cut off"):
        StaticSlates.open(store.path)
    file.write_bytes(b"\xff" * len(whole))
    with pytest.raises(StaticError, match="safetensors: damaged"):
        StaticSlates.open(store.path).get(file.stem)
    file.unlink()
    with pytest.raises(StaticError, match="safetensors is missing"):
        StaticSlates.open(store.path)


def test_folders_that_hold_no_store(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere has no static slates: there is no such folder"):
        StaticSlates.open(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="it holds no manifest.json; make them with `retrail static`"):
        StaticSlates.open(tmp_path)
    (tmp_path / MANIFEST).write_text('{"format": "retrail-corpus"}')
    with pytest.raises(StaticError, match="is not the manifest of static slates"):
        StaticSlates.open(tmp_path)
    (tmp_path / MANIFEST).write_text('{"format": "retrail-static-slates", "format_version": 9}')
    with pytest.raises(StaticError, match="format_version is 9, this version reads 1"):
        StaticSlates.open(tmp_path)


def test_nothing_is_built_over_other_files(tmp_path):
    model, layout = first()
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="exists and holds no static slates; choose another name"):
        store_of(model, layout, tmp_path)
    (tmp_path / "store" / "notes.txt").unlink()
    store_of(model, layout, tmp_path)
    with pytest.raises(FileExistsError, match="holds static slates already; remove it or choose another name"):
        store_of(model, layout, tmp_path)


CHILD = """
    import os, signal, sys
    from pathlib import Path
    from decision_toy import tiny_decision, toy_corpus
    from retrail.models.decision import static_build
    from retrail.models.decision.scorer import LocalScorer

    model, layout = tiny_decision(order="candidates_first", max_candidates=5)
    scorer, corpus = LocalScorer(model, layout), toy_corpus()
    count, save = [0], static_build.save_file

    def dying(tensors, path):
        count[0] += 1
        if count[0] == 3:  # in the middle of the third file
            Path(path).write_bytes(b"half of a file")
            os.kill(os.getpid(), signal.SIGKILL)
        save(tensors, path)

    static_build.save_file = dying
    static_build.build_static(scorer, corpus, static_build.plan_static(scorer, corpus, 2), sys.argv[1])
"""


def test_a_killed_build_goes_on(tmp_path, monkeypatch):
    folder = tmp_path / "store"
    helpers = str(Path(__file__).resolve().parents[2] / "helpers")
    path = os.pathsep.join([helpers, os.environ.get("PYTHONPATH", "")])
    child = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(CHILD), str(folder)], env={**os.environ, "PYTHONPATH": path}, check=False
    )
    assert child.returncode == -signal.SIGKILL
    assert len(list(folder.glob("*.safetensors"))) == 2 and len(list(folder.glob(".*.tmp"))) == 1
    with pytest.raises(StaticError, match="its build did not end; the same `retrail static` goes on with it"):
        StaticSlates.open(folder)
    other, layout = tiny_decision(order="candidates_first", max_candidates=5, max_brief_tokens=20)
    corpus = toy_corpus()
    with pytest.raises(StaticError, match="max_brief_tokens was 24 when the slates were stored and is 20 here"):
        build_static(LocalScorer(other, layout), corpus, plan_static(LocalScorer(other, layout), corpus, 2), folder)
    model, layout = tiny_decision(order="candidates_first", max_candidates=5)
    scorer = LocalScorer(model, layout)
    written = []
    save = static_build.save_file
    monkeypatch.setattr(static_build, "save_file", lambda tensors, path: (written.append(path), save(tensors, path)))
    store = build_static(scorer, corpus, plan_static(scorer, corpus, 2), folder)
    assert len(store) == 5 and len(written) == 3
    names = {file.name for file in folder.iterdir()}
    assert names == {MANIFEST, *(f"{key}.safetensors" for key in store.sizes)}
    fresh = build_static(scorer, corpus, plan_static(scorer, corpus, 2), tmp_path / "fresh")
    for file in fresh.path.iterdir():
        assert (folder / file.name).read_bytes() == file.read_bytes()


def test_a_build_with_fewer_levels_drops_what_it_does_not_hold(tmp_path, monkeypatch):
    model, layout = first(max_candidates=5)
    scorer, corpus, folder = LocalScorer(model, layout), toy_corpus(), tmp_path / "store"
    monkeypatch.setattr(static_build, "tqdm", lambda **kw: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        build_static(scorer, corpus, plan_static(scorer, corpus, 2), folder)
    monkeypatch.undo()
    (folder / ("0" * 64 + ".safetensors")).write_bytes(b"")
    assert (folder / UNFINISHED).is_file()
    store = build_static(scorer, corpus, plan_static(scorer, corpus, 1), folder)
    assert len(store) == 1 and len(list(folder.iterdir())) == 2
