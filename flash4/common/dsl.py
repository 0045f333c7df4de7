"""The only file that reaches into the CuTe DSL beyond its public interface."""

import types

from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import dsl_user_op


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
