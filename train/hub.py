"""Upload an export to the Hugging Face Hub."""

from __future__ import annotations

from pathlib import Path
from typing import cast

from ..models.exports import read_export

_LOGIN = "Log in with `hf auth login` or set HF_TOKEN"
_FIXES = {
    401: _LOGIN,
    403: "Use a token that may write to this organisation: `hf auth login` or HF_TOKEN",
}
_RETRY = "Look at the network, and at the login with `hf auth whoami`"


def push(folder: str | Path, repo: str, *, private: bool = True, endpoint: str | None = None) -> str:
    """Create `repo` ("org/name") if need be, upload the folder in one commit, and return the commit's address.

    The token is the one of `hf auth login` or HF_TOKEN. The repository is private unless said otherwise.

    Raises:
        FileNotFoundError: the folder is no export.
        ValueError: `repo` is not ORG/NAME.
        RuntimeError: the Hub refused or could not be reached; nothing was changed on this machine.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    check_repo(repo)
    read_export(folder)
    # The bases: what the client's own HTTP library raises where nobody answers, and OSError. The other two are for
    # answers that the client does not understand, and for its upload of large files.
    bases = cast(tuple[type[Exception], ...], HfHubHTTPError.__bases__)
    failures: tuple[type[Exception], ...] = (*bases, RuntimeError, ValueError)
    api = HfApi(endpoint=endpoint)
    try:
        api.create_repo(repo, repo_type="model", private=private, exist_ok=True)
        commit = api.upload_folder(repo_id=repo, folder_path=str(folder), commit_message="Upload from retrail")
    except failures as error:
        reason = " ".join(str(error).split())
        raise RuntimeError(
            f"hub={repo}: the upload failed ({reason}). {_FIXES.get(_status(error), _RETRY)}, then export again. "
            f"The local folder {folder} is complete"
        ) from error
    return str(commit.commit_url)


def _status(error: BaseException | None) -> int:
    """The HTTP status of `error`, or of the nearest of its causes that has one, else 0."""
    while error is not None:
        status = getattr(getattr(error, "response", None), "status_code", None)
        if status is not None:
            return int(status)
        error = error.__cause__
    return 0


def check_repo(repo: str) -> None:
    """Raise ValueError unless `repo` is ORG/NAME as the Hub allows it (checked before long work starts)."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils._validators import validate_repo_id

    if repo.count("/") != 1 or not all(repo.split("/")):
        raise ValueError(f"hub={repo!r} must be ORG/NAME")
    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise ValueError(f"hub={repo!r}: {error}") from error
