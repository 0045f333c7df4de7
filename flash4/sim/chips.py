"""Rates of a chip, as microbenchmarks gave them: what the clock of the simulator stands on."""

from dataclasses import dataclass, field

# Units of one SM that work occupies. An SM has four equal quarters, and a warpgroup one warp in each; so amounts are
# those of one warp, in cycles of its quarter's unit. "fill" is bytes into shared memory, of the whole SM.
UNITS = ("tensor", "ports", "issue", "mufu", "alu", "fma", "fill")


@dataclass(frozen=True)
class Chip:
    """One kind of GPU. Cycles are SM cycles; rates are those of a quarter of an SM, but ``fill_bytes``.

    Attributes:
        name: of the GPU.
        sms: streaming multiprocessors.
        mhz: highest SM clock.
        mma_mhz: SM clock while the tensor cores are busy with random numbers: power decides.
        mma_flops: dense 16-bit tensor operations of an SM per cycle.
        mufu: warp instructions per cycle of the unit for exponentials.
        alu: the same of integer operations, maxima and conversions.
        fma: the same of float additions and multiplications.
        alone: share of a unit's rate that one warp alone reaches.
        ports: cycles of the register file's ports that a vector instruction takes. Additive with those of MMAs.
        mma_ports: the same per cycle of MMAs, by their columns.
        mma_beside: share of another unit that MMAs keep from everybody else.
        mma_latency: from the end of an MMA group's work to the go-ahead of the warp that waits for it.
        mbarrier: from an arrival that completes an mbarrier to the go-ahead of a waiting warp.
        named_barrier: the same of a named barrier.
        poll: cost of a wait that need not wait.
        copy_latency: from the issue of a TMA copy to its end, beyond its bytes.
        fill_bytes: bytes per cycle into one SM's shared memory, all SMs busy.
        first_copy: what the first copy of a CTA takes longer than others.
        launch_us: from event to event around an empty kernel.
    """

    name: str
    sms: int
    mhz: float
    mma_mhz: float
    mma_flops: float
    mufu: float
    alu: float
    fma: float
    alone: dict[str, float] = field(repr=False)
    ports: float
    mma_ports: dict[int, float] = field(repr=False)
    mma_beside: dict[str, float] = field(repr=False)
    mma_latency: float
    mbarrier: float
    named_barrier: float
    poll: float
    copy_latency: float
    fill_bytes: float
    first_copy: float
    launch_us: float


H200 = Chip(
    name="H200",
    sms=132,
    mhz=1980,
    mma_mhz=1750,
    mma_flops=4096,
    mufu=1 / 8,
    alu=0.49,
    fma=0.95,
    alone={"issue": 0.83, "mufu": 0.80, "alu": 0.93, "fma": 0.87},
    ports=1.15,
    mma_ports={64: 0.78, 128: 0.715, 256: 0.70},
    mma_beside={"mufu": 0.27, "alu": 0.54},
    mma_latency=60.0,
    mbarrier=83.0,
    named_barrier=48.5,
    poll=25.0,
    copy_latency=336.0,
    fill_bytes=35.4,
    first_copy=667.0,
    launch_us=3.4,
)


@dataclass(frozen=True)
class TensorMemoryChip:
    """One kind of GPU with tensor memory. Cycles are SM cycles; rates are those of a quarter of an SM where not said.

    Attributes:
        name: of the GPU.
        sms: streaming multiprocessors.
        mhz: highest SM clock.
        mma_mhz: SM clock while the tensor cores are busy.
        mma_flops: dense 16-bit tensor operations of an SM per cycle.
        smem_bytes: bytes per cycle that an SM's shared memory reads or writes.
        mufu: warp instructions per cycle of the unit for exponentials.
        alu: the same of maxima of three and integer operations.
        fma: the same of packed float operations, two each.
        cvt: the same of conversions of pairs to 16 bit.
        tmem_columns: columns of a warp's 32 lanes that its port to tensor memory moves per cycle.
        tmem_latency: from a load or store of tensor memory to its end, beyond its columns.
        commit: from the end of MMAs to the arrival that their commit makes.
        mma_issue: cycles that the issuing warp takes for an MMA.
        mbarrier: from an arrival that completes an mbarrier to the go-ahead of a waiting warp.
        remote: what an arrival at the other CTA's barrier takes longer.
        poll: cost of a wait that need not wait.
        dependence: cycles in which a warp waits for its own last result at each step of a softmax.
        copy_latency: from the issue of a TMA copy to its end, beyond its bytes.
        fill_bytes: bytes per cycle from L2 into one SM's shared memory, all SMs busy.
        first_copy: what the first copy of a CTA takes longer than others.
        cta_start: from the end of a CTA to the first step of the roles of the next one on that SM.
        launch_us: from event to event around an empty kernel.
    """

    name: str
    sms: int
    mhz: float
    mma_mhz: float
    mma_flops: float
    smem_bytes: float
    mufu: float
    alu: float
    fma: float
    cvt: float
    tmem_columns: float
    tmem_latency: float
    commit: float
    mma_issue: float
    mbarrier: float
    remote: float
    poll: float
    dependence: float
    copy_latency: float
    fill_bytes: float
    first_copy: float
    cta_start: float
    launch_us: float


# Nobody has measured these for flash4. Public (FA4's paper, CUDA programming guide): sms, mma_mhz (2.25 PFLOP/s), mma_flops,
# smem_bytes, mufu, fma, cvt. As measured on an H200: mbarrier, poll, first_copy, launch_us. Calibrated on FA4's published
# speeds (``bench/NOTES.md``): dependence, commit, copy_latency, fill_bytes. Assumed: the rest.
B200 = TensorMemoryChip(
    name="B200",
    sms=148,
    mhz=1965,
    mma_mhz=1850,
    mma_flops=8192,
    smem_bytes=128,
    mufu=1 / 8,
    alu=0.5,
    fma=0.5,
    cvt=0.25,
    tmem_columns=1.0,
    tmem_latency=30.0,
    commit=70.0,
    mma_issue=18.0,
    mbarrier=83.0,
    remote=150.0,
    poll=25.0,
    dependence=70.0,
    copy_latency=450.0,
    fill_bytes=56.0,
    first_copy=667.0,
    cta_start=1500.0,
    launch_us=3.4,
)
