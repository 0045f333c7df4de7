"""Mods: callables of the user that are traced into a kernel, and what tells them apart. DSL-free.

A kernel is told apart by plain numbers, so a mod is known by a hash of all that decides what it traces to: its code, its
defaults, what it closes over, and the globals that it names, its helpers included. The same source with the same
numbers is the same kernel, in any process.
"""

import dis
import functools
import hashlib
import types
from typing import NamedTuple

import numpy as np
import torch

AUX_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.int64)
AUX = "aux"  # with a number, name of a tensor that mods read
MAX_AUX_DIMS = 4
MAX_AUX_TENSORS = 8
_AUX_KINDS = len(AUX_DTYPES) * MAX_AUX_DIMS + 1  # and none
_KEY_BYTES = 7


class SeqlenInfo(NamedTuple):
    """What a mod may know about its sequence; as in ``reference``, which imports nothing.

    Attributes:
        seqlen_q: queries in use.
        seqlen_k: keys in use.
        offset_q: row of the first query in packed q, else 0.
        offset_k: row of the first key in packed k, else 0.
    """

    seqlen_q: int
    seqlen_k: int
    offset_q: int
    offset_k: int


_functions: dict[int, object] = {}
_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, np.generic)
# What these hold is told by the versions that every kernel's file name carries, or never changes.
_LIBRARIES = {"builtins", "cmath", "cutlass", "flash4", "functools", "math", "numpy", "operator"}


def register(mod) -> int:
    """Key of a mod, by which ``function`` finds it; 0 for None.

    Raises:
        TypeError: not callable, or it depends on something whose value cannot be told; the message names that.
    """
    if mod is None:
        return 0
    if not callable(mod):
        raise TypeError(f"a mod must be callable, got {mod!r}")
    key = _key_of(mod)
    if key not in _functions:
        frozen = _frozen(mod)
        _functions[key] = frozen if _key_of(frozen) == key else mod
    return key


def _key_of(mod) -> int:
    digest = hashlib.sha256()
    _describe(mod, digest.update, [])
    return int.from_bytes(digest.digest()[:_KEY_BYTES], "big") + 1


def _frozen(mod):
    """A mod with what it closes over and the globals that it sees as they are now.

    Kernels of a backward are traced after the forward was called, when a loop may have changed a number meanwhile.
    """
    if isinstance(mod, functools.partial):
        return functools.partial(_frozen(mod.func), *mod.args, **mod.keywords)
    if not isinstance(mod, types.FunctionType) or _is_known_by_name(mod):
        return mod
    cells = tuple(types.CellType(cell.cell_contents) for cell in mod.__closure__ or ())
    names = mod.__globals__.copy(), mod.__name__
    frozen = types.FunctionType(mod.__code__, *names, mod.__defaults__, cells or None)
    frozen.__kwdefaults__, frozen.__qualname__ = mod.__kwdefaults__, mod.__qualname__
    return frozen


def function(key: int):
    """The mod of a key; None for 0.

    Raises:
        KeyError: this process has not registered it.
        RuntimeError: something that it depends on has changed since then.
    """
    if key == 0:
        return None
    try:
        mod = _functions[key]
    except KeyError:
        raise KeyError(f"mod {key:#x} is not known to this process: register it first") from None
    if _key_of(mod) != key:
        raise RuntimeError(
            f"{mod!r} depends on something that has changed since its call: a kernel would not be what was asked for; "
            "do not change what helpers of a mod read before its kernels are compiled, in the backward too"
        )
    return mod


def register_while_tracing(mod) -> int:
    """``register`` within ``torch.compile``, which compiles again once a number changes that the mod reads from outside.

    Raises:
        TypeError: as ``register``; or what the mod reads from outside cannot be watched.
    """
    if mod is None:
        return 0
    key, variables, cells, numbers = _constants(mod)
    try:
        closure = mod.__closure__
    except AttributeError:  # the mod is made within what is compiled, from values that are watched
        return key
    for i, name in enumerate(variables):
        value = mod.__globals__[name] if cells[i] < 0 else closure[cells[i]].cell_contents
        if value != numbers[i]:  # not now: the comparison makes torch.compile watch the value
            raise TypeError(f"{name}, which a mod depends on, changed meanwhile")
    return key


def constant_while_tracing(function):
    """``torch.compiler.assume_constant_result``, which imports half of PyTorch; torch.compile runs ``function`` itself."""
    function._dynamo_marked_constant = True
    return function


@constant_while_tracing
def _constants(mod) -> tuple[int, tuple, tuple, tuple]:
    """(key, names of variables that a mod reads from outside, their places in its closure or -1, their values)."""
    key = register(mod)
    if not isinstance(mod, types.FunctionType):
        if _reads_numbers(mod):
            raise TypeError(f"{mod!r} reads variables from outside: {_ADVICE}")
        return key, (), (), ()
    outside = _outside(mod)
    for name, value in outside.items():
        known = isinstance(value, _PLAIN) and "." not in name
        if not (known or _is_known_by_name(value)) and _reads_numbers(value):
            raise TypeError(f"a mod depends on {name}: {_ADVICE}")
    plain = {name: value for name, value in outside.items() if isinstance(value, _PLAIN)}
    cells = mod.__code__.co_freevars
    places = tuple(cells.index(name) if name in cells else -1 for name in plain)
    return key, tuple(plain), places, tuple(plain.values())


_ADVICE = "torch.compile would not see it change; supported there are numbers as globals, closures or defaults of the mod itself"


def _reads_numbers(value) -> bool:
    """Whether what a function computes may change while it stays the same object."""
    if _is_known_by_name(value):
        return False
    if isinstance(value, functools.partial):
        return _reads_numbers(value.func)
    if isinstance(value, types.FunctionType):
        return any(_reads_numbers(x) for x in _outside(value).values() if x is not value)
    return not isinstance(value, (types.ModuleType, type))


def _describe(value, write, within: list):
    """Write bytes that differ if what a traced function makes of ``value`` may differ."""
    if any(value is outer for outer in within):  # a function that names itself
        return write(b"again;")
    within = [*within, value]
    write(f"{type(value).__qualname__}:".encode())
    if value is None or isinstance(value, _PLAIN):
        write(f"{value!r};".encode())
    elif isinstance(value, (tuple, list)):
        write(f"{len(value)}:".encode())
        for item in value:
            _describe(item, write, within)
    elif isinstance(value, dict):
        _describe(list(value.items()), write, within)
    elif isinstance(value, (set, frozenset)):
        _describe(sorted(value, key=repr), write, within)
    elif isinstance(value, types.CodeType):
        parts = (value.co_code, value.co_names, value.co_varnames, value.co_freevars)
        _describe((*parts, value.co_argcount, value.co_flags, value.co_consts), write, within)
    elif _is_known_by_name(value):
        write(f"{getattr(value, '__module__', '')}.{_name(value)};".encode())
    elif isinstance(value, types.FunctionType):
        parts = (value.__code__, value.__defaults__, value.__kwdefaults__, _outside(value))
        _describe(parts, write, within)
    elif isinstance(value, functools.partial):
        _describe((value.func, value.args, value.keywords), write, within)
    else:
        raise TypeError(
            f"a mod depends on {value!r} of type {type(value).__name__}; supported are numbers, strings, tuples, "
            "lists, dicts and functions, also as attributes of modules and classes: tensors go into aux_tensors"
        )


def _name(value) -> str:
    return getattr(value, "__qualname__", value.__name__)


def _is_known_by_name(value) -> bool:
    """Whether a module, class or function is the same wherever it has the same name: not one of the user's."""
    if isinstance(value, types.BuiltinFunctionType):
        return True
    if not isinstance(value, (types.ModuleType, type, types.FunctionType)):
        return False
    module = value.__name__ if isinstance(value, types.ModuleType) else value.__module__
    return (module or "").partition(".")[0] in _LIBRARIES


def _outside(function: types.FunctionType) -> dict[str, object]:
    """What a function reads from outside itself, by dotted name: globals, closures, and attributes of what they are.

    Raises:
        TypeError: a variable of a closure has no value yet.
    """
    known = dict(function.__globals__)
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            known[name] = cell.cell_contents
        except ValueError:
            raise TypeError(f"a mod depends on {name}, which has no value yet") from None
    found = {}
    for name, *attributes in _reads(function.__code__):
        if name not in known:
            continue  # a builtin, or a variable of an inner function
        value, path = known[name], name
        while attributes and isinstance(value, (types.ModuleType, type)):
            if _is_known_by_name(value):
                break
            path = f"{path}.{attributes[0]}"
            value = getattr(value, attributes.pop(0), None)
        found[path] = value
    return found


def _reads(code: types.CodeType) -> list[tuple[str, ...]]:
    """(variable, attribute, attribute of that, ...) that code, and the code within it, reads from outside."""
    found, path = set(), None
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_ATTR", "LOAD_METHOD") and path is not None:
            path = (*path, instruction.argval)
            continue
        if path is not None:
            found.add(path)
        outside = instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF")
        path = (instruction.argval,) if outside else None
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found.update(_reads(constant))
    return sorted(found)


def encode_aux(tensors) -> int:
    """Types and numbers of dimensions of aux tensors as one number; 0 for none."""
    code = 0
    for x in reversed(tensors or ()):
        code = code * _AUX_KINDS + AUX_DTYPES.index(x.dtype) * MAX_AUX_DIMS + x.ndim
    return code


def decode_aux(code: int) -> list[tuple[int, int]]:
    """(index in ``AUX_DTYPES``, dimensions) of each aux tensor."""
    found = []
    while code:
        kind = code % _AUX_KINDS - 1
        found.append((kind // MAX_AUX_DIMS, kind % MAX_AUX_DIMS + 1))
        code //= _AUX_KINDS
    return found


def check_aux(tensors, q):
    """Check tensors that mods read.

    Raises:
        TypeError: not a list or tuple of tensors, or a dtype that is not supported.
        ValueError: too many, no or too many dimensions, or on another device than q.
    """
    if not isinstance(tensors, (tuple, list)) or not all(
        isinstance(x, torch.Tensor) for x in tensors
    ):
        raise TypeError(f"aux_tensors must be a list of torch.Tensor, got {tensors!r}")
    if len(tensors) > MAX_AUX_TENSORS:
        raise ValueError(f"{len(tensors)} aux_tensors; supported are up to {MAX_AUX_TENSORS}")
    for i, x in enumerate(tensors):
        if x.dtype not in AUX_DTYPES:
            raise TypeError(
                f"aux_tensors[{i}] is {x.dtype}; supported are {', '.join(map(str, AUX_DTYPES))}"
            )
        if not 1 <= x.ndim <= MAX_AUX_DIMS:
            raise ValueError(
                f"aux_tensors[{i}] has {x.ndim} dimensions; supported are 1 to {MAX_AUX_DIMS}"
            )
        if x.device != q.device:
            raise ValueError(f"aux_tensors[{i}] must be on {q.device} as q, got {x.device}")
