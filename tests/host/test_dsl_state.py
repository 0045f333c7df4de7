"""No kernel source may rely on loop state that the DSL drops. The rules: docs/dsl-rules.md."""

import textwrap

import pytest

from tests.dsl_state_lint import lint_paths, lint_source, main
from tests.source_tree import python_files

SAFE = {
    "advanced by name": """
        for n in range(n_blocks):
            kv_state.advance()
    """,
    "taken, used, committed": """
        for n in range(n_blocks):
            k_slot = k_producer.acquire_and_advance()
            ops.load_k(k_slot, n)
            k_slot.commit()
    """,
    "returned and rebound": """
        while tile.valid:
            kv_state = ops.step(kv_state, tile)
            tile = tiles.next(tile)
    """,
    "slot and end both rebound": """
        for n in range(n_blocks):
            k_slot, k_consumer = next_slot(k_consumer)
    """,
    "rebound by a walrus": """
        while (kv_state := ops.step(kv_state)).valid:
            ops.work()
    """,
    "handed over once, before the loop": """
        ops.open(k_producer)
        for n in range(n_blocks):
            k_slot = k_producer.acquire_and_advance()
    """,
    "the iterable of a for runs once": """
        for n in range(ops.first(kv_state), n_blocks):
            kv_state.advance()
    """,
    "a value read from a state": """
        for n in range(n_blocks):
            ops.load(kv_state.index, kv_state.stages[0])
            kv_state.advance()
    """,
    "bundle unpacked first": """
        k_consumer, p_signal = ends.k, ends.p
        for n in range(n_blocks):
            k_slot = k_consumer.wait_and_advance()
            p_signal.wait()
    """,
    "loops that surely unroll": """
        for i in cutlass.range_constexpr(2):
            ops.prefetch(k_producer)
        for end_producer in (k_producer, v_producer):
            ops.tail(end_producer)
    """,
    "one name per ring, prologue and loop": """
        k_slot = k_consumer.wait_and_advance()
        for n in range(n_blocks):
            k_next = k_consumer.wait_and_advance()
            k_slot.release()
            k_slot = k_next
    """,
    "a slot beside another ring's, and looks": """
        for n in range(n_blocks):
            before = k_slot
            k_slot = k_consumer.wait_and_advance()
            v_slot = v_consumer.wait_beside(before)
            k_consumer.look_ahead()
            v_consumer.look_ahead(k_slot)
    """,
    "one ring for K and V": """
        for n in range(n_blocks):
            k, v = kv_consumer.wait_and_advance(), kv_consumer.wait_and_advance()
    """,
    "waits of other objects": """
        for n in range(n_blocks):
            turn.wait()
            ops.wait_mma(0)
    """,
}

TRAPS = {
    "helper advances its argument": (
        "DSL001",
        """
        for n in range(n_blocks):
            helper(kv_state)
        """,
    ),
    "by keyword, inside a tuple": (
        "DSL001",
        """
        for n in range(n_blocks):
            ops.load(n, ends=(k_producer, n))
        """,
    ),
    "by a starred argument": (
        "DSL001",
        """
        while tile.valid:
            ops.load(*[k_producer])
        """,
    ),
    "loop in its own method, called once per tile": (
        "DSL001",
        """
        while tile.valid:
            inner(tile, kv_consumer)
            tile = tiles.next(tile)
        """,
    ),
    "only another name is rebound": (
        "DSL001",
        """
        for n in range(n_blocks):
            k_slot = next_slot(k_consumer)
        """,
    ),
    "an unrolled loop inside a dynamic one": (
        "DSL001",
        """
        for n in range(n_blocks):
            for i in range_constexpr(2):
                if n > i:
                    ops.step(p_signal)
        """,
    ),
    "in the condition of a while": (
        "DSL001",
        """
        while ops.more(tile_scheduler):
            tile_scheduler.advance()
        """,
    ),
    "inside with, try and match": (
        "DSL001",
        """
        for n in range(n_blocks):
            with scope:
                try:
                    match n:
                        case 0:
                            helper(kv_state)
                finally:
                    pass
        """,
    ),
    "end kept in a list": (
        "DSL001",
        """
        for n in range(n_blocks):
            kept.append(k_consumer)
        """,
    ),
    "through a field": (
        "DSL002",
        """
        for n in range(n_blocks):
            ends.kv.advance()
        """,
    ),
    "through a subscript": (
        "DSL002",
        """
        for n in range(n_blocks):
            slot = ends["k_consumer"].wait_and_advance()
        """,
    ),
    "an end stored on self": (
        "DSL002",
        """
        for n in range(n_blocks):
            slot = self.k_producer.acquire_and_advance()
        """,
    ),
    "one variable, two rings": (
        "DSL003",
        """
        slot = k_consumer.wait_and_advance()
        for n in range(n_blocks):
            slot.release()
            slot = v_consumer.wait_and_advance()
        """,
    ),
    "two rings through an alias": (
        "DSL003",
        """
        slot = k_consumer.wait_and_advance()
        for n in range(n_blocks):
            following = last
            last = v_consumer.wait_and_advance()
            slot = following
        """,
    ),
    "two rings through a ternary and a tuple": (
        "DSL003",
        """
        for n in range(n_blocks):
            slot, c = k_consumer.wait_and_advance() if n else v_consumer.wait_and_advance(), 0
        """,
    ),
    "a ring end without its surname": (
        "DSL005",
        """
        for n in range(n_blocks):
            slot = k_ring.acquire_and_advance()
        """,
    ),
    "a ring end called a state": (
        "DSL005",
        """
        slot = k_state.wait_and_advance()
        """,
    ),
    "a state without its surname": (
        "DSL005",
        """
        for n in range(n_blocks):
            position.advance()
        """,
    ),
}


def traced(body: str, decorator: str = "@cute.jit") -> str:
    """A method with the given body."""
    method = f"{decorator}\ndef role(self, ops, tiles, ends):\n"
    return method + textwrap.indent(textwrap.dedent(body).strip(), "    ")


def codes(source: str, path: str = "flash4/sm90/fwd.py") -> set[str]:
    """The codes found in a source."""
    return {finding.code for finding in lint_source(source, path)}


@pytest.mark.parametrize("body", SAFE.values(), ids=SAFE)
def test_safe_patterns_pass(body):
    assert codes(traced(body), "flash4/sm90/fwd_roles.py") == set()


@pytest.mark.parametrize(("code", "body"), TRAPS.values(), ids=TRAPS)
@pytest.mark.parametrize("decorator", ["@cute.jit", "@jit", "@cute.kernel(x=1)", "@dsl.role"])
def test_traps_are_found(code, body, decorator):
    assert codes(traced(body, decorator)) == {code}


def test_only_traced_code_is_judged():
    untraced = "def model(ring):\n    while True:\n        ring.slots[0].advance()\n"
    assert codes(untraced) == set()


@pytest.mark.parametrize("call", ["self.inner(tiles)", "x = self.step(tiles)", "super().load(ops)"])
def test_a_role_calls_no_method_of_its_class(call):
    assert codes(traced(call), "flash4/sm90/fwd_roles.py") == {"DSL004"}
    assert codes(traced(call, "@role")) == {"DSL004"}
    assert codes(traced(call), "flash4/sm90/fwd_ops.py") == set(), "a verb may"


@pytest.mark.parametrize("call", ["ends.p.wait()", "signals[0].post()"])
def test_a_role_raises_signals_by_name(call):
    assert codes(traced(call), "flash4/sm100/fwd_roles.py") == {"DSL002"}
    assert codes(traced(call), "flash4/sm100/fwd.py") == set(), "ordinary names elsewhere"


def test_findings_say_where(tmp_path, capsys):
    file = tmp_path / "fwd_roles.py"
    file.write_text(traced("while ops.more():\n    ends.k.wait_and_advance()"))
    assert main([str(tmp_path)]) == 1
    assert capsys.readouterr().out.startswith(f"{file}:4: DSL002 ends.k.wait_and_advance()")
    file.write_text("")
    assert main([str(tmp_path)]) == 0
    assert main([]) == 2


def test_flash4_carries_its_state():
    files = python_files("flash4")
    assert files
    findings = lint_paths(files)
    assert not findings, "\n" + "\n".join(map(str, findings))
