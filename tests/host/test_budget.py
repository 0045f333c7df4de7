"""Size budgets: 800 lines a file, 80 lines a function, 8 arguments a signature.

No list of exceptions. One rule: a function that ``flash4/interface.py`` or ``flash4/reference.py``
exports carries the public keyword list, which callers know as one list, and its documentation; so
arguments of that list do not count there, nor do the lines of signature and docstring. If a budget
costs speed, show the numbers and change the budget here.
"""

import ast
import re
from pathlib import Path

import pytest

from tests.source_tree import ROOT, python_files

FILE_LINES = 800
FUNCTION_LINES = 80
ARGUMENTS = 8
PUBLIC_API = "flash4/interface.py"
CARRIES_PUBLIC_KEYWORDS = {PUBLIC_API, "flash4/reference.py"}


def over_budget(path: str, source: str, public_keywords: frozenset[str] = frozenset()) -> list[str]:
    """What exceeds a budget in one file; ``path`` is relative to the repository."""
    tree = ast.parse(source, path)
    public = {id(f) for f in exported_functions(tree)} if path in CARRIES_PUBLIC_KEYWORDS else set()
    found = []
    lines = len(source.splitlines())
    if lines > FILE_LINES:
        found.append(f"{path}: {lines} lines, {FILE_LINES} allowed")
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        where = f"{path}:{node.lineno} {getattr(node, 'name', 'lambda')}()"
        names, first_line = argument_names(node), node.lineno
        if id(node) in public:
            names = [name for name in names if name not in public_keywords]
            first_line = body_line(node)
        lines = node.end_lineno - first_line + 1
        if lines > FUNCTION_LINES:
            found.append(f"{where}: {lines} lines, {FUNCTION_LINES} allowed")
        if len(names) > ARGUMENTS:
            found.append(f"{where}: {len(names)} arguments, {ARGUMENTS} allowed")
    return found


def argument_names(function: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> list[str]:
    """Every argument but self and cls."""
    a = function.args
    every = [*a.posonlyargs, *a.args, a.vararg, *a.kwonlyargs, a.kwarg]
    return [arg.arg for arg in every if arg is not None and arg.arg not in ("self", "cls")]


def body_line(function: ast.FunctionDef) -> int:
    """First line after signature and docstring."""
    documented = ast.get_docstring(function) is not None
    return function.body[0].end_lineno + 1 if documented else function.body[0].lineno


def exported_functions(tree: ast.Module) -> list[ast.FunctionDef]:
    """Module-level functions that the module's ``__all__`` names."""
    exported = set()
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            exported = set(ast.literal_eval(node.value))
    return [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name in exported]


def keywords_of_public_api(source: str) -> frozenset[str]:
    """Every argument name of every function that the interface exports."""
    functions = exported_functions(ast.parse(source))
    return frozenset(name for function in functions for name in argument_names(function))


def function(name: str, arguments: int, lines: int = 2) -> str:
    """A function definition of the given size."""
    names = ", ".join(f"a{i}" for i in range(arguments))
    return f"def {name}({names}):\n" + "    pass\n" * (lines - 1)


METHOD = "class C:\n    def f(self, a, b, c, d, e, /, f, *g, {last}**h): pass\n"


@pytest.mark.parametrize(
    "source",
    [
        "pass\n" * FILE_LINES,
        function("f", ARGUMENTS, FUNCTION_LINES),
        METHOD.format(last=""),
        "",
    ],
)
def test_within_budget(source):
    assert over_budget("flash4/x.py", source) == []


@pytest.mark.parametrize(
    ("source", "excess"),
    [
        ("pass\n" * (FILE_LINES + 1), "801 lines"),
        (function("f", 0, FUNCTION_LINES + 1), "81 lines"),
        ("async " + function("f", 0, FUNCTION_LINES + 1), "81 lines"),
        (function("f", ARGUMENTS + 1), "9 arguments"),
        (METHOD.format(last="i, "), "9 arguments"),
        ("f = lambda a, b, c, d, e, f, g, h, i: 0\n", "9 arguments"),
        ("def outer():\n" + "    def inner(a, b, c, d, e, f, g, h, i): pass\n", "inner(): 9"),
    ],
)
def test_excess_is_reported(source, excess):
    (found,) = over_budget("flash4/x.py", source)
    assert found.startswith("flash4/x.py") and excess in found


def test_only_the_public_keyword_list_is_free():
    interface = '__all__ = ["attend"]\n' + function("attend", 20) + function("helper", 20)
    keywords = keywords_of_public_api(interface)
    assert keywords == {f"a{i}" for i in range(20)}

    def excess(path, source):
        return [found.split()[1] for found in over_budget(path, source, keywords)]

    assert excess(PUBLIC_API, interface) == ["helper():"]
    assert excess("flash4/ops.py", interface) == ["attend():", "helper():"]
    mirror = '__all__ = ["attention"]\n' + function("attention", 20)
    assert excess("flash4/reference.py", mirror) == []
    own = mirror.replace("a1,", "a1, b0, b1, b2, b3, b4, b5, b6, b7, b8,")
    assert excess("flash4/reference.py", own) == ["attention():"], "nine arguments of its own"
    private = mirror.replace("attention(", "_attention(")
    assert excess("flash4/reference.py", private) == ["_attention():"]


@pytest.mark.parametrize("excess", [0, 1])
def test_signature_and_docstring_of_public_functions_are_free(excess):
    signature = "def attend(\n    a,\n):\n"
    docstring = '    """Attend.\n' + "\n" * FUNCTION_LINES + '    """\n'
    body = "    pass\n" * (FUNCTION_LINES + excess)
    source = '__all__ = ["attend"]\n' + signature + docstring + body
    assert len(over_budget(PUBLIC_API, source)) == excess
    assert len(over_budget(PUBLIC_API, source.replace(docstring, ""))) == excess
    assert len(over_budget("flash4/ops.py", source)) == 1


def test_flash4_is_within_budget():
    files = python_files("flash4", "tests", "bench")
    assert files
    interface = Path(ROOT, PUBLIC_API)
    keywords = keywords_of_public_api(interface.read_text("utf-8") if interface.exists() else "")
    found = [
        excess
        for file in files
        for excess in over_budget(
            file.relative_to(ROOT).as_posix(), file.read_text("utf-8"), keywords
        )
    ]
    assert not found, "\n" + "\n".join(found)


def unused_private_names(sources: list[str]) -> set[str]:
    """Private functions and methods that nothing names but their own definition."""
    text = "\n".join(sources)
    defined = set(re.findall(r"\bdef (_[a-z]\w*)\(", text))
    return {name for name in defined if len(re.findall(rf"\b{name}\b", text)) == 1}


def test_unused_private_names_are_found():
    assert unused_private_names(["def _a(): pass", "def _b(): _b2()", "x = _b"]) == {"_a"}


def test_private_functions_are_used():
    """One that is not called may be a step that a kernel lacks, not only text too much."""
    registered = {"_forward_fake", "_backward_fake"}  # by decorators
    sources = [file.read_text("utf-8") for file in python_files("flash4", "bench")]
    assert unused_private_names(sources) <= registered
