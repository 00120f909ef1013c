"""Names and docstrings of the package: what a reader meets must be told apart, and understood by itself."""

import ast
import re
from collections import Counter, defaultdict
from functools import cache
from pathlib import Path

import pytest

import megatron_hexi

PACKAGE = Path(megatron_hexi.__file__).parent

#: A first line that begins so is mostly a fragment, whose noun is missing.
FRAGMENT = re.compile(r"(What|Who|Of|As|Whose|Where|How|That|Those)\b")
#: What a function's docstring begins with: what it does. A verb that is missing here may be added.
VERBS = frozenset(
    re.findall(
        r"[\w-]+",
        """
    Adapt Add Agree All-gather Allocate Allow Answer Append Assign Attend Begin Bring Broadcast Build Call
    Cap Change Check Choose Clear Clip Collect Combine Compare Compile Complete Compute Concatenate Continue
    Convert Convolve Copy Count Create Cut Decorate Derive Divide Do Download Draw Drop Emulate End Enter
    Evaluate Examine Expand Fill Find Gather Give Import Keep Label Launch Leave Let Limit List Load Log
    Lose Make Maximise Measure Merge Mount Move Multiply Name Normalise Note Number Open Pad Pair Parse Pass
    Place Plan Post Predict Prepare Print Put Raise React Read Reassign Receive Recompute Record Redirect
    Refuse Register Release Remove Rename Renumber Replace Replay Report Restore Return Round Run Say Scale
    Search See Send Serve Set Share Show Simulate Skip Sort Split Spread Stand Start Step Stop Store Sum
    Suppress Swap Take Tell Time Train Translate Transpose Try Turn Update Use Wait Whether Write Yield
        """,
    )
)
#: A subject that says nothing without the code, and coined words for "in flight" and "again".
VAGUE = re.compile(
    r"\bunder way\b|\b[Ww]hether (it|there|so|such)\b|(?:^|[;:.] )(?:[Ii]t|[Ss]o|[Tt]here|[Ss]uch)\b(?! as)"
)
#: The docstring of the whole command line, whose help it is.
EXCEPTIONS = {(Path("cli/main.py"), "hexi")}

Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@cache
def classes_and_first_lines() -> tuple[tuple[Path, tuple[str, ...], tuple[str, ...]], ...]:
    """Each module with the names of its classes and the first lines of its docstrings."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        classes = tuple(node.name for node in nodes if isinstance(node, ast.ClassDef))
        texts = [ast.get_docstring(node) for node in nodes if isinstance(node, Documented)]
        lines = tuple(text.splitlines()[0] for text in texts if text)
        found.append((path.relative_to(PACKAGE), classes, lines))
    return tuple(found)


def packages() -> list[str]:
    return sorted({path.parts[0] for path in (p.relative_to(PACKAGE) for p in PACKAGE.rglob("*.py"))})


def test_a_class_name_is_one_class():
    """Also of private classes: one name that is read in two files should mean one thing."""
    places = defaultdict(list)
    for path, classes, _ in classes_and_first_lines():
        for name in classes:
            places[name].append(path)
    shared = {name: paths for name, paths in places.items() if len(paths) > 1}
    assert not shared


def test_a_module_name_is_one_module_in_its_package():
    """Modules of one package import each other by names that are told apart without folders."""
    names = Counter(
        (path.parts[0], path.name) for path, _, _ in classes_and_first_lines() if len(path.parts) > 1
    )
    assert not {key for key, count in names.items() if count > 1 and not key[1].startswith("__")}


@pytest.mark.parametrize("package", packages())
def test_first_lines_are_sentences_or_noun_phrases(package):
    """At most three in a hundred begin with a word that mostly begins a fragment."""
    lines = [
        f"{path}: {line}"
        for path, _, texts in classes_and_first_lines()
        for line in texts
        if path.parts[0] == package
    ]
    fragments = [line for line in lines if FRAGMENT.match(line.partition(": ")[2])]
    assert len(fragments) <= 0.03 * len(lines), fragments


def is_property(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any("property" in ast.unparse(decorator) for decorator in function.decorator_list)


@cache
def summaries_of_functions() -> tuple[tuple[Path, str, str, bool], ...]:
    """The summary of each function's docstring: its first paragraph, and whether it is a property's."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        place = path.relative_to(PACKAGE)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (text := ast.get_docstring(node)):
                summary = " ".join(text.partition("\n\n")[0].split())
                if (place, node.name) not in EXCEPTIONS:
                    found.append((place, node.name, summary, is_property(node)))
    return tuple(found)


@pytest.mark.parametrize("package", packages())
def test_functions_say_what_they_do(package):
    """A verb in the imperative, or *Whether*; properties are named as what they are."""
    odd = [
        f"{path}: {name}: {summary}"
        for path, name, summary, is_named in summaries_of_functions()
        if path.parts[0] == package
        and (VAGUE.search(summary) or not (is_named or summary.split()[0].rstrip(",:;") in VERBS))
    ]
    assert not odd, odd


@pytest.mark.parametrize(
    ("summary", "is_vague"),
    [
        ("Return the seconds that a message is under way.", True),
        ("Whether it fits.", True),
        ("Return whether there is room.", True),
        ("Return a plan; it fits.", True),
        ("Return a name such as ``rack 0``.", False),
        ("Return the first rank that it sends to.", False),
    ],
)
def test_vague_subjects_are_found(summary, is_vague):
    assert bool(VAGUE.search(summary)) == is_vague
