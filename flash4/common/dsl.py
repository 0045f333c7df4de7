"""The only file that reaches into the CuTe DSL beyond its public interface."""

import types

import cutlass.cute as cute
from cutlass import Int64
from cutlass._mlir import ir
from cutlass._mlir.dialects import builtin, llvm
from cutlass.cutlass_dsl import T, dsl_user_op


def plain(role):
    """Return a role function as plain Python, also after it was compiled.

    Tracing replaces the code of the wrapped function by a preprocessed one that runs only under the tracer, and keeps
    the original beside it.

    Args:
        role: a method decorated with ``cute.jit``, taken from its class.
    """
    function = role.__wrapped__
    code = getattr(function, "_original_code", function.__code__)
    return types.FunctionType(
        code, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )


@dsl_user_op
def inline_ptx(result_type, constraints, text, *operands, side_effects=False, loc=None, ip=None):
    """Emit inline PTX.

    Args:
        result_type: MLIR type of the result, or None.
        constraints: LLVM constraint string.
        text: PTX with ``$0`` ... for operands.
        operands: DSL values.
        side_effects: keep the statement, and its order among other such statements.
        loc: source location, filled in by the DSL.
        ip: insertion point, filled in by the DSL.
    """
    return llvm.inline_asm(
        result_type,
        [operand.ir_value(loc=loc, ip=ip) for operand in operands],
        text,
        constraints,
        has_side_effects=side_effects,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )


def check_carried(value, what: str):
    """Check, while tracing, that a loop which advances a value carries it.

    A loop carries what its body names (``docs/dsl-rules.md``). What it does not carry is a value from outside the loop,
    the same in every round.

    Args:
        value: MLIR value that is about to be advanced.
        what: name for the error.

    Raises:
        TypeError: the innermost loop around here does not carry it.
    """
    around = _operations_around(ir.InsertionPoint.current.block)
    loop = next((op for op in around if op.name in ("scf.for", "scf.while")), None)
    if loop is None:
        return
    owner = value.owner
    block = owner if isinstance(owner, ir.Block) else _operation(owner).block
    if not any(op == loop for op in _operations_around(block)):
        raise TypeError(
            f"{what} is advanced in a loop that does not carry it: bind it to a local name of the role"
        )


def _operation(op):
    return op.operation if hasattr(op, "operation") else op


def _operations_around(block):
    """Operations around a block, innermost first."""
    op = _operation(block.owner)
    while op is not None:
        yield op
        parent = getattr(op, "parent", None)  # a function has a module, which has none
        op = None if parent is None else _operation(parent)


def descriptor_of(fragment) -> Int64:
    """First of the shared-memory descriptors that a fragment of a WGMMA operand is a view of.

    Args:
        fragment: what ``make_fragment_A`` or ``make_fragment_B`` returns.
    """
    cast = builtin.UnrealizedConversionCastOp([T.i64()], [fragment.iterator])
    return Int64(cast.results[0])


def with_descriptor(fragment, descriptor):
    """Return a fragment's view with another first descriptor, an Int64."""
    kind = fragment.iterator.type
    cast = builtin.UnrealizedConversionCastOp([kind], [descriptor.ir_value()])
    return cute.make_tensor(cast.results[0], fragment.layout)
