import gzip

import pytest

from retrail.data_prep.formats.jsonio import expect, optional, read_json, read_jsonl, read_lines, require


def test_reads_plain_and_gzipped_alike(tmp_path):
    content = '{"a": "é"}\n\n{"a": "漢字 🚀"}\r\n{"a": "line\u2028inside"}'.encode()
    (tmp_path / "plain.jsonl").write_bytes(b"\xef\xbb\xbf" + content)
    (tmp_path / "zipped.jsonl").write_bytes(gzip.compress(content))
    expected = [(1, {"a": "é"}), (3, {"a": "漢字 🚀"}), (4, {"a": "line\u2028inside"})]
    assert list(read_jsonl(tmp_path / "plain.jsonl")) == expected
    assert list(read_jsonl(tmp_path / "zipped.jsonl")) == expected


def test_empty_file(tmp_path):
    (tmp_path / "empty").write_bytes(b"")
    assert list(read_lines(tmp_path / "empty")) == []
    with pytest.raises(ValueError, match=r"empty:1: not JSON at column 1"):
        read_json(tmp_path / "empty")


def test_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nothing.json: no such file"):
        read_json(tmp_path / "nothing.json")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"a": 1}\n{"a": \n', r"x\.jsonl:2: not JSON at column"),
        (b'{"a": 1}\n[1]\n', r"x\.jsonl:2: a line must be a JSON object, not an array"),
        (b'{"a": 1}\nnull\n', r"x\.jsonl:2: a line must be a JSON object, not null"),
        (b'{"a": 1}\n{"a": "\xff"}\n', r"x\.jsonl:2: not UTF-8 at byte 7 of the line"),
        (b'{"a": NaN}\n', r"x\.jsonl:1: not strict JSON: NaN is not JSON"),
        (b'{"a": 1, "b": 2, "a": 3}\n', r"x\.jsonl:1: not strict JSON: key 'a' appears twice"),
        (b"[" * 100_000, r"x\.jsonl:1: not strict JSON"),
        (b'{"a": 1}{"a": 2}', r"x\.jsonl:1: not JSON at column 9: Extra data"),
    ],
)
def test_bad_lines_are_named(tmp_path, content, message):
    file = tmp_path / "x.jsonl"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        list(read_jsonl(file))


def test_bad_json_over_several_lines_names_its_line(tmp_path):
    file = tmp_path / "x.json"
    file.write_text('{\n"a": 1,\n"b": oops\n}\n')
    with pytest.raises(ValueError, match=r"x\.json:3: not JSON at column 6"):
        read_json(file)


@pytest.mark.parametrize("keep", [20, -1, -9])
def test_truncated_gzip(tmp_path, keep):
    lines = "".join(f'{{"a": {i}, "b": "{i * 7919 % 10_007}"}}\n' for i in range(5_000)).encode()
    file = tmp_path / "x.jsonl.gz"
    file.write_bytes(gzip.compress(lines)[:keep])
    with pytest.raises(ValueError, match=r"x\.jsonl\.gz: gzip data are damaged or cut off after line \d+"):
        list(read_jsonl(file))


def test_damaged_gzip(tmp_path):
    raw = bytearray(gzip.compress(b'{"a": 1}\n' * 1_000))
    raw[15] ^= 0xFF
    (tmp_path / "x.gz").write_bytes(raw)
    with pytest.raises(ValueError, match="damaged or cut off"):
        list(read_jsonl(tmp_path / "x.gz"))


def test_require_names_file_and_path():
    row = {"a": 1, "t": True, "f": 0.5, "n": None}
    assert require(row, "a", int, "f.json:3") == 1
    assert require(row, "a", float, "f.json:3") == 1.0
    assert require(row, "f", float, "f.json:3") == 0.5
    assert require(row, "t", bool, "f.json:3") is True
    for key, kind, message in [
        ("b", int, r"f\.json:3 has no key 'b' \(it has: 'a', 't', 'f', 'n'\)"),
        ("a", str, r"f\.json:3\['a'\] must be a string, not an integer"),
        ("t", int, r"f\.json:3\['t'\] must be an integer, not a boolean"),
        ("t", float, r"must be a number, not a boolean"),
        ("f", int, r"must be an integer, not a number"),
        ("n", dict, r"must be an object, not null"),
    ]:
        with pytest.raises(ValueError, match=message):
            require(row, key, kind, "f.json:3")
    with pytest.raises(ValueError, match=r"it has: none"):
        require({}, "a", int, "x")


def test_optional_takes_the_default_for_missing_and_null_only():
    assert optional({}, "a", str, "x", "default") == "default"
    assert optional({"a": None}, "a", str, "x", "default") == "default"
    assert optional({"a": ""}, "a", str, "x", "default") == ""
    with pytest.raises(ValueError, match=r"x\['a'\] must be a string"):
        optional({"a": 3}, "a", str, "x", "default")


def test_expect():
    assert expect([1], list, "x") == [1]
    with pytest.raises(ValueError, match="x must be an array, not an object"):
        expect({}, list, "x")
