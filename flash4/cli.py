"""The command line: see a kernel's plan, pipeline and machine code, and watch it run."""

import argparse
import dataclasses
import json
import tempfile
from pathlib import Path

import torch

import flash4
from flash4 import cache_cli
from flash4.dispatch import BACKWARD_KERNELS, FORWARD_KERNELS, plan_forward
from flash4.interface import options_of
from flash4.problem import AttentionProblem
from flash4.selftest import STAGES
from flash4.selftest import command as test_this_machine

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}

SECOND_SCHEDULES = ("sm80-bwd-two", "sm90-bwd-joint")  # of a kernel that has one already


def main(argv: list[str] | None = None) -> int:
    """Run a command; returns the exit status: 0, 1 for a check that failed, 2 for a request that cannot be served."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    try:
        return arguments.run(arguments)
    except (ValueError, NotImplementedError, OSError, RuntimeError) as error:
        causes = [str(error)] + ([str(error.__cause__)] if error.__cause__ else [])
        parser.exit(2, f"{parser.prog}: {': '.join(causes)}\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m flash4",
        description="Exact attention for NVIDIA GPUs, written in the CuTe DSL. All but selftest work without a GPU.",
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    problem, kernel = _problem_options(), _kernel_options(FORWARD_KERNELS)
    any_kernel = _kernel_options((*FORWARD_KERNELS, *BACKWARD_KERNELS))
    small = _problem_options(batch=1, seqlen=1024, heads=1)

    def add(name, run, text, *parents):
        command = commands.add_parser(name, help=text, description=text, parents=parents)
        command.set_defaults(run=run)
        return command

    add("demo", demo, "compute attention, check it, and show how it was done; under a minute")
    explained = add("explain", explain, "say which kernel serves a call, and why", problem)
    explained.add_argument("--arch", default="sm_90a", help="target; default: sm_90a")
    explained.add_argument("--backward", action="store_true", help="of its gradients instead")
    text = "print a kernel's config, roles, rings and memory"
    add("describe", describe, text, any_kernel, problem)
    text = "compile a kernel and count its machine code"
    sass = add("sass", disassemble, text, any_kernel, problem)
    sass.add_argument("--dump-dir", type=Path, help="write PTX, cubin and SASS to this folder")
    cache_cli.add_commands(add, problem, precompile)
    _add_simulator(add, kernel, problem, small)
    text = "break a kernel's schedule and see what is noticed"
    variants = [(name,) for name in SECOND_SCHEDULES]
    all_schedules = _kernel_options((*FORWARD_KERNELS, *BACKWARD_KERNELS, *variants))
    broken = add("mutants", mutants, text, all_schedules)
    broken.add_argument("--sample", type=int, metavar="N", help="only N of them, drawn by --seed")
    broken.add_argument("--seed", type=int, default=0, metavar="N", help="default: 0")
    broken.add_argument(
        "--harmless",
        type=Path,
        metavar="FILE",
        help="JSON of mutants that break nothing, each with the reason",
    )
    _add_selftest(add)
    return parser


def _add_selftest(add):
    text = "test flash4 on this GPU, time it beside its peers, and write a report to attach to an issue"
    test = add("selftest", selftest, text)
    test.add_argument(
        "--stages",
        type=_stages,
        default=list(STAGES),
        metavar="NAMES",
        help=f"some of {','.join(STAGES)}; default: all",
    )
    test.add_argument("--quick", action="store_true", help="the smoke test, and fewer problems")
    test.add_argument("--seed", type=int, default=0, metavar="N", help="of the fuzz; default: 0")
    test.add_argument("--limit-s", type=float, metavar="S", help="seconds of each stage")
    test.add_argument("--out", type=Path, metavar="FILE", help="default: flash4-selftest-DATE.md")


def _stages(text: str) -> list[str]:
    """Parse a list of stages, which run in their own order."""
    words = text.split(",")
    if unknown := [word for word in words if word not in STAGES]:
        raise argparse.ArgumentTypeError(f"{','.join(unknown)}: stages are {', '.join(STAGES)}")
    return [name for name in STAGES if name in words]


def _add_simulator(add, kernel, problem, small):
    study = _study_options()
    text = "run a kernel's own roles on a CPU: right, safe, and how long on the chip"
    run = add("simulate", simulate, text, kernel, small, study)
    for name, default, text in (
        ("--seed", 0, "order of everything that the schedule leaves open"),
        ("--ctas", 2, "CTAs that share the tiles"),
        ("--rows", 40, "rows of the timeline"),
    ):
        text += f"; default: {default}"
        run.add_argument(name, type=_counting, default=default, metavar="N", help=text)
    run.add_argument(
        "--exhaustive", action="store_true", help="walk through every order; for small problems"
    )
    text = "predict how long a kernel takes, where the time goes, and draw its pipeline"
    add("time", time, text, kernel, problem, study)


def _study_options() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(add_help=False)
    group = options.add_argument_group("changes and pictures")
    group.add_argument(
        "--set", action="append", default=[], metavar="FIELD=VALUE", help="change the config"
    )
    group.add_argument("--mutant", metavar="NAME", help="change the roles; mutants lists the names")
    group.add_argument("--roles", type=Path, metavar="FILE", help="a changed copy of the roles")
    group.add_argument("--draw", type=_picture, metavar="FILE", help="Gantt chart, .svg or .png")
    group.add_argument("--trace", type=Path, metavar="FILE", help="trace for Perfetto, .json")
    group.add_argument(
        "--cycles",
        type=_cycles,
        metavar="BEGIN:END",
        help="stretch to draw; default: the beginning",
    )
    return options


def _picture(text: str) -> Path:
    """Parse the name of a picture."""
    if Path(text).suffix not in (".svg", ".png"):
        raise argparse.ArgumentTypeError(f"{text}: pictures end in .svg or .png")
    return Path(text)


def _counting(text: str) -> int:
    """Parse a number that may not be negative."""
    if (number := int(text)) < 0:
        raise ValueError
    return number


def _cycles(text: str) -> tuple[float, float]:
    """Parse ``BEGIN:END``; argparse makes an error of a ValueError."""
    begin, end = map(float, text.split(":"))
    if not 0 <= begin < end < float("inf"):
        raise argparse.ArgumentTypeError(f"{text}: write BEGIN:END, two numbers in order")
    return begin, end


def _problem_options(batch=4, seqlen=4096, heads=16) -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(add_help=False)
    group = options.add_argument_group("the call")
    for name, default, text in (
        ("--batch", batch, "batch entries"),
        ("--seqlen-q", seqlen, "queries per entry"),
        ("--seqlen-k", None, "keys per entry; default: as many as queries"),
        ("--heads", heads, "query heads"),
        ("--heads-kv", None, "KV heads; default: as many as query heads"),
        ("--head-dim", 128, "of queries and keys"),
        ("--head-dim-v", None, "of values; default: that of queries"),
    ):
        text += "" if default is None else f"; default: {default}"
        names = (name, "--seqlen") if name == "--seqlen-q" else (name,)
        group.add_argument(
            *names,
            type=int,
            default=default,
            metavar="N",
            help=text,
            dest=name[2:].replace("-", "_"),
        )
    group.add_argument("--dtype", choices=DTYPES, default="bf16", help="default: bf16")
    group.add_argument("--causal", action="store_true", help="bottom-right causal mask")
    for name, side in (("--window-left", "before"), ("--window-right", "after")):
        text = f"keys {side} a query's own position that it sees; default: no limit"
        group.add_argument(name, type=int, metavar="N", help=text)
    text = "cap of scaled scores; default: none"
    group.add_argument("--softcap", type=float, default=0.0, metavar="X", help=text)
    group.add_argument("--sink", action="store_true", help="a learnable sink for each head")
    group.add_argument("--alibi", action="store_true", help="a slope for each head")
    group.add_argument(
        "--softmax-scale", type=float, metavar="X", help="default: 1 / sqrt(head_dim)"
    )
    group.add_argument(
        "--pack-gqa",
        action=argparse.BooleanOptionalAction,
        help="query heads of a KV head share tiles; default: what needs fewer tiles",
    )
    return options


def _kernel_options(kernels) -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(add_help=False)
    names = dict.fromkeys(name for name, *_ in kernels)
    options.add_argument("kernel", choices=names, help="name of the kernel")
    return options


def meta_tensors(arguments) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v of the call that the options describe, without memory."""
    a = arguments
    seqlen_k = a.seqlen_q if a.seqlen_k is None else a.seqlen_k
    heads_kv = a.heads if a.heads_kv is None else a.heads_kv
    head_dim_v = a.head_dim if a.head_dim_v is None else a.head_dim_v
    shapes = (
        (a.batch, a.seqlen_q, a.heads, a.head_dim),
        (a.batch, seqlen_k, heads_kv, a.head_dim),
        (a.batch, seqlen_k, heads_kv, head_dim_v),
    )
    return tuple(torch.empty(shape, dtype=DTYPES[a.dtype], device="meta") for shape in shapes)


def keywords(arguments) -> dict:
    """Keywords of ``flash_attn_func`` for the call that the options describe; tensors are without memory."""
    a = arguments
    sink, slopes = (
        torch.empty(a.heads, device="meta") if given else None for given in (a.sink, a.alibi)
    )
    return {
        "softmax_scale": a.softmax_scale,
        "causal": a.causal,
        "window_size": (a.window_left, a.window_right),
        "softcap": a.softcap,
        "learnable_sink": sink,
        "alibi_slopes": slopes,
        "pack_gqa": a.pack_gqa,
    }


def demo(arguments) -> int:
    """``demo``."""
    from flash4 import demo as demonstration

    return demonstration.run()


def explain(arguments) -> int:
    """``explain``."""
    a = arguments
    given = keywords(a)
    print(flash4.explain(*meta_tensors(a), arch=a.arch, backward=a.backward, **given))
    return 0


def precompile(arguments) -> int:
    """``precompile``."""
    q, k, v = meta_tensors(arguments)
    return cache_cli.precompile(arguments, {"q": q, "k": k, "v": v, **keywords(arguments)})


def _problem(arguments) -> AttentionProblem:
    tensors = meta_tensors(arguments)
    return AttentionProblem.of_call(*tensors, options_of(*tensors, **keywords(arguments)))


def _configure(arguments):
    """(kernel class as "module:class", target, config, reasons) of the named kernel for the call.

    Raises:
        NotImplementedError: the kernel cannot run the call.
    """
    kernels = (*FORWARD_KERNELS, *BACKWARD_KERNELS)
    _, kernel, arch, module = next(k for k in kernels if k[0] == arguments.kernel)
    problem = _problem(arguments)
    reason = module.can_implement(problem)
    if reason is not None:
        raise NotImplementedError(f"{arguments.kernel} cannot run this call: {reason}")
    return kernel, arch, *module.choose_config(problem)


def _study(arguments):
    """The named kernel, planned for the call and changed as asked."""
    from flash4.sim import simulate as simulation

    _, _, arch, _ = next(k for k in FORWARD_KERNELS if k[0] == arguments.kernel)
    plan = plan_forward(_problem(arguments), arch, simulation.TIMED[arguments.kernel][1].sms)
    a = arguments
    study = simulation.study(a.kernel, plan, a.set, a.mutant, a.roles)
    tensors = meta_tensors(a)
    options = options_of(*tensors, **keywords(a))
    sides = (options.window_left, options.window_right)
    window = tuple(None if side < 0 else side for side in sides)
    return dataclasses.replace(study, window=window)


def describe(arguments) -> int:
    """``describe``."""
    kernel, arch, config, reasons = _configure(arguments)
    print(f"{arguments.kernel} for {arch}: {kernel}\n\nconfig")
    for field in dataclasses.fields(config):
        print(f"  {field.name:8} {getattr(config, field.name)}")
    for reason in reasons:
        print(f"  because {reason}")
    print("\npipeline")
    for line in config.graph.diagram().splitlines():
        print(f"  {line}")
    print(f"\n{config.graph.table()}")
    return 0


def disassemble(arguments) -> int:
    """``sass``."""
    from flash4.jit import inspect
    from flash4.jit.compile import compile_kernel

    inspect.find_nvdisasm()  # fails before the seconds that compiling takes
    kernel, arch, config, _ = _configure(arguments)
    print(f"compiling {kernel} for {arch}: {config}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        compile_kernel(kernel, config, arch, folder)
        (cubin,), (ptx,) = (list(Path(folder).glob(f"*.{kind}")) for kind in ("cubin", "ptx"))
        sass = inspect.disassemble(cubin)
        dumps = {"ptx": ptx.read_bytes(), "cubin": cubin.read_bytes(), "sass": sass.encode()}
    found = inspect.count_resources(sass)
    for name, count in (
        ("registers at launch", found.registers),
        ("instructions", found.instructions),
        ("HGMMA", found.hgmma),
        ("WARPGROUP.DEPBAR", found.waits),
        ("UTCHMMA", found.tcgen05),
        ("MUFU.EX2", found.exp2),
        ("LDL", found.spill_loads),
        ("STL", found.spill_stores),
        ("MMAs serialised", "yes" if found.serialised else "no"),
    ):
        print(f"{name:20} {count:>8}")
    if arguments.dump_dir is not None:
        arguments.dump_dir.mkdir(parents=True, exist_ok=True)
        for kind, content in dumps.items():
            path = arguments.dump_dir / f"{arguments.kernel}.{kind}"
            path.write_bytes(content)
            print(f"wrote {path}")
    return 0


def simulate(arguments) -> int:
    """``simulate``."""
    from flash4.sim import simulate as simulation

    tensors = meta_tensors(arguments)
    return simulation.command(arguments, _study(arguments), tensors, keywords(arguments))


def time(arguments) -> int:
    """``time``."""
    from flash4.sim import simulate as simulation

    return simulation.time_command(arguments, _study(arguments))


def mutants(arguments) -> int:
    """``mutants``."""
    from flash4.sim import mutants as breaking

    path = arguments.harmless
    harmless = {} if path is None else json.loads(path.read_text("utf-8"))
    return breaking.command(arguments.kernel, harmless, arguments.sample, arguments.seed)


def selftest(arguments) -> int:
    """``selftest``."""
    return test_this_machine(arguments)
