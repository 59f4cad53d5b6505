import numpy as np
import pytest

from retrail.data_prep.corpus import Corpus, Node
from retrail.data_prep.tree import balanced_tree, cluster_pages
from retrail.data_prep.tree_update import add_documents
from retrail.models.protocols import Completion
from retrail.models.summaries import one_sentence, summarise_groups

pytest.importorskip("faiss")


class FakeLM:
    def __init__(self, reply="About {n} things. More.", fail_after=None, description="fake-1"):
        self.reply, self.fail_after, self.description = reply, fail_after, description
        self.prompts = []

    def generate(self, prompts, *, max_tokens, schema=None):
        if self.fail_after is not None and len(self.prompts) >= self.fail_after:
            raise KeyboardInterrupt
        self.prompts += prompts
        return [Completion(self.reply.format(n=len(p.user.splitlines()))) for p in prompts]


@pytest.fixture
def tree():
    corpus = Corpus.from_nodes(Node(f"d{i}", None, f"title {i}", "x") for i in range(20))
    return cluster_pages(corpus, np.random.default_rng(0).normal(size=(20, 4)), 5, balanced=True)


def texts(tree):
    return [tree.corpus.text(tree.corpus.row(group)) for group in tree.group_ids]


def test_each_group_gets_its_sentence_once(tree, tmp_path):
    lm = FakeLM()
    done = summarise_groups(tree, lm, tmp_path / "cache.jsonl")
    assert texts(done.tree) == ["About 4 things."] * 5 and done.failed == ()
    assert len(lm.prompts) == 5
    again = FakeLM(fail_after=0)
    assert (
        summarise_groups(tree, again, tmp_path / "cache.jsonl").tree.corpus.fingerprint == done.tree.corpus.fingerprint
    )


def test_a_killed_run_goes_on(tree, tmp_path):
    cache = tmp_path / "cache.jsonl"
    with pytest.raises(KeyboardInterrupt):
        summarise_groups(tree, FakeLM(fail_after=2), cache, batch_size=1)
    with cache.open("a") as handle:
        handle.write('{"key": "cut o')
    lm = FakeLM()
    done = summarise_groups(tree, lm, cache, batch_size=1)
    assert len(lm.prompts) == 3 and texts(done.tree) == ["About 4 things."] * 5


def test_only_changed_groups_are_asked_for(tree, tmp_path):
    summarise_groups(tree, FakeLM(), tmp_path / "cache.jsonl")
    update = add_documents(tree, [Node("new", None, "new", "x")], tree.centroids_GD[2:3])
    lm = FakeLM()
    summarise_groups(update.tree, lm, tmp_path / "cache.jsonl")
    assert [s.id for s in update.stale] == [tree.group_ids[2]]
    assert len(lm.prompts) == 1 and "- new" in lm.prompts[0].user


def test_another_model_is_asked_anew(tree, tmp_path):
    summarise_groups(tree, FakeLM(), tmp_path / "cache.jsonl")
    lm = FakeLM(description="fake-2")
    summarise_groups(tree, lm, tmp_path / "cache.jsonl")
    assert len(lm.prompts) == 5


def test_another_prompt_is_asked_anew(tree, tmp_path, monkeypatch):
    summarise_groups(tree, FakeLM(), tmp_path / "cache.jsonl")
    monkeypatch.setattr("retrail.models.summaries.SUMMARY_PROMPT_VERSION", "another")
    lm = FakeLM()
    summarise_groups(tree, lm, tmp_path / "cache.jsonl")
    assert len(lm.prompts) == 5


def test_an_empty_reply_is_named_and_asked_again(tree, tmp_path):
    done = summarise_groups(tree, FakeLM("\x07 ..."), tmp_path / "cache.jsonl")
    assert done.failed == tree.group_ids and texts(done.tree) == texts(tree)
    lm = FakeLM()
    assert summarise_groups(tree, lm, tmp_path / "cache.jsonl").failed == () and len(lm.prompts) == 5


def test_titles_are_sampled_and_only_is_kept(tree, tmp_path):
    lm = FakeLM()
    done = summarise_groups(tree, lm, tmp_path / "c.jsonl", only=tree.group_ids[:1], max_titles=2)
    assert [len(p.user.splitlines()) for p in lm.prompts] == [2]
    assert texts(done.tree)[1:] == texts(tree)[1:]


def test_upper_groups_read_the_summaries_below(tmp_path):
    corpus = Corpus.from_nodes(Node(f"d{i}", None, f"title {i}", "x") for i in range(8))
    tree = balanced_tree(corpus, np.random.default_rng(0).normal(size=(8, 4)), 2)
    lm = FakeLM()
    summarise_groups(tree, lm, tmp_path / "c.jsonl")
    assert lm.prompts[-1].user == "- About 2 things.\n- About 2 things."


def test_a_damaged_cache_is_named(tree, tmp_path):
    (tmp_path / "c.jsonl").write_text('{"key": 1}\n')
    with pytest.raises(ValueError, match=r"c\.jsonl:1"):
        summarise_groups(tree, FakeLM(), tmp_path / "c.jsonl")


@pytest.mark.parametrize(
    ("reply", "sentence"),
    [
        ("One.  Two.", "One."),
        ("No end", "No end"),
        ("Rules, e.g. taxes, of J. Smith! Yes", "Rules, e.g. taxes, of J. Smith!"),
        ("a\x00b\u202ec\nd.", "a b c d."),
        ("1. Pages about taxes. More", "Pages about taxes."),
        ("- Roe vs. Wade and St. Louis. More", "Roe vs. Wade and St. Louis."),
        ("3. ", ""),
        (" \n", ""),
        ("?!", ""),
    ],
)
def test_one_sentence(reply, sentence):
    assert one_sentence(reply) == sentence
