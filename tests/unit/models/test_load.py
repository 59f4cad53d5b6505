"""Opening exported folders, and refusing those that would not answer as they were trained to."""

import json
import shutil

import numpy as np
import pytest
import torch
from fakes import make_slate
from safetensors.torch import load_file, save_file

from retrail.data_prep.corpus import Corpus, Node
from retrail.models.config import DecisionConfig, ModelConfig, NavigateConfig
from retrail.models.decision.build import HEAD, build_decision
from retrail.models.decision.scorer import LocalScorer
from retrail.models.exports import RETRIEVAL, ExportError, read_export
from retrail.models.load import load, load_scorer, open_corpus
from retrail.train.export import ExportFacts, export_decision

CPU = torch.device("cpu")
SLATES = [make_slate(4), make_slate(2)]
CORPUS = Corpus.from_nodes(
    [Node("a", None, "A", "first"), Node("a1", "a", "One", "eins"), Node("a2", "a", "Two", "zwei"),
     Node("b", None, "B", "second")]
)  # fmt: skip


def export(folder, head):
    decision = DecisionConfig(head=head, min_label_mass=1e-6, max_candidate_tokens=64)
    model, layout = build_decision(ModelConfig(path="tiny:qwen3", dtype="float32"), decision, CPU)
    if model.head is not None:
        torch.manual_seed(1)
        torch.nn.init.normal_(model.head.query.weight)
        torch.nn.init.normal_(model.head.relevance.weight)
    facts = ExportFacts(name="tiny", navigate=NavigateConfig(keep=[1, 2], choose=2), training={}, data={}, metrics={})
    export_decision(model, layout, folder, facts, SLATES)
    return LocalScorer(model, layout)


@pytest.fixture(scope="module", params=["pointer", "yes_no"])
def exported(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("export") / request.param
    return folder, export(folder, request.param)


@pytest.fixture
def copied(exported, tmp_path):
    """A copy of an export to damage."""
    shutil.copytree(exported[0], tmp_path / "copy")
    return tmp_path / "copy"


def edit(folder, change):
    manifest = json.loads((folder / RETRIEVAL).read_text())
    change(manifest)
    (folder / RETRIEVAL).write_text(json.dumps(manifest))


def test_reloaded_answers_are_the_same(exported):
    folder, scorer = exported
    again = load_scorer(folder, device="cpu", dtype="float32")
    for ask in ("yes", "choose"):
        for first, second in zip(getattr(scorer, ask)(SLATES), getattr(again, ask)(SLATES), strict=True):
            np.testing.assert_allclose(first.values_C, second.values_C, atol=1e-6)
    if scorer.model.head is not None:
        for name, value in scorer.model.head.state_dict().items():
            assert torch.equal(again.model.head.state_dict()[name], value)
    assert not any(p.requires_grad for p in again.model.backbone.parameters())


def test_load_walks_with_the_exported_budgets(exported, tmp_path):
    folder, _ = exported
    navigator = load(folder, CORPUS, device="cpu")
    assert navigator.config == NavigateConfig(keep=[1, 2], choose=2)
    [hits] = navigator.search(["what?"], k=3)
    assert set(hits.ids) <= {"a1", "a2", "b"} and len(hits) >= 1
    assert load(folder, CORPUS, device="cpu", navigate=NavigateConfig(keep=[7])).config.keep == [7]
    CORPUS.save(tmp_path / "prepared" / "corpus")
    for path in (tmp_path / "prepared", tmp_path / "prepared" / "corpus", str(tmp_path / "prepared")):
        assert open_corpus(path).fingerprint == CORPUS.fingerprint
    assert load(folder, tmp_path / "prepared", device="cpu").search(["what?"], k=3)[0].ids == hits.ids


def test_device_that_is_not_there_is_no_fault_of_the_folder(exported, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="^runtime.device='cuda' but torch finds no CUDA device"):
        load_scorer(exported[0], device="cuda")


def test_missing_folders_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere is not an exported retriever: there is no such folder"):
        load(tmp_path / "nowhere", CORPUS)
    (tmp_path / "empty").mkdir()
    with pytest.raises(
        FileNotFoundError, match="empty is not .*: it holds no retrieval.json; make one with `retrail export`"
    ):
        load_scorer(tmp_path / "empty")


def test_broken_json_is_an_error_of_the_export(copied):
    text = (copied / RETRIEVAL).read_text()
    (copied / RETRIEVAL).write_text(text[: len(text) // 2])
    with pytest.raises(ExportError, match=r"retrieval.json: not JSON \(.*export the run again"):
        read_export(copied)
    (copied / RETRIEVAL).write_text("[1]")
    with pytest.raises(ExportError, match="format_version is None, this version reads 1"):
        read_export(copied)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("format_version", 2, "format_version is 2, this version reads 1"),
        ("family", "generative", "family is 'generative', this version knows: decision"),
        ("contract", None, "contract is missing or no table"),
        ("contract", {}, "decision is missing or no table"),
    ],
)
def test_folders_of_other_versions_are_refused(copied, key, value, message):
    edit(copied, lambda manifest: manifest.update({key: value}))
    with pytest.raises(ExportError, match=rf"retrieval.json: {message}"):
        load_scorer(copied, device="cpu")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda c: c["prompt"].update(sha256="0" * 64), r"prompt.sha256 was 0{64} when .* and is [0-9a-f]{64} here"),
        (lambda c: c["prompt"].update(version=0), "prompt.version was 0 when the model was trained and is 2 here"),
        (lambda c: c.update(tokenizer_sha256="abc"), "tokenizer_sha256 was abc when"),
        (lambda c: c.update(label_ids=[1, 2]), r"label_ids was \[1, 2\] when"),
        (lambda c: c.update(extra=1), "extra was 1 when the model was trained and is None here"),
        (lambda c: c["decision"].pop("max_brief_tokens"), "decision.max_brief_tokens was None when .* is 64 here"),
    ],
)  # fmt: skip
def test_what_training_saw_otherwise_is_refused(copied, change, named):
    edit(copied, lambda manifest: change(manifest["contract"]))
    with pytest.raises(ExportError, match=named):
        load_scorer(copied, device="cpu")


def test_words_of_none_belong_to_the_contract_of_who_shows_them(exported, copied):
    stored = json.loads((copied / RETRIEVAL).read_text())["contract"]["prompt"]
    if exported[0].name == "pointer":
        assert set(stored) == {"name", "version", "sha256"}
        return
    edit(copied, lambda m: m["contract"]["prompt"]["none"].update(sha256="0" * 64))
    with pytest.raises(ExportError, match=r"prompt.none.sha256 was 0{64} when .* and is [0-9a-f]{64} here"):
        load_scorer(copied, device="cpu")


def test_context_of_the_model_caps_what_the_export_asks_for(exported, copied):
    """The setting stays what it was; the slates fit."""
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 9000}))
    layout = load_scorer(copied, device="cpu").layout
    assert (layout.config.max_slate_tokens, layout.max_slate_tokens) == (20_000, 9000)
    (copied / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 500}))
    with pytest.raises(
        ExportError, match=r"max_slate_tokens=20000 \(cut to 500, the context of the model\) cannot hold"
    ):
        load_scorer(copied, device="cpu")


def test_settings_that_this_version_does_not_know_are_refused(exported, copied):
    edit(copied, lambda m: m["contract"]["decision"].update(rotations=3))
    with pytest.raises(ExportError, match="decision holds settings that this version does not know: .*rotations"):
        load_scorer(copied, device="cpu")
    edit(copied, lambda m: m["contract"]["decision"].pop("rotations"))
    edit(copied, lambda m: m["contract"]["decision"].update(head="span"))
    with pytest.raises(ExportError, match="decision.head='span' is not a choice"):
        load_scorer(copied, device="cpu")
    edit(copied, lambda m: m["contract"]["decision"].update(head="pointer", instruction="wander"))
    with pytest.raises(ExportError, match="'wander' is unknown"):
        load_scorer(copied, device="cpu")
    shutil.copy(exported[0] / RETRIEVAL, copied)
    edit(copied, lambda m: m["navigate"].update(keep=[0]))
    with pytest.raises(ExportError, match=r"navigate holds settings .*navigate.keep=\[0\]"):
        load(copied, CORPUS, device="cpu")


def test_a_changed_tokenizer_is_noticed(copied):
    file = copied / "tokenizer.json"
    spec = json.loads(file.read_text())
    merges = spec["model"]["merges"]
    merges[0], merges[1] = merges[1], merges[0]
    file.write_text(json.dumps(spec))
    with pytest.raises(ExportError, match="tokenizer_sha256 was"):
        load_scorer(copied, device="cpu")


@pytest.mark.parametrize("share", [0.0, 0.001, 0.5, 0.999])
def test_weights_cut_off_are_named(copied, share):
    file = copied / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(ExportError, match=r"model.safetensors: damaged or cut off \(.*copy or export it again"):
        load_scorer(copied, device="cpu")


def test_weights_that_are_not_there_are_named(copied):
    weights = load_file(copied / "model.safetensors")
    weights.pop("model.layers.0.self_attn.q_proj.weight")
    save_file(weights, copied / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ExportError, match="lacks 1 weights .model.layers.0.self_attn.q_proj.weight"):
        load_scorer(copied, device="cpu")
    (copied / "model.safetensors").unlink()
    with pytest.raises(ExportError, match="holds no model.safetensors"):
        load_scorer(copied, device="cpu")


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("damage", ["cut", "gone"])
def test_other_files_that_are_damaged(copied, name, damage):
    file = copied / name
    content = file.read_bytes()
    file.unlink()
    if damage == "cut":
        file.write_bytes(content[: len(content) // 2])
    with pytest.raises(ExportError):
        load_scorer(copied, device="cpu")


def test_damaged_pointer_head_is_named(tmp_path):
    export(tmp_path / "e", "pointer")
    file = tmp_path / "e" / HEAD
    content = file.read_bytes()
    file.write_bytes(content[:-10])
    with pytest.raises(ExportError, match=r"pointer_head.safetensors: damaged or cut off"):
        load_scorer(tmp_path / "e", device="cpu")
    save_file({"query.weight": torch.zeros(3, 3)}, file)
    with pytest.raises(ExportError, match=r"pointer_head.safetensors: not the pointer head of this model"):
        load_scorer(tmp_path / "e", device="cpu")
    file.unlink()
    with pytest.raises(ExportError, match=r"pointer_head.safetensors: missing, but decision.head is pointer"):
        load_scorer(tmp_path / "e", device="cpu")


def test_export_from_before_queries_could_lose_their_middle_still_opens(copied):
    edit(copied, lambda manifest: manifest["contract"]["decision"].pop("query_cut"))
    assert load_scorer(copied).layout.config.query_cut == "end"
