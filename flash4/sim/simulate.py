"""The commands ``simulate`` and ``time``: a kernel's own roles, run for what they compute and for how long they take."""

import dataclasses
import re
import textwrap
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch

from flash4.common.tiles import grid_of, workers_of
from flash4.demo import Check
from flash4.dispatch import choose_section
from flash4.interface import options_of
from flash4.sim import draw as pictures
from flash4.sim import sm90_fwd, sm100_fwd
from flash4.sim.chips import B200, H200
from flash4.sim.explore import explore
from flash4.sim.limits import check_graph
from flash4.sim.machine import Hazard, Machine, Step
from flash4.sim.mutants import KERNELS
from flash4.sim.sm90_fwd_clock import time_forward
from flash4.sim.sm100_fwd_clock import time_forward as time_forward_sm100

SIMULATIONS = {"sm90-fwd": sm90_fwd, "sm100-fwd": sm100_fwd}
# Kernel -> model of its time, and the chip that it is a model of.
TIMED = {"sm90-fwd": (time_forward, H200), "sm100-fwd": (time_forward_sm100, B200)}
CHANGEABLE = (
    "tile_m", "tile_n", "stages", "q_stages", "o_parts", "turns", "skip", "settle", "fixed_shift", "pack",
    "cluster", "o_slots", "poly", "head", "ctas",
)  # fmt: skip
KINDS = ("wait", "arrive", "issue", "join", "read", "write")
CELL = 26  # characters of a timeline's column
SHOWN_CYCLES = 10_000  # of a chart, if nothing else is asked for


@dataclass(frozen=True)
class Study:
    """A kernel to look at.

    Attributes:
        plan: of the call, with the config that is run.
        variation: of the kernel's simulation: roles and what else is changed.
        changes: in words.
        window: its sides, None without a limit.
    """

    plan: object
    variation: object
    changes: tuple[str, ...] = ()
    window: tuple[int | None, int | None] = (None, None)


def study(kernel: str, plan, settings=(), mutant: str | None = None, roles: Path | None = None):
    """Change a planned kernel; returns a ``Study``.

    Args:
        kernel: name of the kernel.
        plan: as dispatched.
        settings: ``"field=value"`` of the config.
        mutant: part of the name of exactly one mutant, or None.
        roles: Python file with other roles, such as a changed copy of the kernel's.

    Raises:
        ValueError: no such field or value, not one mutant, no roles, or more than an SM has; the message says what.
    """
    simulation, config, changes = SIMULATIONS[kernel], plan.config, list(settings)
    variation = simulation.Variation()
    fields = {}
    for setting in settings:  # together: one alone may be no config
        fields |= _parse(config, setting)
    config = dataclasses.replace(config, **fields)
    if mutant is not None and roles is not None:
        raise ValueError("mutants are of the kernel's own roles: give a mutant or a file of roles")
    if mutant is not None:
        chosen = _find_mutant(kernel, mutant)
        variation = chosen.build()
        if (
            getattr(variation, "roles_for", None)
            and variation.roles_for(config) is not variation.roles
        ):
            raise ValueError(f"{chosen.name!r} is of other roles than those of this call's config")
        changes.append(f"{chosen.name} (line {chosen.line})")
    if roles is not None:
        variation = simulation.Variation(
            _read_roles(roles, _own_roles(simulation, config).__name__)
        )
        changes.append(f"roles of {roles}")
    try:
        check_graph(config.graph, simulation.SMEM_LIMIT)
    except Hazard as hazard:
        raise ValueError(f"this cannot run: {hazard}") from None
    grid = grid_of(plan.problem, config.tile_q, config.pack)
    section = choose_section(plan.problem, config, grid, TIMED[kernel][1].sms)
    plan = dataclasses.replace(plan, config=config, grid=grid, section=section)
    return Study(plan, variation, tuple(changes))


def _own_roles(simulation, config) -> type:
    """Class of a kernel's role functions; a kernel may have two."""
    choose = getattr(simulation, "roles_of", None)
    return choose(config) if choose else simulation.Variation().roles


def _find_mutant(kernel: str, name: str):
    found = [m for m in KERNELS[kernel]() if name in m.name]
    found = [m for m in found if m.name == name] or found
    if len(found) != 1:
        named = "; ".join(f"{m.name} (line {m.line})" for m in found) or "no mutant"
        raise ValueError(f"{name!r} is in the name of: {named}")
    return found[0]


def _read_roles(path: Path, class_name: str) -> type:
    namespace = {"__name__": path.stem}
    try:
        exec(compile(path.read_text("utf-8"), str(path), "exec"), namespace)
    except Exception as error:
        raise ValueError(f"{path} cannot be read: {type(error).__name__}: {error}") from None
    found = namespace.get(class_name)
    if not all(hasattr(found, role) for role in ("load", "mma")):
        raise ValueError(f"{path} has no class {class_name} with roles load and mma")
    return found


def _parse(config, setting: str) -> dict[str, object]:
    name, _, text = setting.partition("=")
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    changeable = [known for known in CHANGEABLE if known in fields]
    if name not in changeable:
        raise ValueError(
            f"{name!r} cannot be set; {', '.join(changeable)} can, the call decides the rest"
        )
    if not text:
        raise ValueError(f"{setting!r} sets nothing; write {name}=VALUE")
    if isinstance(fields[name], bool):
        if text not in ("True", "False"):
            raise ValueError(f"{name} is True or False, not {text!r}")
        return {name: text == "True"}
    return {name: int(text)}


def command(arguments, what: Study, shapes, keywords) -> int:
    """Simulate a call and print what happened; returns 1 if something is wrong.

    Args:
        arguments: of the command line.
        what: kernel to run.
        shapes: q, k and v without memory.
        keywords: of ``flash_attn_func``, tensors without memory.
    """
    if arguments.ctas < 1:
        raise ValueError(f"--ctas is {arguments.ctas}; supported is at least 1")
    tensors, config = draw(shapes), what.plan.config
    keywords = {k: draw([v])[0] if isinstance(v, torch.Tensor) else v for k, v in keywords.items()}
    options = options_of(*tensors, **keywords)
    for name in ("sink", "alibi_slopes"):
        if getattr(options, name) is not None:
            options = options._replace(**{name: getattr(options, name).numpy()})
    _say_what(arguments, what)
    workers = workers_of(arguments.ctas, config.ctas)
    print(f"seed {arguments.seed}, {workers * config.ctas} CTAs", flush=True)
    arrays = [x.float().numpy() for x in tensors]
    start, machines, out = time.perf_counter(), [], None
    try:
        for machine, call in SIMULATIONS[arguments.kernel].forward_machines(
            config, arrays, options, workers, arguments.seed, what.variation
        ):
            machines.append(machine)
            machine.run()
            out = call.out
    except Hazard as hazard:
        return _tell_hazard(machines, hazard, arguments.rows)
    print(f"\nhazards: none; {time.perf_counter() - start:.1f} s")
    check = Check(*tensors, **keywords)
    good = check.passes(torch.from_numpy(out), "against float64")
    print(f"\n{counts(machines)}\n\nthe first steps of {_unit(machines[0])} 0")
    print(timeline(machines[0], machines[0].trace[: arguments.rows]))
    if arguments.exhaustive:
        print()
        good &= _exhaust(machines)
    print()
    _show_time(arguments, what)
    return 0 if good else 1


def time_command(arguments, what: Study) -> int:
    """Run a call under the clock only, and print and draw how long it takes."""
    _say_what(arguments, what)
    _show_time(arguments, what)
    return 0


def _say_what(arguments, what: Study):
    print(f"{arguments.kernel}: {what.plan.config}")
    for change in what.changes:
        print(f"  changed: {change}")


def _show_time(arguments, what: Study):
    model, chip = TIMED[arguments.kernel]
    timing = model(what.plan, chip, what.variation.roles, window=what.window)
    print(timing)
    spans = timing.machine.spans
    if arguments.cycles and arguments.cycles[0] >= timing.cycles:
        raise ValueError(f"--cycles begins at {arguments.cycles[0]:.0f}, behind the end")
    begin, end = arguments.cycles or (0, min(timing.cycles, SHOWN_CYCLES))
    print(f"\none SM, cycles {begin:.0f} to {end:.0f}\n{pictures.chart(spans, begin, end)}")
    if arguments.draw is not None:
        changes = "".join(f", {change}" for change in what.changes)
        title = f"{what.plan.name}{changes}: {timing.tflops:.0f} TFLOP/s on {chip.name} (model)"
        pictures.gantt(spans, arguments.draw, begin, end, title)
        print(f"wrote {arguments.draw}")
    if arguments.trace is not None:
        pictures.trace(spans, arguments.trace, timing.mhz)
        print(f"wrote {arguments.trace}: open it in https://ui.perfetto.dev or chrome://tracing")


def draw(shapes) -> tuple[torch.Tensor, ...]:
    """Random normal tensors."""
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(x.shape, generator=generator).to(x.dtype) for x in shapes)


def _tell_hazard(machines: list[Machine], hazard: Hazard, rows: int) -> int:
    machine = machines[-1]
    print(f"\nHAZARD in {_unit(machine)} {len(machines) - 1}, a {type(hazard).__name__.lower()}:")
    for part in str(hazard).split("; "):
        print(textwrap.fill(part, 100, initial_indent="  ", subsequent_indent="    "))
    print("\nthe last steps before it")
    print(timeline(machine, machine.trace[-rows:]))
    return 1


def _unit(machine: Machine) -> str:
    """What a machine stands for."""
    return "cluster" if machine.ctas else "CTA"


def _exhaust(machines: list[Machine]) -> bool:
    for i, machine in enumerate(machines):
        start = time.perf_counter()
        try:
            found = explore(machine)
        except Hazard as hazard:
            print(f"HAZARD in another order of {_unit(machine)} {i}: {hazard}")
            return False
        seconds = time.perf_counter() - start
        print(
            f"every order of {_unit(machine)} {i}: {found.states} states, no hazard, {seconds:.1f} s",
            flush=True,
        )
    return True


def counts(machines: list[Machine]) -> str:
    """Table of the steps of each role, over all CTAs."""
    tasks = [task.name for task in machines[0].tasks]
    found = Counter((step.actor, step.kind) for machine in machines for step in machine.trace)
    width = max(8, *(len(task) + 1 for task in tasks))
    lines = [f"{'steps':{width}}" + "".join(f"{kind:>8}" for kind in KINDS)]
    for task in tasks:
        lines.append(f"{task:{width}}" + "".join(f"{found[task, kind]:8}" for kind in KINDS))
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
    lane = re.sub(r"copies (of \S+ )?into ", "", step.target)
    lane = lane.replace("the tensor core for ", "mma of ")
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
