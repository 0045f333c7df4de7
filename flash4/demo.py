"""The demonstration: attention computed, checked against float64, and shown from the inside.

On a Hopper GPU the kernel runs and is timed. Elsewhere the same kernel is compiled, and the schedule that it was
compiled from runs on the CPU.
"""

import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F

import flash4
from flash4 import reference
from flash4.dispatch import architecture

SIMULATED = {"batch": 1, "seqlen_q": 400, "seqlen_k": 500, "heads": 4, "heads_kv": 2}
CHECKED = {"batch": 2, "seqlen_q": 1000, "seqlen_k": 1000, "heads": 8, "heads_kv": 2}
TIMED = {"batch": 2, "seqlen_q": 4096, "seqlen_k": 4096, "heads": 16, "heads_kv": 16}
HEAD_DIM = 128
SEEDS = 4  # orders that the schedule is simulated in
DRAWN_CYCLES = 6_000
CALLS = 30  # timed ones


def run() -> int:
    """Show what this machine can show; returns 1 if a check failed."""
    obstacle = gpu_obstacle()
    if obstacle is None:
        return on_gpu()
    say(f"flash4 {flash4.__version__} on the CPU: {obstacle}.")
    say("The kernel is compiled all the same, and its own schedule runs in plain Python.")
    return on_cpu()


def say(text: str):
    """Print at once, so that a slow step shows what it is doing."""
    print(text, flush=True)


def gpu_obstacle() -> str | None:
    """Why the kernel cannot run here, or None."""
    if not torch.cuda.is_available():
        return "there is no CUDA GPU here"
    try:
        architecture(torch.cuda.get_device_capability())
    except NotImplementedError as error:
        return str(error)
    return None


def draw(sizes: dict[str, int], device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random normal q, k and v in bfloat16."""
    generator = torch.Generator(device).manual_seed(0)
    shapes = (("seqlen_q", "heads"), ("seqlen_k", "heads_kv"), ("seqlen_k", "heads_kv"))
    return tuple(
        torch.randn(
            (sizes["batch"], sizes[seqlen], sizes[heads], HEAD_DIM),
            generator=generator,
            device=device,
            dtype=torch.bfloat16,
        )
        for seqlen, heads in shapes
    )


class Check:
    """Compares results with float64; allows twice the error of torch's own bfloat16 math, and one rounding.

    Causal, unless ``options`` of the reference say otherwise.
    """

    def __init__(self, q, k, v, **options):
        options = {"causal": True, **options}
        with torch.no_grad():
            self.exact = reference.attention(q, k, v, **options)
            native = reference.attention(q, k, v, **options, compute_dtype=None)
        rounding = torch.finfo(q.dtype).eps * self.exact.abs().max().item()
        self.native = self.error(native)
        self.allowed = 2 * self.native + rounding

    def error(self, out) -> float:
        """Largest error; infinite where out is not finite."""
        return (out.double() - self.exact).abs().nan_to_num(nan=torch.inf).max().item()

    def passes(self, out, name: str) -> bool:
        """Print the error and whether it is allowed."""
        error = self.error(out)
        good = error <= self.allowed
        say(
            f"  {name}: largest error {error:.2e}, allowed {self.allowed:.2e} "
            f"(torch's own math: {self.native:.2e}) {'ok' if good else 'WRONG'}"
        )
        return good


def on_cpu() -> int:
    """Compile the kernel, show it, and simulate its schedule."""
    say("\n[1/5] The plan of a call")
    tensors = (x.to("meta") for x in draw(TIMED, "cpu"))
    plan = flash4.explain(*tensors, causal=True, arch="sm_90a")
    say(f"  {plan}".replace("\n", "\n  "))

    say("\n[2/5] Its pipeline: which warps fill and read which ring, and the memory of one CTA")
    graph = plan.config.graph
    say("  " + f"{graph.diagram()}\n\n{graph.table()}".replace("\n", "\n  "))

    say(f"\n[3/5] Compiling it for {plan.arch}, without a GPU")
    good = compiles_well(plan)

    say("\n[4/5] Running its schedule in plain Python, in several adversarial orders")
    good &= simulates_well(plan.config)

    say("\n[5/5] Its pipeline under the clock: one SM of an H200, by a model of the chip")
    show_pipeline(plan)
    say("\nEverything is as it should be." if good else "\nSomething is WRONG, see above.")
    return 0 if good else 1


def compiles_well(plan) -> bool:
    """Compile a planned kernel and look at what ptxas made of it."""
    from flash4.jit.compile import compile_kernel
    from flash4.jit.inspect import resources

    start = time.perf_counter()
    say("  loading the CuTe DSL, tracing, compiling ...")
    with tempfile.TemporaryDirectory() as folder:
        compile_kernel(plan.kernel, plan.config, plan.arch, folder)
        say(f"  done after {time.perf_counter() - start:.1f} s; disassembling ...")
        (cubin,) = Path(folder).glob("*.cubin")
        try:
            found = resources(cubin)
        except FileNotFoundError as error:
            say(f"  not disassembled: {error}")
            return True
    good = found.spill_loads == found.spill_stores == 0 and not found.serialised
    say(f"  {found}: {'no spills, ok' if good else 'WRONG'}")
    return good


def simulates_well(config) -> bool:
    """Run the role functions of a config on a small problem, and check the numbers."""
    from flash4.sim.machine import Hazard
    from flash4.sim.sm90_fwd import simulate_forward

    q, k, v = draw(SIMULATED, "cpu")
    sizes = ", ".join(f"{name} {size}" for name, size in SIMULATED.items())
    say(f"  {sizes}, head_dim {HEAD_DIM}, causal; roles load and {config.mma_warpgroups} x mma")
    check, good = Check(q, k, v), True
    arrays = [x.float().numpy() for x in (q, k, v)]
    for seed in range(SEEDS):
        workers = 1 + seed
        try:
            out, _ = simulate_forward(config, *arrays, HEAD_DIM**-0.5, workers, seed)
        except Hazard as error:
            say(f"  order {seed}: WRONG, {error}")
            good = False
        else:
            good &= check.passes(torch.from_numpy(out), f"order {seed}, {workers} CTAs")
    return good


def show_pipeline(plan):
    """Time a plan under the simulator's clock, and draw a stretch of it."""
    from flash4.sim.chips import H200
    from flash4.sim.draw import chart
    from flash4.sim.sm90_fwd_clock import time_forward

    timing = time_forward(plan, H200)
    middle = timing.cycles / 2
    text = f"{timing}\n\n{chart(timing.machine.spans, middle, middle + DRAWN_CYCLES)}"
    say("  " + text.replace("\n", "\n  "))
    say("  python -m flash4 time sm90-fwd --causal --draw pipeline.svg draws it in colour")


def on_gpu() -> int:
    """Run, check and time the kernel."""
    say(f"flash4 {flash4.__version__} on {torch.cuda.get_device_name()}")

    say("\n[1/4] The plan of a call")
    q, k, v = draw(TIMED, "cuda")
    plan = flash4.explain(q, k, v, causal=True)
    say(f"  {plan}".replace("\n", "\n  "))

    say("\n[2/4] Checking against float64")
    small = draw(CHECKED, "cuda")
    say("  first call, which compiles the kernel unless the cache on disk has it ...")
    start = time.perf_counter()
    with torch.no_grad():
        out = flash4.flash_attn_func(*small, causal=True)
    torch.cuda.synchronize()
    say(f"  {time.perf_counter() - start:.2f} s")
    sizes = ", ".join(f"{name} {size}" for name, size in CHECKED.items())
    good = Check(*small).passes(out, f"{sizes}, head_dim {HEAD_DIM}, causal")

    say(f"\n[3/4] Timing {CALLS} calls, beside torch's scaled_dot_product_attention")
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    contenders = {
        "flash4": lambda: flash4.flash_attn_func(q, k, v, causal=True),
        "torch": lambda: F.scaled_dot_product_attention(*heads_first, is_causal=True),
    }
    with torch.no_grad():
        for name, seconds in median_seconds(contenders).items():
            rate = plan.problem.flops / seconds / 1e12
            say(f"  {name:6} {seconds * 1e3:.3f} ms, {rate:.0f} TFLOP/s")

    say("\n[4/4] Its pipeline, by the simulator's model of an H200")
    show_pipeline(plan)
    say("\nEverything is as it should be." if good else "\nThe result is WRONG, see above.")
    return 0 if good else 1


def median_seconds(contenders) -> dict[str, float]:
    """Median device time of each contender's call, taken in turn, so that the clock is the same for all."""
    times = {name: [] for name in contenders}
    for i in range(CALLS + 3):
        for name, call in contenders.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(1_000_000)  # the launch is over before the clock starts
            begin.record()
            call()
            end.record()
            torch.cuda.synchronize()
            if i >= 3:
                times[name].append(begin.elapsed_time(end) / 1e3)
    return {name: sorted(seconds)[CALLS // 2] for name, seconds in times.items()}
