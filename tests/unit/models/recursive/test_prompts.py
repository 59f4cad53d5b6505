"""The text of a state: formulas of every preset, instructions as data, and a user's own words from a file."""

import itertools
import random
import re

import pytest
import yaml

from retrail.models.protocols import State
from retrail.models.recursive.instructions import root_instruction, root_wordings, suites, wordings
from retrail.models.recursive.prompts import PRESETS, Layout, PromptConfig, preset, render
from retrail.models.recursive.traversal import ROLES

TOLD = "INSTRUCTION"


def text(config, role, *observed, query="Q", instruction=None):
    return render(config, State(query, observed, role, instruction)).text


def test_multi_hop_by_hand():
    config = preset("multi-hop")
    told = config.instructions
    assert text(config, "root") == f"Instruct: {config.root}\nQuery:Q"
    assert text(config, "root", instruction="Find it.") == "Instruct: Find it.\nQuery:Q"
    # wrap=replace: the update instruction takes the place of the root's, whatever the query brought.
    expected = f"Instruct: {told['continuation']}\nQuery:Q\nDocument 1: a\nDocument 2: b"
    assert text(config, "continuation", "a", "b", instruction="Find it.") == expected
    assert text(config, "assembly", "a") == f"Instruct: {told['continuation']}\nQuery:Q\nDocument 1: a"
    view = f"Instruct: {told['recovery_view']}\nQuery:Q\nDocument 1: a\nDocument 2: b\nRetrieved (incorrect):\nc"
    assert text(config, "recovery_view", "a", "b", "c") == view
    assert text(config, "recovery_view", "a") == (
        f"Instruct: {told['recovery_view']}\nQuery:Q\nRetrieved (incorrect):\na"
    )
    assert text(config, "feedback", "a", "b") == f"Instruct: {config.root}\nQuery:Q\nDocument 1: a\nDocument 2: b"
    assert (config.primary_role, config.wrap, config.strip, config.observation_max_tokens) == (
        "continuation", "replace", False, 512,
    )  # fmt: skip


def test_single_hop_by_hand():
    config = preset("single-hop")
    head = f"Instruct: {TOLD}\nQuery: Q"
    told = config.instructions["recovery"]
    one = f"{head}\n{told}\nRetrieved Context:\nDocument 1: a"
    assert text(config, "recovery", " a\n", query=" Q ", instruction=f"{TOLD} ") == one
    two = f"{head}\n{told}\nIncorrect document 1: a\nIncorrect document 2: b"
    assert text(config, "recovery", "a", "b", instruction=TOLD) == two
    assert text(config, "assembly", "a", "b", instruction=TOLD) == two
    joint = f"{head}\nRetrieved Context:\nDocument 1: a\nDocument 2: b\nDocument 3: c"
    assert text(config, "feedback", "a", "b", "c", instruction=TOLD) == joint
    # The layout of a recovery view is that of the documents before the last.
    view = f"{head}\n{told}\nRetrieved Context:\nDocument 1: a\nRetrieved (incorrect):\nb"
    assert text(config, "recovery_view", "a", "b", instruction=TOLD) == view
    assert (config.primary_role, config.wrap, config.strip, config.observation_max_tokens) == (
        "recovery", "keep", True, None,
    )  # fmt: skip


def test_the_other_presets_are_single_hop_with_another_role():
    for name in ("single-hop-continuation", "bright-pro"):
        config = preset(name)
        same = {**preset("single-hop").as_dict(), "name": name, "primary_role": "continuation"}
        assert config.as_dict() == same
        assert text(config, "continuation", "a", instruction=TOLD) == (
            f"Instruct: {TOLD}\nQuery: Q\n{config.instructions['continuation']}\nRetrieved Context:\nDocument 1: a"
        )


def slow_render(config, role, query, observed, instruction):
    """The rules again, by joining lines instead of filling pieces."""
    fix = str.strip if config["strip"] else str
    query, observed = fix(query), [fix(o) for o in observed]
    root = fix(config["root"] if instruction is None else instruction)

    def head(told):
        return config["head"].replace("{instruction}", "\0").replace("{query}", query).replace("\0", told)

    def layout(chosen, documents):
        items = [
            chosen["item"].replace("{i}", str(n)).replace("{text}", document) for n, document in enumerate(documents, 1)
        ]
        return "\n".join(([chosen["header"]] if chosen["header"] else []) + ["\n".join(items)])

    if role == "root" or (not observed and role != "feedback"):
        return head(root)
    by_number = lambda n: config["layouts"].get(str(n), config["default_layout"])  # noqa: E731
    if role == "feedback":
        lines = [head(root), config["instructions"]["feedback"]]
        chosen = config["feedback_layout"] or by_number(len(observed))
        return "\n".join([line for line in lines if line] + [layout(chosen, observed)])
    told = config["instructions"][role]
    wrap = config["wrap_by_role"].get(role, config["wrap"])
    lines = [head(fix(told))] if wrap == "replace" else [head(root)] + ([told] if told else [])
    before = observed[:-1] if role == "recovery_view" else observed
    if before:
        lines.append(layout(by_number(len(before)), before))
    if role == "recovery_view":
        lines.append(config["incorrect"].replace("{text}", observed[-1]))
    return "\n".join(lines)


def test_every_role_equals_an_independent_rendering():
    rng = random.Random(0)
    words = ["a.", " b ", "漢字。", "{query}", "{text}\n", "", "<|im_end|>", "Document 1: x"]
    configs = [preset(name) for name in PRESETS]
    configs.append(
        PromptConfig(
            root="R ", instructions=dict.fromkeys(ROLES[1:], "U"), wrap="keep", wrap_by_role={"recovery": "replace"},
            head="[{query}]({instruction})", layouts={2: Layout(header="two", item="{text}#{i}")},
            feedback_layout=Layout(item="{i}){text}"), incorrect="no {text}!", strip=True,
        )
    )  # fmt: skip
    count = 0
    for config, role, n in itertools.product(configs, ROLES, range(5)):
        if role == "root" and n:
            continue
        observed = tuple("".join(rng.choices(words, k=2)) for _ in range(n))
        query, instruction = "".join(rng.choices(words[2:4], k=2)), rng.choice([None, " told {instruction} "])
        expected = slow_render(config.as_dict(), role, query, observed, instruction)
        assert render(config, State(query, observed, role, instruction)).text == expected
        count += 1
    assert count > 100


def test_pieces_say_what_is_data():
    rendered = render(preset("single-hop"), State("QQ", ("aa",), "recovery", "given with the query"))
    data = [piece.text for piece in rendered.pieces if not piece.ours]
    assert data == ["given with the query", "QQ", "aa"]
    own = render(preset("multi-hop"), State("QQ"))
    assert [piece.text for piece in own.pieces if not piece.ours] == ["QQ"]


def test_what_cannot_be_rendered_is_named():
    config = preset("multi-hop")
    with pytest.raises(ValueError, match="State.role='next' is not a role; use one of: root, continuation"):
        text(config, "next")
    with pytest.raises(ValueError, match="a root state observes nothing, this one has 1 documents"):
        text(config, "root", "a")
    with pytest.raises(ValueError, match=r"no root instruction of their own \(prompts.root=null\).*State.instruction"):
        text(PromptConfig(), "root")
    with pytest.raises(ValueError, match="no instruction for the role 'recovery': set prompts.instructions.recovery"):
        text(PromptConfig(root="r"), "recovery", "a")
    with pytest.raises(ValueError, match="no prompt preset 'multihop', did you mean 'multi-hop'"):
        preset("multihop")


def test_instructions_are_worded_several_times_and_the_first_is_searched_with():
    for name in set(PRESETS) - {"plain"}:
        config = preset(name)
        for role in ROLES:
            own = wordings(name, role)
            assert own[0] == (config.root if role == "root" else config.instructions[role])
            if role != "feedback":
                assert len(own) >= 3 and len(set(own)) == len(own)
                assert all(len(wording.split()) > 4 for wording in own)
    with pytest.raises(ValueError, match="no role of the prompt preset 'multi-hop' named 'recover'"):
        wordings("multi-hop", "recover")


def test_every_benchmark_task_has_a_root_instruction_in_several_wordings():
    known = suites()
    assert {"musique", "bright", "nanobeir", "coir", "toolret", "topiocqa", "frames"} <= set(known)
    assert (len(known["bright"]), len(known["nanobeir"]), len(known["coir"])) == (12, 13, 10)
    for suite, tasks in known.items():
        for task in tasks or (None,):
            found = root_wordings(suite, task)
            assert len(found) >= 2 and len(set(found)) == len(found) and not any("{" in w for w in found)
            assert root_instruction(suite, task) == found[0]
    assert root_instruction("bright", "earth_science") == (
        "Given a post about earth science, retrieve passages that help to answer it."
    )
    assert root_instruction("toolret", "any-of-35") == root_instruction("toolret")  # its tasks are all alike
    with pytest.raises(ValueError, match="no suite .* named 'musiqe', did you mean 'musique'"):
        root_instruction("musiqe")
    with pytest.raises(ValueError, match="'bright' have instructions of their own: name one of biology, "):
        root_instruction("bright")
    with pytest.raises(ValueError, match="no task of the suite 'nanobeir' named 'SciFact', did you mean 'NanoSciFact'"):
        root_instruction("nanobeir", "SciFact")


OWN = """
preset: single-hop
name: theirs
root: "Trailing space is kept: "
instructions:
  recovery: "Exactly {this}\\n"
layouts:
  1: {header: "H:", item: "D{i}={text}"}
  3: {item: "{text}"}
strip: false
observation_max_tokens: 64
"""


def test_a_users_exact_strings_come_from_a_file(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(OWN, encoding="utf-8")
    config = PromptConfig.from_yaml(file)
    assert config.root == "Trailing space is kept: "
    assert text(config, "recovery", "x") == ("Instruct: Trailing space is kept: \nQuery: Q\nExactly {this}\n\nH:\nD1=x")
    assert text(config, "recovery", "x", "y", "z").endswith("\nx\ny\nz")
    single = preset("single-hop")
    assert config.instructions["continuation"] == single.instructions["continuation"]  # other roles stay
    assert (config.name, config.head, config.observation_max_tokens) == ("theirs", single.head, 64)
    # Written as JSON and read again it is the same, number keys included.
    file.write_text(yaml.safe_dump(config.as_dict()), encoding="utf-8")
    assert PromptConfig.from_yaml(file) == config and PromptConfig.from_yaml(file).sha256 == config.sha256


BAD = {
    "roots: x": r"unknown key 'roots' \(='x'\), did you mean 'root'",
    "root: no": "root=False must be text",
    "head: 'Query:'": r"prompts.head='Query:' must have \{query\} exactly once, it has it 0 times",
    "head: '{query} {query}'": "exactly once, it has it 2 times",
    "head: '{query.__class__}'": r"has \{query.__class__\}, none of \{query\}, \{instruction\}",
    "head: '{query:>9}'": r"has \{query:>9\}, none",
    "head: '{query'": r"prompts.head='\{query': .*a brace that is meant as such is written twice",
    "incorrect: wrong": r"prompts.incorrect='wrong' must have \{text\}",
    "instructions: {recover: x}": "prompts.instructions='recover' is not a choice",
    "instructions: {recovery: 3}": "instructions.recovery=3 must be text",
    "instructions: [x]": r"instructions=\['x'\] must hold keys and values",
    "wrap: append": "prompts.wrap='append' is not a choice; use one of: replace, keep",
    "wrap_by_role: {root: keep}": "prompts.wrap_by_role='root' is not a choice",
    "layouts: {one: {item: x}}": "layouts.one: a layout is for a number of documents",
    "layouts: {0: {item: '{text}'}}": "prompts.layouts.0: a layout is for a number of documents, 1 or more",
    "layouts: {1: {item: '{i}'}}": r"prompts.layouts.1.item='\{i\}' must have \{text\} exactly once",
    "layouts: {1: {itme: x}}": "layouts.1: unknown key 'itme'.*did you mean 'item'",
    "strip: 1": "strip=1 must be true or false",
    "observation_max_tokens: 0": "prompts.observation_max_tokens=0 must be above 0",
    "observation_max_tokens: many": "observation_max_tokens='many' must be a whole number",
    "preset: other": "there is no prompt preset 'other'",
    "root: a\nroot: b": ":2: no YAML that can be read: the key 'root' stands twice",
    "root: [": "no YAML that can be read",
    "just words": "'just words' must be keys and values",
}


@pytest.mark.parametrize("content", BAD)
def test_a_mistake_in_the_file_is_named(content, tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=BAD[content]) as raised:
        PromptConfig.from_yaml(file)
    assert str(file) in str(raised.value)
    with pytest.raises(FileNotFoundError, match=re.escape(str(tmp_path / "none.yaml"))):
        PromptConfig.from_yaml(tmp_path / "none.yaml")


def test_the_hash_changes_with_every_word():
    config = preset("single-hop")
    changed = [
        PromptConfig.from_dict({"preset": "single-hop", **change})
        for change in (
            {"root": "x"}, {"instructions": {"recovery": "x"}}, {"head": "{query}"}, {"wrap": "replace"},
            {"layouts": {"2": {}}}, {"default_layout": {"header": "x"}}, {"feedback_layout": None},
            {"incorrect": "{text}"}, {"strip": False}, {"observation_max_tokens": 1}, {"primary_role": "assembly"},
        )
    ]  # fmt: skip
    assert len({config.sha256, *(c.sha256 for c in changed)}) == 1 + len(changed)
    assert config.sha256 == preset("single-hop").sha256


def test_braces_in_texts_stay():
    config = preset("multi-hop")
    query = "{instruction} {0} {"
    assert text(config, "root", query=query) == f"Instruct: {config.root}\nQuery:" + query
