import json

import pytest

from retrail.data_prep.corpus import Corpus
from retrail.data_prep.formats.headings import prep_pages
from retrail.data_prep.formats.html import html_nodes, parse_html
from retrail.data_prep.formats.markdown import markdown_nodes, parse_markdown
from retrail.data_prep.task import Task

MARKDOWN = """---
title: "The Guide"
---
Before any heading.

# Install

How to install.

```
# not a heading
```

## Linux ##

Use apt.

Mac
---

Use brew.

## Empty

# Use {#usage}

Run it.
"""


def outline(nodes):
    return [(node.id, node.parent, node.title, node.text) for node in nodes]


def test_markdown_tree(tmp_path):
    (tmp_path / "a b.md").write_text(MARKDOWN)
    page, *below = outline(markdown_nodes(tmp_path))
    assert page == ("a_b.md", None, "The Guide", "Before any heading.\n\nContents: Install; Use")
    fence = "```\n# not a heading\n```"
    about = "How to install. ``` # not a heading ```\n\nContents: Linux; Mac"
    assert below == [
        ("a_b.md#body", "a_b.md", "The Guide", "Before any heading."),
        ("a_b.md#install", "a_b.md", "Install", about),
        ("a_b.md#install/body", "a_b.md#install", "Install", f"How to install.\n\n{fence}"),
        ("a_b.md#linux", "a_b.md#install", "Linux", "Use apt."),
        ("a_b.md#mac", "a_b.md#install", "Mac", "Use brew."),
        ("a_b.md#usage", "a_b.md", "Use", "Run it."),
    ]


@pytest.mark.parametrize(
    ("text", "titles"),
    [
        ("#no space", []),
        ("One\ntwo\n===\n", ["One two"]),
        ("- item\n---\n", []),
        ("text\n\n---\n\nmore", []),
        ("~~~\n```\n# x\n~~~\n# y\nz", ["y"]),
        ("```\ncode\n```\n---\n", []),
        ("```\n\n# still code\n", []),
        ("---\nno end", []),
        ("---\n---\n# x\n", ["x"]),
        ("---\nSome text\n---\n# x\n", ["Some text", "x"]),
        ("---\nlayout: wide\n# y\n---\n# x\n", ["x"]),
        ("- ```\n  # c\n  ```\n# x\n", ["x"]),
        ("1. ~~~\n    # c\n       ~~~\n# x\n", ["x"]),
        ("``` a\n# c\n``` b\n# d\n```\n# x\n", ["x"]),
        ("<!-- # a\n# b\n-->\n# x\n<!-- c -->\n# y\n", ["x", "y"]),
        ("<!-- a -->\n\nOne\n---\n", ["One"]),
        ("```\n<!--\n```\n# x\n", ["x"]),
    ],
)
def test_what_is_a_markdown_heading(text, titles):
    assert [section.title for section in parse_markdown(text).sections[1:]] == titles


def test_markdown_comments_are_no_text():
    sections = parse_markdown("# A\n<!-- hidden\n\nmore -->\ntext\n\n<!-- never closed\n# B").sections
    assert [(section.title, section.paragraphs) for section in sections[1:]] == [
        ("A", ["text", "<!-- never closed\n# B"])
    ]


def test_html_tree(tmp_path):
    (tmp_path / "p.html").write_text(
        "<html><head><title>Caf&eacute;</title><style>h1{}</style></head><body><nav><a>Menu</a></nav>"
        "<h1 id=top>Caf&eacute;</h1><p>Open <b>daily</b>.<p>Cheap.<script>if (a<b) x()</script>"
        "<h2>Food</h2><ul><li>Soup<li>Bread</ul><h2>Food</h2><pre>a\n  b</pre><h2>Nothing</h2></div></body>"
    )
    [page, *below] = outline(html_nodes(tmp_path))
    assert page == ("p.html", None, "Café", "Open daily. Cheap.\n\nContents: Food; Food")
    assert below == [
        ("p.html#body", "p.html", "Café", "Open daily.\n\nCheap."),
        ("p.html#food", "p.html", "Food", "Soup\nBread"),
        ("p.html#food~2", "p.html", "Food", "a\n  b"),
    ]


@pytest.mark.parametrize("text", ["<h2>A<p>b", "<p>b</div></h1>", "<nav><nav>x</nav></nav>b", "b<!-- c", "&lt;b"])
def test_broken_html_gives_its_text(text):
    assert any("b" in part for section in parse_html(text).sections for part in (section.title, *section.paragraphs))
    assert not any("x" in part for section in parse_html(text).sections for part in section.paragraphs)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<h2>A<p>b</p><p>c", [("A", "b\n\nc")]),  # the heading is never closed
        ("<h2><p>A</p></h2>b", [("A", "b")]),
        ("<nav><nav>x</nav>y</nav>b", [("", "b")]),
        ("<nav>x<svg>y</nav>b", [("", "b")]),
        ("<nav>menu<h1>A</h1><p>b", [("", "menu"), ("A", "b")]),  # nor is the navigation
        ("<nav>menu<script>x()</script><p>b", [("", "menu\n\nb")]),
        ('<div role="navigation">x<div>y</div>z</div>b', [("", "b")]),
        ('<div class="old toc"><ul><li>x<nav><div>y</div></nav>z</ul></div>b', [("", "b")]),
        ('<body class="toc"><p class="toc">b', [("", "b")]),
        ('<div class="protocol">b</div>', [("", "b")]),
    ],
)
def test_navigation_and_what_is_never_closed(text, expected):
    found = [(section.title, "\n\n".join(section.paragraphs)) for section in parse_html(text).sections]
    assert [pair for pair in found if any(pair)] == expected


def test_folders_are_levels(tmp_path):
    (tmp_path / "x" / "y").mkdir(parents=True)
    (tmp_path / "x" / "y" / "p.md").write_text("words only")
    (tmp_path / "x" / "q.md").write_text("# Q\n")  # a heading and nothing below it
    (tmp_path / "r.md").write_text("# R\nroot page")
    corpus = Corpus.from_nodes(markdown_nodes(tmp_path))
    path = corpus.path(corpus.row("x/y/p.md#body"))
    assert [corpus.id(row) for row in path] == ["x/", "x/y/", "x/y/p.md", "x/y/p.md#body"]
    assert corpus.text(corpus.row("x/y/")) == "Contents: p"
    assert "x/q.md" not in corpus
    assert corpus.title(corpus.row("r.md")) == "R"


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such folder"):
        markdown_nodes(tmp_path / "absent")
    with pytest.raises(FileNotFoundError, match=r"no file ending in \.md"):
        markdown_nodes(tmp_path)
    (tmp_path / "e.md").write_text("# Only a heading\n")
    with pytest.raises(FileNotFoundError, match="hold no text"):
        markdown_nodes(tmp_path)
    (tmp_path / "latin.md").write_bytes(b"ok\ncaf\xe9\n")
    with pytest.raises(ValueError, match=r"latin\.md:2: not UTF-8"):
        markdown_nodes(tmp_path)


def test_queries_make_a_task(tmp_path):
    raw = tmp_path / "raw"
    raw.mkdir()
    (raw / "p.md").write_text("# P\n\nwords")
    (raw / "q.jsonl").write_text(json.dumps({"_id": "1", "text": "which?"}) + "\n")
    (raw / "j.tsv").write_text("query-id\tcorpus-id\tscore\n1\tp.md#body\t1\n")
    nodes = markdown_nodes(raw)
    task = prep_pages(raw, tmp_path / "task", nodes, "raw", "q.jsonl", "j.tsv")
    assert isinstance(task, Task) and task.qrels("test") == {"1": {"p.md#body": 1}}
    assert isinstance(prep_pages(raw, tmp_path / "corpus", nodes, "raw", None, None), Corpus)
    with pytest.raises(ValueError, match="go together"):
        prep_pages(raw, tmp_path / "x", nodes, "raw", "q.jsonl", None)


def test_debian_faq(data_dir):
    corpus = Corpus.from_nodes(html_nodes(data_dir / "hier_docs" / "debian-faq"))
    assert len(corpus.children(None)) == 17
    assert not any("Table of Contents" in corpus.text(row) for row in range(len(corpus)))
    row = corpus.row("basic-defs.en.html#whatisdebian")
    assert corpus.title(row).endswith("What is Debian GNU/Linux?") and corpus.is_leaf(row)
