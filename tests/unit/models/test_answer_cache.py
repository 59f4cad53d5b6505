"""The cache of answers: threads, processes, and files that are something else."""

import sqlite3
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from retrail.models.answer_cache import AnswerCache


def test_keys_keep_their_parts_apart():
    keys = {AnswerCache.key(*parts) for parts in [("a", "b", "c", "d"), ("ab", "", "c", "d"), ("a", "b", "cd", "")]}
    assert len(keys) == 3 and AnswerCache.key("a", "b", "c", "d") in keys


def test_what_is_put_is_got_by_the_next(tmp_path):
    first = AnswerCache(tmp_path / "c")
    first.put("k", "é")
    first.put("k", "newer")
    first.close()
    second = AnswerCache(tmp_path / "c")
    assert second.get("k") == "newer" and second.get("other") is None
    second.close()


def test_threads_share_one_cache(tmp_path):
    cache = AnswerCache(tmp_path / "c")
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: cache.put(str(n), f"v{n}"), range(400)))
        assert list(pool.map(lambda n: cache.get(str(n)), range(400))) == [f"v{n}" for n in range(400)]
    cache.close()


def test_processes_share_one_file_from_its_beginning(tmp_path):
    code = (
        "import sys\nfrom retrail.models.answer_cache import AnswerCache\n"
        "cache = AnswerCache(sys.argv[1])\n"
        "for n in range(50): cache.put(f'{sys.argv[2]}-{n}', 'x' * 1000)\ncache.close()\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "c")]
    running = [subprocess.Popen([*command, str(n)]) for n in range(3)]
    assert [process.wait(60) for process in running] == [0] * 3
    cache = AnswerCache(tmp_path / "c")
    assert all(cache.get(f"{p}-{n}") == "x" * 1000 for p in range(3) for n in range(50))
    cache.close()


def test_other_files_are_left_alone(tmp_path):
    text = tmp_path / "text"
    text.write_text("not a database " * 100)
    with pytest.raises(ValueError, match="text is no cache of answers"):
        AnswerCache(text)
    assert text.read_text().startswith("not a database")
    other = tmp_path / "other"
    database = sqlite3.connect(other)
    database.execute("CREATE TABLE mine (x)")
    database.commit()
    database.close()
    with pytest.raises(ValueError, match="other is no cache of answers of this version"):
        AnswerCache(other)
