"""Process that compiles kernels into the disk cache: reads pickled keys from stdin, answers each with a pickled pair.

It never touches a GPU. The answer is (what went wrong or None, whether it compiled, most memory so far in bytes).
"""

import os
import pickle
import resource
import sys


def main():
    """Serve until stdin ends."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what packages print must not lie among the answers
    from flash4.jit.cache import CACHE

    while True:
        try:
            key = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        before, problem = CACHE.compiles, None
        try:
            CACHE.get(*key)
            if not CACHE.on_disk(*key):
                problem = "it was compiled, but the disk cache did not take it"
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        pickle.dump((problem, CACHE.compiles > before, memory), answers)
        answers.flush()


if __name__ == "__main__":
    main()
