"""Find code whose loop state the DSL would drop without a word. Rules: docs/dsl-rules.md.

The tracer decides what a dynamic loop carries from the syntax of its body: names assigned there and
names whose methods are called there. A ring end that a loop advances in any other way keeps its
first phase for ever, and the kernel hangs or reads a slot too early, on a GPU only.

DSL001  a stateful name is handed to a call inside a loop and not rebound by the same statement
DSL002  an end is advanced through something that is not a bare name
DSL003  one variable holds slots of two rings; a slot's ring is fixed while tracing
DSL004  a role calls a method of its own class; it must own its whole loop
DSL005  a ring end whose name does not say so, which hides it from DSL001

Usage: python -m tests.dsl_state_lint PATH...
"""

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

STATEFUL = re.compile(r".*(_producer|_consumer|_signal|_state)|tile_scheduler")
RING_END = re.compile(r".*(_producer|_consumer)")
TAKES_SLOT = {"acquire_and_advance", "wait_and_advance", "wait_beside"}
ADVANCES = TAKES_SLOT | {"advance", "look_ahead"}
SIGNALS = {"wait", "post"}  # in a role only: elsewhere these are ordinary names
TRACED = {"jit", "kernel", "role"}
BLOCKS = ast.stmt | ast.excepthandler | ast.match_case
Found = Iterator[tuple[int, str, str]]


@dataclass(frozen=True, order=True)
class Finding:
    """One violation, printed the way compilers do."""

    path: str
    line: int
    code: str
    message: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.code} {self.message}"


def lint_source(source: str, path: str = "<source>") -> list[Finding]:
    """Check every traced function (decorated with jit, kernel or role) of one file."""
    findings = set()
    for node in ast.walk(ast.parse(source, path)):
        decorators = _decorators(node) if isinstance(node, ast.FunctionDef) else set()
        if decorators & TRACED:
            is_role = "role" in decorators or Path(path).stem.endswith("_roles")
            findings |= {Finding(path, *found) for found in _lint_function(node, is_role)}
    return sorted(findings)


def lint_paths(paths: Iterable[Path]) -> list[Finding]:
    """Check files, and every Python file below folders."""
    files = [f for p in paths for f in (sorted(p.rglob("*.py")) if p.is_dir() else [p])]
    return [finding for f in files for finding in lint_source(f.read_text("utf-8"), str(f))]


def _lint_function(function: ast.FunctionDef, is_role: bool) -> Found:
    for statement in _statements_in_loops(function, in_loop=False):
        yield from _handed_over(statement)
    yield from _mixed_slots(function)
    for call in _calls(function):
        if isinstance(call.func, ast.Attribute):
            yield from _advanced(call.func, is_role)
            if is_role and function.args.args:
                yield from _own_methods(call.func, function.args.args[0].arg)


def _handed_over(statement: ast.stmt) -> Found:
    """DSL001; a compound statement counts with its header alone."""
    header = [n for n in ast.iter_child_nodes(statement) if not isinstance(n, BLOCKS)]
    names = [n for part in header for n in ast.walk(part) if isinstance(n, ast.Name)]
    rebound = {name.id for name in names if isinstance(name.ctx, ast.Store)}
    for call in (call for part in header for call in _calls(part)):
        for name in set(_passed_names(call)) - rebound:
            if STATEFUL.fullmatch(name):
                message = (
                    f"{name} is handed to {ast.unparse(call.func)}() in a loop, which then does "
                    f"not carry it: pass a slot, or return {name} and rebind it"
                )
                yield call.lineno, "DSL001", message


def _advanced(method: ast.Attribute, is_role: bool) -> Found:
    """DSL002 and DSL005."""
    text = f"{ast.unparse(method.value)}.{method.attr}()"
    if not isinstance(method.value, ast.Name):
        if method.attr in ADVANCES or (is_role and method.attr in SIGNALS):
            yield method.lineno, "DSL002", f"{text}: unpack the end to a local name first"
    elif method.attr in ADVANCES:
        surname = RING_END if method.attr in TAKES_SLOT else STATEFUL
        if not surname.fullmatch(method.value.id):
            yield method.lineno, "DSL005", f"{text}: the name must match {surname.pattern}"


def _own_methods(method: ast.Attribute, self_name: str) -> Found:
    """DSL004: the simulator runs a role as plain Python, where a jitted method would compile."""
    owner = ast.unparse(method.value)
    if owner == self_name or owner.startswith("super("):
        message = f"a role calls {owner}.{method.attr}(): make it a verb of ops, or inline it"
        yield method.lineno, "DSL004", message


def _mixed_slots(function: ast.FunctionDef) -> Found:
    """DSL003. Plain aliases (slot = next_slot) are followed until nothing new turns up."""
    bindings = [binding for node in ast.walk(function) for binding in _bindings(node)]
    rings: dict[str, dict[str, int]] = {name: {} for name, _, _ in bindings}
    before = -1
    while before != (before := sum(map(len, rings.values()))):
        for name, value, line in bindings:
            for ring in _rings_of(value, rings):
                rings[name].setdefault(ring, line)
    for name, seen in rings.items():
        if len(seen) > 1:
            message = f"{name} holds slots of {', '.join(sorted(seen))}: use one name per ring"
            yield max(seen.values()), "DSL003", message


def _bindings(node: ast.AST) -> Iterator[tuple[str, ast.expr, int]]:
    """(name, value, line) of each assignment in the node; tuples are taken apart."""
    if not isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr) or node.value is None:
        return
    for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
        pairs = [(target, node.value)]
        if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            pairs = list(zip(target.elts, node.value.elts, strict=False))
        for name, value in pairs:
            if isinstance(name, ast.Name):
                yield name.id, value, node.lineno


def _rings_of(value: ast.expr, rings: dict[str, dict[str, int]]) -> set[str]:
    """The rings whose slot the expression may be."""
    if isinstance(value, ast.IfExp):
        return _rings_of(value.body, rings) | _rings_of(value.orelse, rings)
    if isinstance(value, ast.Name):
        return set(rings.get(value.id, {}))
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
        return {ast.unparse(value.func.value)} if value.func.attr in TAKES_SLOT else set()
    return set()


def _statements_in_loops(node: ast.AST, in_loop: bool) -> Iterator[ast.stmt]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, BLOCKS):
            # A while repeats its condition; a for evaluates its iterable once, before the loop.
            if isinstance(child, ast.While) or (in_loop and isinstance(child, ast.stmt)):
                yield child
            opens = isinstance(child, ast.While) or (
                isinstance(child, ast.For) and not _surely_unrolled(child.iter)
            )
            yield from _statements_in_loops(child, in_loop or opens)


def _surely_unrolled(iterable: ast.expr) -> bool:
    if isinstance(iterable, ast.Call):
        return ast.unparse(iterable.func).endswith("range_constexpr")
    return isinstance(iterable, ast.Tuple | ast.List)


def _decorators(function: ast.FunctionDef) -> set[str]:
    """Last names: jit for @cute.jit and for @cute.jit(...)."""
    nodes = [d.func if isinstance(d, ast.Call) else d for d in function.decorator_list]
    return {ast.unparse(node).rpartition(".")[2] for node in nodes}


def _calls(node: ast.AST) -> Iterator[ast.Call]:
    return (n for n in ast.walk(node) if isinstance(n, ast.Call))


def _passed_names(call: ast.Call) -> Iterator[str]:
    """Bare names within the arguments; x.index and x[0] hand over a value, not the state x."""
    pending: list[ast.AST] = [*call.args, *(keyword.value for keyword in call.keywords)]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Name):
            yield node.id
        elif not isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
            pending.extend(ast.iter_child_nodes(node))


def main(arguments: list[str]) -> int:
    """Print the findings of the given paths; 1 if there are any."""
    if not arguments:
        print(__doc__)
        return 2
    findings = lint_paths(map(Path, arguments))
    print("\n".join(map(str, findings)) or "no findings")
    return int(bool(findings))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
