"""The command ``simulate``: one run of a kernel's roles, whether it is right, what it did, and in which order."""

import textwrap
import time
from collections import Counter

import torch

from flash4.demo import Check
from flash4.interface import options_of
from flash4.sim.explore import explore
from flash4.sim.machine import Hazard, Machine, Step
from flash4.sim.sm90_fwd import forward_machines

KINDS = ("wait", "arrive", "issue", "join", "read", "write")
CELL = 26  # characters of a timeline's column


def command(arguments, config, shapes, keywords) -> int:
    """Simulate a call and print what happened; returns 1 if something is wrong.

    Args:
        arguments: of the command line.
        config: of the kernel.
        shapes: q, k and v without memory.
        keywords: of ``flash_attn_func``, tensors without memory.
    """
    tensors = draw(shapes)
    keywords = {k: draw([v])[0] if isinstance(v, torch.Tensor) else v for k, v in keywords.items()}
    options = options_of(*tensors, **keywords)
    for name in ("sink", "alibi_slopes"):
        if getattr(options, name) is not None:
            options = options._replace(**{name: getattr(options, name).numpy()})
    print(f"{arguments.kernel}: {config}\nseed {arguments.seed}, {arguments.ctas} CTAs", flush=True)
    arrays = [x.float().numpy() for x in tensors]
    start, machines, out = time.perf_counter(), [], None
    try:
        for machine, call in forward_machines(
            config, arrays, options, arguments.ctas, arguments.seed
        ):
            machines.append(machine)
            machine.run()
            out = call.out
    except Hazard as hazard:
        return _tell_hazard(machines, hazard, arguments.rows)
    print(f"\nhazards: none; {time.perf_counter() - start:.1f} s")
    check = Check(*tensors, **keywords)
    good = check.passes(torch.from_numpy(out), "against float64")
    print(f"\n{counts(machines)}\n\nthe first steps of CTA 0")
    print(timeline(machines[0], machines[0].trace[: arguments.rows]))
    if arguments.exhaustive:
        print()
        good &= _exhaust(machines)
    return 0 if good else 1


def draw(shapes) -> tuple[torch.Tensor, ...]:
    """Random normal tensors."""
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(x.shape, generator=generator).to(x.dtype) for x in shapes)


def _tell_hazard(machines: list[Machine], hazard: Hazard, rows: int) -> int:
    machine = machines[-1]
    print(f"\nHAZARD in CTA {len(machines) - 1}, a {type(hazard).__name__.lower()}:")
    for part in str(hazard).split("; "):
        print(textwrap.fill(part, 100, initial_indent="  ", subsequent_indent="    "))
    print("\nthe last steps before it")
    print(timeline(machine, machine.trace[-rows:]))
    return 1


def _exhaust(machines: list[Machine]) -> bool:
    for i, machine in enumerate(machines):
        start = time.perf_counter()
        try:
            found = explore(machine)
        except Hazard as hazard:
            print(f"HAZARD in another order of CTA {i}: {hazard}")
            return False
        seconds = time.perf_counter() - start
        print(
            f"every order of CTA {i}: {found.states} states, no hazard, {seconds:.1f} s", flush=True
        )
    return True


def counts(machines: list[Machine]) -> str:
    """Table of the steps of each role, over all CTAs."""
    tasks = [task.name for task in machines[0].tasks]
    found = Counter((step.actor, step.kind) for machine in machines for step in machine.trace)
    lines = [f"{'steps':8}" + "".join(f"{kind:>8}" for kind in KINDS)]
    for task in tasks:
        lines.append(f"{task:8}" + "".join(f"{found[task, kind]:8}" for kind in KINDS))
    return "\n".join(lines)


def timeline(machine: Machine, steps: list[Step]) -> str:
    """One row per step, one column per task, and one for what lands by itself."""
    columns = {task.name: i for i, task in enumerate(machine.tasks)}
    heads = [*columns, "lands"]
    lines = ["  " + "".join(f"{head:{CELL}}" for head in heads).rstrip()]
    for step in steps:
        if step.actor not in columns and step.kind != "land":
            continue  # a landing copy's arrival is part of its landing
        cell = _cell(step)
        lines.append("  " + " " * CELL * columns.get(step.actor, len(columns)) + cell)
    return "\n".join(lines)


def _cell(step: Step) -> str:
    lane = step.target.replace("copies into ", "").replace("the tensor core for ", "mma of ")
    text = {
        "wait": f"wait {step.target} {step.count}",
        "arrive": f"-> {step.target}",
        "issue": f"issue {lane} #{step.count}",
        "join": f"await {lane} #{step.count}",
        "land": f"{lane} #{step.count}",
        "read": f"read {step.target}",
        "write": f"write {step.target}",
    }[step.kind]
    return text if step.kind == "land" else textwrap.shorten(text, CELL - 1, placeholder="~")
