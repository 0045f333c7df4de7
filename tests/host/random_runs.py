"""Long random runs of a simulated kernel, by hand: problems of some strategies, each with a seed, checked one after the other."""

import argparse
import time

import hypothesis
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

PROGRESS = 50  # runs from one line of it to the next


def arguments_of(description: str, **more) -> argparse.Namespace:
    """``--n`` and ``--seed``, and flags by name with what they are for."""
    options = argparse.ArgumentParser(description=description)
    options.add_argument("--n", type=int, default=2000)
    options.add_argument("--seed", type=int, default=0)
    for name, text in more.items():
        options.add_argument(f"--{name}", action="store_true", help=text)
    return options.parse_args()


def check_random(arguments: argparse.Namespace, searches, verdict: str = "numbers right"):
    """Run ``n`` (problem, seed) pairs, as many of each (strategy, check); a failure is shrunk and raised.

    A check returns the config that it ran.
    """
    torch.set_num_threads(1)
    runs, start = [], time.perf_counter()

    def search(strategy, check):
        @hypothesis.seed(arguments.seed)
        @settings(
            max_examples=arguments.n // len(searches), database=None, deadline=None,
            suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        @given(strategy, st.integers(0, 2**16))
        def test(problem, seed):
            runs.append(check(problem, seed))
            if len(runs) % PROGRESS == 0:
                print(f"{len(runs)} runs so far, {time.perf_counter() - start:.0f} s", flush=True)

        test()

    for strategy, check in searches:
        search(strategy, check)
    seconds, configs = time.perf_counter() - start, len(set(runs))
    print(f"{len(runs)} runs of {configs} configs, no alarm, {verdict}, {seconds:.0f} s")
