"""Run in a process of its own: import the standard library and write what is documented in it as JSON Lines.

It imports nothing but the standard library, and nothing imports it: importing hundreds of modules may print, warn
or register handlers, which is why `pydocs` starts this file with `python FILE OUT` and an environment without a
display. One object a line, parents before children, in reading order:

    {"id", "parent", "title", "kind": module|class|routine|attribute|topic, "signature", "doc"}

and, last, {"kind": "failures", "imports": {module: error}}.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import os.path
import pkgutil
import re
import sys
import types
import warnings
from collections.abc import Iterator
from pathlib import Path

# Opens a browser, prints a poem, is for tests or an editor, is deprecated with nothing to read, or is another
# module under the name of one operating system (those of `posixpath` are read as `os.path`).
EXCLUDED = frozenset(
    "antigravity distutils genericpath idlelib lib2to3 msilib nt ntpath nturl2path posix posixpath pydoc_data test "
    "this turtledemo xxlimited xxlimited_35 xxsubtype".split()
)
EXCLUDED_PARTS = frozenset({"test", "tests", "__main__"})
WITHOUT_SUBMODULES = frozenset({"encodings"})
EXTRA_SUBMODULES = {"os": ("os.path",)}
TOPICS_TITLE = "Language reference topics"

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
Record = dict[str, str | None]


class Collector:
    """Walks modules, classes and functions; every object is taken once."""

    def __init__(self) -> None:
        self.failures: dict[str, str] = {}
        self._modules: dict[str, types.ModuleType] = {}
        self._seen: dict[int, object] = {}
        self._ids: set[str] = set()

    def records(self) -> Iterator[Record]:
        """All records, parents before children."""
        tops = [name for name in sorted(sys.stdlib_module_names) if name[0] != "_" and name not in EXCLUDED]
        trees = {name: self._import_tree(name) for name in tops}
        for name in tops:
            if name in self._modules:
                yield from self._module(name, None, trees[name])
        yield from self._topics()

    def _import(self, name: str) -> types.ModuleType | None:
        try:
            module = sys.modules[name] if name == "os.path" else importlib.import_module(name)
        except BaseException as error:  # a module may even exit; what failed is counted and named in the manifest
            if isinstance(error, KeyboardInterrupt):
                raise
            self.failures[name] = type(error).__name__
            return None
        self._modules[name] = module
        return module

    def _import_tree(self, name: str) -> dict[str, list[str]]:
        """Names of the submodules of a module and of each of these, all imported."""
        module = self._import(name)
        if module is None:
            return {}
        path = [] if name in WITHOUT_SUBMODULES else getattr(module, "__path__", [])
        below = [f"{name}.{info.name}" for info in pkgutil.iter_modules(path)]
        below = [sub for sub in below if (last := sub.rpartition(".")[2])[0] != "_" and last not in EXCLUDED_PARTS]
        tree = {name: [*below, *EXTRA_SUBMODULES.get(name, ())]}
        for sub in tree[name]:
            tree |= self._import_tree(sub)
        return tree

    def _module(self, name: str, parent: str | None, tree: dict[str, list[str]]) -> Iterator[Record]:
        if name not in self._modules or name in self._ids:
            return
        module = self._modules[name]
        yield self._record(name, parent, "module", "", module.__doc__)
        for member, value in list(vars(module).items()):
            if member[0] != "_" and self._belongs(value, member, module):
                yield from self._member(f"{name}.{member}", name, member, value)
        for sub in tree.get(name, ()):
            yield from self._module(sub, name, tree)

    def _belongs(self, value: object, member: str, module: types.ModuleType) -> bool:
        """Whether this module is the home of a class or function that was not taken yet.

        The home is the module that the object names. Where that is private, it is the public one of the same name
        (`io` for `_io`) or else the first that lists the object in `__all__`.
        """
        if not (inspect.isclass(value) or inspect.isroutine(value)) or id(value) in self._seen:
            return False
        own_name = getattr(value, "__name__", member)
        if own_name != member and vars(module).get(own_name) is value:
            return False  # another name for what is there under its own
        home, name = getattr(value, "__module__", None) or "", module.__name__
        if name == os.path.__name__:
            belongs = home in ("posixpath", "genericpath", "ntpath")
        elif home in self._modules:
            belongs = home == name
        elif home.lstrip("_") in self._modules:
            belongs = home.lstrip("_") == name
        else:
            belongs = member in getattr(module, "__all__", ())
        if belongs:
            self._seen[id(value)] = value  # kept alive, so that its id stays its own
        return belongs

    def _member(self, node: str, parent: str, name: str, value: object) -> Iterator[Record]:
        if node in self._ids:
            return
        doc = value.__doc__ if isinstance(value.__doc__, str) else None
        if not inspect.isclass(value):
            if doc:
                yield self._record(node, parent, "routine", signature(name, value), doc)
            return
        yield self._record(node, parent, "class", signature(name, value), doc)
        for attribute, raw in list(vars(value).items()):
            if attribute[0] != "_" and f"{node}.{attribute}" not in self._ids:
                yield from self._attribute(node, attribute, raw, value)

    def _attribute(self, node: str, name: str, raw: object, owner: type) -> Iterator[Record]:
        target = raw.__func__ if isinstance(raw, classmethod | staticmethod) else raw
        doc = getattr(target, "__doc__", None)
        if not isinstance(doc, str) or not doc or self._inherited(name, doc, owner):
            return
        if inspect.isroutine(target):
            yield self._record(f"{node}.{name}", node, "routine", signature(name, target), doc)
        elif inspect.isdatadescriptor(target) and not doc.startswith("Alias for field number"):
            yield self._record(f"{node}.{name}", node, "attribute", f"attribute {name}", doc)

    @staticmethod
    def _inherited(name: str, doc: str, owner: type) -> bool:
        return any(getattr(vars(base).get(name), "__doc__", None) == doc for base in owner.__mro__[1:])

    def _topics(self) -> Iterator[Record]:
        module = self._import("pydoc_data.topics")
        if module is None:
            return
        yield self._record("topics", None, "module", "", f"{TOPICS_TITLE}.", TOPICS_TITLE)
        for key, text in sorted(module.topics.items()):
            yield self._record(f"topics/{key}", "topics", "topic", "", text, key)

    def _record(
        self, node: str, parent: str | None, kind: str, signature: str, doc: str | None, title: str | None = None
    ) -> Record:
        self._ids.add(node)
        # A lone surrogate, which UTF-8 cannot hold, is written out as its escape.
        text = inspect.cleandoc(doc).strip().encode(errors="backslashreplace").decode() if doc else ""
        title = node if title is None else title
        return {"id": node, "parent": parent, "title": title, "kind": kind, "signature": signature, "doc": text}


class _Shown:
    """A default value that is shown as given."""

    def __init__(self, shown: str) -> None:
        self._shown = shown

    def __repr__(self) -> str:
        return self._shown


def _default(value: object) -> object:
    """The default, or a stand-in where its repr would tell of this machine (`os.environ`, paths, addresses)."""
    if isinstance(value, str | bytes) and any(
        os.fsencode(prefix) in os.fsencode(value) for prefix in {sys.prefix, sys.base_prefix, os.getcwd()}
    ):
        return _Shown("...")
    if value is None or value is inspect.Parameter.empty or isinstance(value, str | bytes | int | float | complex):
        return value
    if isinstance(value, tuple | list) and type(value).__repr__ in (tuple.__repr__, list.__repr__):
        return type(value)(map(_default, value))
    if inspect.isclass(value) or inspect.isroutine(value):
        return _Shown(getattr(value, "__qualname__", "..."))
    return _Shown("{}" if value == {} else "...")


def signature(name: str, value: object) -> str:
    """`name(parameters)`, or `name(...)` where Python knows none."""
    try:
        found = inspect.signature(value)  # type: ignore[arg-type]
        parameters = [one.replace(default=_default(one.default)) for one in found.parameters.values()]
        return _ADDRESS.sub("", f"{name}{found.replace(parameters=parameters)}")
    except (ValueError, TypeError, AttributeError, NameError):
        return f"{name}(...)"


def main(out: str) -> None:
    """Write the records to `out`."""
    warnings.simplefilter("ignore")
    collector = Collector()
    with Path(out).open("x", encoding="utf-8") as file:
        for record in collector.records():
            file.write(json.dumps(record) + "\n")
        file.write(json.dumps({"kind": "failures", "imports": collector.failures}) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
