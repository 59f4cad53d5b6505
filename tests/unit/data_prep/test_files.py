import hashlib

import pytest

from retrail.data_prep.files import check_new_folder, describe_file, new_file, new_folder, scratch_folder


def test_folder_appears_whole(tmp_path):
    with new_folder(tmp_path / "sub" / "a") as folder:
        (folder / "inner").mkdir()
        (folder / "inner" / "x").write_text("x")
        assert not (tmp_path / "sub" / "a").exists()
    assert (tmp_path / "sub" / "a" / "inner" / "x").read_text() == "x"
    assert [p.name for p in (tmp_path / "sub").iterdir()] == ["a"]


def test_folder_leaves_nothing_after_an_error(tmp_path):
    with pytest.raises(RuntimeError), new_folder(tmp_path / "a") as folder:
        (folder / "x").write_text("x")
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_overwritten(tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for name in ("full", "file"):
        with pytest.raises(FileExistsError, match=f"{name} exists already"):
            check_new_folder(tmp_path / name)
        with pytest.raises(FileExistsError), new_folder(tmp_path / name):
            pass
    assert (tmp_path / "full" / "x").read_text() == "mine"
    (tmp_path / "empty").mkdir()
    with new_folder(tmp_path / "empty") as folder:
        (folder / "x").write_text("x")
    assert (tmp_path / "empty" / "x").exists()


def test_file_is_replaced_whole_or_not_at_all(tmp_path):
    file = tmp_path / "f"
    file.write_text("old")
    with pytest.raises(RuntimeError), new_file(file) as handle:
        handle.write(b"half")
        raise RuntimeError
    assert file.read_text() == "old"
    with new_file(file) as handle:
        handle.write(b"new")
        assert file.read_text() == "old"
    assert file.read_text() == "new"
    assert [p.name for p in tmp_path.iterdir()] == ["f"]


def test_scratch_folder_goes_away(tmp_path):
    with scratch_folder(tmp_path / "out") as folder:
        (folder / "x").write_text("x")
        assert folder.parent == tmp_path
    assert list(tmp_path.iterdir()) == []


def test_describe_file(tmp_path):
    (tmp_path / "x.txt").write_bytes(b"abc")
    sha = hashlib.sha256(b"abc").hexdigest()
    assert describe_file(tmp_path / "x.txt") == {"name": "x.txt", "bytes": 3, "sha256": sha}
