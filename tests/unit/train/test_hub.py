"""Uploads to a stand-in of the Hub on this machine, with the client that users have."""

import json

import pytest
from fake_hub import TOKEN, fake_hub

from retrail.models.exports import FORMAT_VERSION
from retrail.train.hub import check_repo, push


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """The stand-in; the client is online for it, and asks for its token where users keep theirs."""
    import huggingface_hub.constants as constants
    from huggingface_hub import close_session

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # the stand-in speaks the older upload
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no token here"))
    with fake_hub() as server:
        yield server
    close_session()


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "d0"
    folder.mkdir()
    (folder / "retrieval.json").write_text(json.dumps({"format_version": FORMAT_VERSION, "family": "decision"}))
    (folder / "model.safetensors").write_bytes(bytes(range(256)) * 4000)
    (folder / "README.md").write_text("---\nlibrary_name: transformers\n---\n# d0 é\n")
    (folder / "empty.txt").touch()
    return folder


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_what_arrives_is_what_was_sent(hub, folder):
    before = contents(folder)
    address = push(folder, "org/name", endpoint=hub.url)
    assert address == f"{hub.url}/org/name/commit/1"
    assert {name: data for name, data in hub.repos["org/name"].items() if name != ".gitattributes"} == before
    assert hub.commits == 1
    assert hub.created[0]["visibility"] == "private" and hub.created[0]["type"] == "model"
    assert contents(folder) == before


def test_again_into_the_same_repository(hub, folder):
    push(folder, "org/name", endpoint=hub.url)
    (folder / "README.md").write_text("# better\n")
    push(folder, "org/name", endpoint=hub.url, private=False)
    assert hub.repos["org/name"]["README.md"] == b"# better\n"
    assert hub.created[1]["visibility"] == "public"


@pytest.mark.parametrize(
    ("part", "status", "fix"),
    [
        ("/api/repos/create", 401, "hf auth login"),
        ("/api/repos/create", 403, "a token that may write"),
        ("/preupload/", 403, "a token that may write"),
        ("/blob/", 403, "a token that may write"),
        ("/commit/", 401, "hf auth login"),
        ("/commit/", 422, "hf auth whoami"),
    ],
)
def test_a_refusal_says_what_to_do_and_not_the_token(hub, folder, part, status, fix):
    hub.refuse[part] = status
    before = contents(folder)
    with pytest.raises(RuntimeError) as caught:
        push(folder, "org/name", endpoint=hub.url)
    message = str(caught.value)
    assert message.startswith("hub=org/name: the upload failed") and fix in message
    assert str(folder) in message and "\n" not in message
    assert TOKEN not in message and TOKEN not in repr(caught.value.__cause__)
    assert contents(folder) == before


def test_a_wrong_token_is_not_shown(hub, folder, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_wrongtoken")
    with pytest.raises(RuntimeError, match="Log in with") as caught:
        push(folder, "org/name", endpoint=hub.url)
    assert "hf_wrong" not in str(caught.value)


def test_nobody_answers(hub, folder):
    hub.shutdown()
    hub.server_close()
    with pytest.raises(RuntimeError, match="the upload failed .*Look at the network"):
        push(folder, "org/name", endpoint=hub.url)


def test_offline(folder):
    with pytest.raises(RuntimeError, match="offline mode"):
        push(folder, "org/name", endpoint="http://127.0.0.1:9")


@pytest.mark.parametrize("repo", ["name", "a/b/c", "/name", "org/", "org/na me", "org/..", "org/-x", "org/x.git", ""])
def test_bad_names_are_refused_before_any_request(hub, folder, repo):
    with pytest.raises(ValueError, match="hub="):
        push(folder, repo, endpoint=hub.url)
    with pytest.raises(ValueError, match="hub="):
        check_repo(repo)
    assert hub.requests == []


def test_only_exports_are_uploaded(hub, tmp_path):
    (tmp_path / "thesis").mkdir()
    with pytest.raises(FileNotFoundError, match="not an exported retriever"):
        push(tmp_path / "thesis", "org/name", endpoint=hub.url)
    assert hub.requests == []
