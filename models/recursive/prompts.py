"""From a state to the text that is encoded: s = [i; q; ctx(O_s)] (RDR Eq. 1), written by a `PromptConfig`.

    root, and any role without observations   head(root instruction, q)
    wrap=replace    head(update instruction, q) + newline + layout(n)(documents)
    wrap=keep       head(root instruction, q) + newline + update instruction + newline + layout(n)(documents)
    feedback        head(root instruction, q) [+ newline + feedback instruction] + newline + feedback_layout(documents)
    recovery_view   as above with all observed documents but the last, then newline + incorrect(last)

Training, mining and search render here and nowhere else; `RENDERER_VERSION` changes with any rule above.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from string import Formatter
from typing import Any, Self

from ..config import check_choice, check_positive
from ..prompts import prompt_hash
from ..protocols import State
from .instructions import root_instruction, root_wordings, wordings
from .traversal import ROLES
from .yaml_file import check_keys, close_keys, read_yaml, text_of

__all__ = [
    "Layout",
    "Piece",
    "PromptConfig",
    "RenderedState",
    "preset",
    "render",
    "root_instruction",
    "root_wordings",
    "wordings",
]

RENDERER_VERSION = 1
UPDATE_ROLES = tuple(role for role in ROLES if role != "root")
_WRAPS = ("replace", "keep")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How the observed documents of a state are written: `header` on a line of its own, then one `item` a line.

    `{i}` counts documents from 1, `{text}` is a document's text. An empty header writes no line.
    """

    header: str = ""
    item: str = "Document {i}: {text}"


@dataclass(frozen=True, slots=True)
class Piece:
    """Text of a state: words of ours (`ours`), or data (queries, documents, instructions that came with a query)."""

    text: str
    ours: bool


@dataclass(frozen=True, slots=True)
class RenderedState:
    """The text of a state in pieces. Only in pieces of ours may a control token be meant as such."""

    pieces: tuple[Piece, ...]

    @property
    def text(self) -> str:
        """All pieces together."""
        return "".join(piece.text for piece in self.pieces)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptConfig:
    """Instructions, and how states are laid out.

    name: how reports call it.
    root: the root instruction, where a state brings none (null: each state must bring one; "": none is written).
    instructions: the update instruction of each role (`continuation`, `recovery`, `recovery_view`, `feedback`,
        `assembly`).
    primary_role: the role of the states with observations that a search forms.
    wrap: `replace`: the update instruction takes the place of the root instruction; `keep`: it follows the query.
    wrap_by_role: other values of `wrap` for single roles.
    head: how instruction and query are written.
    layouts: how observations are written, by the number of documents; `default_layout` for all other numbers.
    feedback_layout: the layout of joint feedback (null: as any other state).
    incorrect: how the last observation of a recovery view is written.
    strip: cut white space around instruction, query and documents.
    observation_max_tokens: longer observed documents are cut (null: not). More tells the encoder more of each
        document, and costs tokens in every state below.

    Raises:
        ValueError: a value that cannot be rendered; names the key and the value.
    """

    name: str = "custom"
    root: str | None = None
    instructions: Mapping[str, str] = field(default_factory=dict)
    primary_role: str = "continuation"
    wrap: str = "replace"
    wrap_by_role: Mapping[str, str] = field(default_factory=dict)
    head: str = "Instruct: {instruction}\nQuery:{query}"
    layouts: Mapping[int, Layout] = field(default_factory=dict)
    default_layout: Layout = field(default_factory=Layout)
    feedback_layout: Layout | None = None
    incorrect: str = "Retrieved (incorrect):\n{text}"
    strip: bool = False
    observation_max_tokens: int | None = 512

    def __post_init__(self) -> None:
        check_choice("prompts.primary_role", self.primary_role, UPDATE_ROLES)
        check_choice("prompts.wrap", self.wrap, _WRAPS)
        for role, wrap in self.wrap_by_role.items():
            check_choice("prompts.wrap_by_role", role, UPDATE_ROLES)
            check_choice(f"prompts.wrap_by_role.{role}", wrap, _WRAPS)
        for role in self.instructions:
            check_choice("prompts.instructions", role, UPDATE_ROLES)
        check_positive("prompts.observation_max_tokens", self.observation_max_tokens)
        _check_template("prompts.head", self.head, needed=("query",), allowed=("instruction",))
        _check_template("prompts.incorrect", self.incorrect, needed=("text",))
        for key, layout in self._named_layouts():
            _check_template(f"prompts.{key}.item", layout.item, needed=("text",), allowed=("i",))
        for number in self.layouts:
            if number < 1:
                raise ValueError(f"prompts.layouts.{number}: a layout is for a number of documents, 1 or more")

    def _named_layouts(self) -> Iterator[tuple[str, Layout]]:
        yield from ((f"layouts.{number}", layout) for number, layout in self.layouts.items())
        yield "default_layout", self.default_layout
        if self.feedback_layout is not None:
            yield "feedback_layout", self.feedback_layout

    def layout(self, documents: int) -> Layout:
        """The layout of so many observed documents."""
        return self.layouts.get(documents, self.default_layout)

    def own_words(self) -> Iterator[str]:
        """Every text of ours that may stand in a state."""
        yield from (self.root or "", self.head, self.incorrect, *self.instructions.values())
        for _, layout in self._named_layouts():
            yield from (layout.header, layout.item)

    @property
    def sha256(self) -> str:
        """Changes with every word and rule."""
        return prompt_hash(self)

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON, which `from_dict` reads."""
        return {**asdict(self), "layouts": {str(number): asdict(layout) for number, layout in self.layouts.items()}}

    @classmethod
    def from_yaml(cls, path: str | Path) -> Self:
        """Read a file of your own; its keys are those of this class, and `preset`: where what it leaves out comes from.

        Without `preset` what is left out has the defaults of this class. `instructions` changes the roles that it
        names and no other.

        Raises:
            FileNotFoundError: no such file.
            ValueError: no YAML, or a key or value that cannot be; names the file, the key and the value.
        """
        return cls.from_dict(read_yaml(path), str(path))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], where: str = "prompts") -> Self:
        """As `from_yaml`, of what was read already; `where` begins the error messages."""
        given = dict(values)
        check_keys(given, ("preset", *(f.name for f in fields(cls))), where)
        start = text_of(given.pop("preset"), f"{where}: preset") if "preset" in given else None
        changes = {key: _read_value(key, value, where) for key, value in given.items()}
        try:
            base = cls() if start is None else preset(start)
            if "instructions" in changes:
                changes["instructions"] = {**base.instructions, **changes["instructions"]}
            return replace(base, **changes)  # type: ignore[return-value]
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error


def render(config: PromptConfig, state: State) -> RenderedState:
    """The text of a state, in pieces; nothing is cut here.

    Raises:
        ValueError: an unknown role, a root state with observations, or no instruction for the role.
    """
    if state.role not in ROLES:
        raise ValueError(f"State.role={state.role!r} is not a role; use one of: {', '.join(ROLES)}")
    if state.role == "root" and state.observed:
        raise ValueError(
            f"a root state observes nothing, this one has {len(state.observed)} documents; "
            f"use State.role={config.primary_role!r}"
        )
    pieces = list(_render_pieces(config, _stripped(state) if config.strip else state))
    return RenderedState(tuple(piece for piece in pieces if piece.text))


def _stripped(state: State) -> State:
    instruction = None if state.instruction is None else state.instruction.strip()
    observed = tuple(text.strip() for text in state.observed)
    return replace(state, query=state.query.strip(), observed=observed, instruction=instruction)


def _render_pieces(config: PromptConfig, state: State) -> Iterator[Piece]:
    if state.role == "root" or (not state.observed and state.role != "feedback"):
        yield from _head(config, state, _root(config, state))
        return
    feedback = state.role == "feedback"
    update = Piece(config.instructions.get("feedback", "") if feedback else _update(config, state.role), True)
    if not feedback and config.wrap_by_role.get(state.role, config.wrap) == "replace":
        yield from _head(config, state, update)
    else:
        yield from _head(config, state, _root(config, state))
        if update.text:
            yield Piece("\n" + update.text, True)
    view = state.role == "recovery_view"
    shown = state.observed[:-1] if view else state.observed
    if shown or feedback:
        layout = config.feedback_layout if feedback and config.feedback_layout else config.layout(len(shown))
        yield from _documents(layout, shown)
    if view:
        yield Piece("\n", True)
        yield from _fill(config.incorrect, {"text": Piece(state.observed[-1], False)})


def _documents(layout: Layout, texts: tuple[str, ...]) -> Iterator[Piece]:
    yield Piece("\n" + (layout.header + "\n" if layout.header else ""), True)
    for number, text in enumerate(texts):
        if number:
            yield Piece("\n", True)
        yield from _fill(layout.item, {"i": Piece(str(number + 1), True), "text": Piece(text, False)})


def _head(config: PromptConfig, state: State, instruction: Piece) -> Iterator[Piece]:
    if config.strip:
        instruction = replace(instruction, text=instruction.text.strip())
    return _fill(config.head, {"instruction": instruction, "query": Piece(state.query, False)})


def _root(config: PromptConfig, state: State) -> Piece:
    if state.instruction is not None:
        return Piece(state.instruction, False)
    if config.root is None:
        raise ValueError(
            f"the prompts {config.name!r} have no root instruction of their own (prompts.root=null): give one with the "
            "query (State.instruction; root_instruction(suite, task) has those of the benchmarks), or set prompts.root"
        )
    return Piece(config.root, True)


def _update(config: PromptConfig, role: str) -> str:
    if role not in config.instructions:
        raise ValueError(
            f"the prompts {config.name!r} have no instruction for the role {role!r}: set prompts.instructions.{role}"
        )
    return config.instructions[role]


def _fill(template: str, values: Mapping[str, Piece]) -> Iterator[Piece]:
    for literal, name, _, _ in Formatter().parse(template):
        yield Piece(literal, True)
        if name is not None:
            yield values[name]


def _check_template(key: str, template: str, needed: tuple[str, ...], allowed: tuple[str, ...] = ()) -> None:
    choices = ", ".join(f"{{{name}}}" for name in (*needed, *allowed))
    try:
        parts = [part for part in Formatter().parse(template) if part[1] is not None]
    except ValueError as error:
        raise ValueError(f"{key}={template!r}: {error}; a brace that is meant as such is written twice") from error
    names = [name for _, name, _, _ in parts]
    for _, name, form, conversion in parts:
        if name not in (*needed, *allowed) or form or conversion:
            field_text = f"{name}{'!' if conversion else ''}{conversion or ''}{':' if form else ''}{form}"
            raise ValueError(f"{key}={template!r} has {{{field_text}}}, none of {choices}; other braces: write {{{{")
    for name in needed:
        if names.count(name) != 1:
            raise ValueError(
                f"{key}={template!r} must have {{{name}}} exactly once, it has it {names.count(name)} times"
            )


def _read_value(key: str, value: Any, where: str) -> Any:
    spot = f"{where}: {key}"
    if key in ("instructions", "wrap_by_role"):
        return {role: text_of(text, f"{spot}.{role}") for role, text in _mapping(value, spot).items()}
    if key == "layouts":
        return {_number(n, spot): _read_layout(layout, f"{spot}.{n}") for n, layout in _mapping(value, spot).items()}
    if key == "default_layout" or (key == "feedback_layout" and value is not None):
        return _read_layout(value, spot)
    if key == "strip" and not isinstance(value, bool):
        raise ValueError(f"{spot}={value!r} must be true or false")
    if key == "observation_max_tokens" and not (value is None or type(value) is int):
        raise ValueError(f"{spot}={value!r} must be a whole number, or null")
    if key in ("strip", "observation_max_tokens") or (key in ("root", "feedback_layout") and value is None):
        return value
    return text_of(value, spot)


def _read_layout(value: Any, spot: str) -> Layout:
    given = _mapping(value, spot)
    check_keys(given, tuple(f.name for f in fields(Layout)), spot)
    return Layout(**{key: text_of(text, f"{spot}.{key}") for key, text in given.items()})


def _mapping(value: Any, spot: str) -> Mapping[Any, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{spot}={value!r} must hold keys and values")
    return value


def _number(value: Any, spot: str) -> int:
    if type(value) is int or (isinstance(value, str) and value.isdecimal()):
        return int(value)
    raise ValueError(f"{spot}.{value}: a layout is for a number of documents, such as 1")


def _multi_hop() -> PromptConfig:
    return PromptConfig(name="multi-hop", **_words("multi-hop"))


def _single_hop(name: str = "single-hop", primary_role: str = "recovery") -> PromptConfig:
    context = Layout(header="Retrieved Context:")
    return PromptConfig(
        name=name,
        primary_role=primary_role,
        wrap="keep",
        head="Instruct: {instruction}\nQuery: {query}",
        layouts={1: context},
        default_layout=Layout(item="Incorrect document {i}: {text}"),
        feedback_layout=context,
        strip=True,
        observation_max_tokens=None,
        **_words(name),
    )


def _plain() -> PromptConfig:
    nothing = dict.fromkeys(UPDATE_ROLES, "")
    return PromptConfig(
        name="plain",
        root="",
        instructions=nothing,
        wrap="keep",
        head="{query}",
        default_layout=Layout(item="{text}"),
        incorrect="{text}",
    )


def _words(name: str) -> dict[str, Any]:
    # The first wording of each role is the one that is searched with; training draws among all.
    return {
        "root": wordings(name, "root")[0],
        "instructions": {role: wordings(name, role)[0] for role in UPDATE_ROLES},
    }


_PRESETS = {
    "multi-hop": _multi_hop,
    "single-hop": _single_hop,
    "single-hop-continuation": lambda: _single_hop("single-hop-continuation", "continuation"),
    "bright-pro": lambda: _single_hop("bright-pro", "continuation"),
    "plain": _plain,
}
PRESETS = tuple(_PRESETS)


def preset(name: str) -> PromptConfig:
    """A named configuration: `multi-hop`, `single-hop`, `single-hop-continuation`, `bright-pro`, or `plain`.

    `plain` is query and documents, one a line, without instructions: for encoders that were not taught any.

    Raises:
        ValueError: no preset of that name; lists them.
    """
    if name not in _PRESETS:
        raise ValueError(f"there is no prompt preset {name!r}{close_keys(name, PRESETS)}; use {', '.join(PRESETS)}")
    return _PRESETS[name]()


def open_prompts(name: str) -> PromptConfig:
    """A preset by its name, or the prompts of a YAML file.

    Raises:
        FileNotFoundError: it ends in .yaml or .yml, and there is no such file.
        ValueError: no preset of that name, or a file that cannot be read as prompts.
    """
    return PromptConfig.from_yaml(name) if name.endswith((".yaml", ".yml")) else preset(name)
