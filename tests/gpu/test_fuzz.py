"""Random problems through the public function, against the reference, element by element.

With pytest a few of them, drawn by Hypothesis, which shrinks what fails. As a script many of them,
all kernels compiled beforehand in parallel::

    python -m tests.gpu.test_fuzz --n 1000 --seed 1 --workers 14 --processes 8 --kernels 300

Every failure is printed as the command that repeats it.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import hypothesis
import torch
from hypothesis import strategies as st

import flash4
from tests.checks import assert_forward_close, guarded
from tests.gpu.fuzzing import DEVICE, Key, compile_and_run, one_problem, parser_of, target, within
from tests.strategies import Problem, problems, random_problems

EXAMPLES = max(1, hypothesis.settings().max_examples // 5)  # each may compile a kernel


@dataclass(frozen=True)
class Case:
    """One call of a run.

    Attributes:
        problem: what is called.
        seed: of its tensors.
        in_place: write into a guarded, NaN-filled buffer.
    """

    problem: Problem
    seed: int
    in_place: bool

    def __str__(self) -> str:
        place = " --in-place" if self.in_place else ""
        return f'python -m tests.gpu.test_fuzz --problem "{self.problem}" --seed {self.seed}{place}'

    def kernels(self, arch: str) -> list[Key]:
        """What the kernel cache is asked for; nothing for an empty problem."""
        problem = self.problem
        if not all(x.numel() for x in problem.shapes):
            return []
        plan = flash4.explain(*problem.shapes, arch=arch, **problem.keywords("meta"))
        return [(plan.kernel, plan.config, plan.arch)]

    def check(self, device: str = DEVICE) -> None:
        """Run it.

        Raises:
            AssertionError: out or lse is wrong, or memory beside out was written.
        """
        problem = self.problem
        inputs = problem.tensors(device, self.seed)
        keywords = problem.keywords(device)
        if self.in_place:
            buffer = guarded(problem.out_shape, problem.dtype, device)
            out, lse = problem.function(*inputs, out=buffer.tensor, return_lse=True, **keywords)
            assert out is buffer.tensor
            buffer.check(written=True)
        else:
            out, lse = problem.function(*inputs, return_lse=True, **keywords)
        assert out.dtype == problem.dtype and lse.dtype == torch.float32
        assert_forward_close(out, lse, inputs, **keywords)


@hypothesis.settings(max_examples=EXAMPLES)
@hypothesis.given(problems(), st.integers(0, 2**32 - 1), st.booleans())
def test_random_problems(problem: Problem, seed: int, in_place: bool):
    Case(problem, seed, in_place).check()


def random_cases(n: int, seed: int) -> list[Case]:
    """Make n cases, half of them in place; the tensors of case i have the seed `seed + i`."""
    return [
        Case(problem, seed + i, in_place=i % 2 == 1)
        for i, problem in enumerate(random_problems(n, seed))
    ]


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = parser_of("tests.gpu.test_fuzz", __doc__)
    parser.add_argument("--in-place", action="store_true", help="with --problem: through out=")
    options = parser.parse_args(arguments)
    arch = target(options)
    if options.problem:
        cases = [Case(one_problem(options.problem), options.seed, options.in_place)]
    else:
        cases = random_cases(options.n, options.seed)
    cases, keys = within(cases, options.kernels, arch, options.seed, lambda choose, case: case)
    return compile_and_run(cases, keys, options)


if __name__ == "__main__":
    sys.exit(main())
