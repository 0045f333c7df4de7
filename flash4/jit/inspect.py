"""What a compiled kernel uses: registers, spills and instruction counts, read from its cubin with ``nvdisasm``."""

import re
import shutil
import subprocess
from collections import Counter
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

NVDISASM_PACKAGE = "nvidia-cuda-nvdisasm"

_REGISTERS = re.compile(r"EIATTR_REGCOUNT.*?index@.*?\.word\s+0x([0-9a-f]+)", re.S)
_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+\s+)?([A-Z][\w.]*)", re.M)


@dataclass(frozen=True)
class Resources:
    """Resources of one cubin.

    Attributes:
        registers: per thread at launch, before roles reallocate them.
        instructions: of all its functions, padding not counted.
        spill_loads: loads from local memory (LDL).
        spill_stores: stores to local memory (STL).
        hgmma: warpgroup MMAs.
        waits: waits for warpgroup MMAs (WARPGROUP.DEPBAR).
        exp2: hardware exponentials (MUFU.EX2).
        tcgen05: MMAs into tensor memory (UTCHMMA).
    """

    registers: int
    instructions: int
    spill_loads: int
    spill_stores: int
    hgmma: int
    waits: int
    exp2: int
    tcgen05: int = 0

    @property
    def serialised(self) -> bool:
        """Whether ptxas made every warpgroup MMA wait for the one before, as it does, silently, under register pressure."""
        return 0 < self.hgmma <= self.waits

    def __str__(self):
        return (
            f"{self.registers} registers, {self.spill_loads} LDL, {self.spill_stores} STL, "
            f"{self.instructions} instructions: {self.hgmma} HGMMA, {self.waits} WARPGROUP.DEPBAR, "
            f"{self.tcgen05} UTCHMMA, {self.exp2} MUFU.EX2"
            + (", MMAs serialised" if self.serialised else "")
        )


def find_nvdisasm() -> Path:
    """Path of ``nvdisasm``: that of the Python package, else the one on PATH, which may be too old for a cubin.

    Raises:
        FileNotFoundError: there is none; the message says how to get it.
    """
    try:
        packaged = [
            file.locate() for file in files(NVDISASM_PACKAGE) or () if file.stem == "nvdisasm"
        ]
    except PackageNotFoundError:
        packaged = []
    found = next((path for path in packaged if Path(path).is_file()), shutil.which("nvdisasm"))
    if found is None:
        raise FileNotFoundError(
            f"nvdisasm was not found; install it with: pip install {NVDISASM_PACKAGE}"
        )
    return Path(found)


def disassemble(cubin: Path) -> str:
    """SASS of a cubin, with its resource attributes.

    Raises:
        FileNotFoundError: there is no ``nvdisasm``.
        RuntimeError: it cannot read the cubin.
    """
    tool = find_nvdisasm()
    command = [tool, "--no-dataflow", cubin]  # what it would add is comments
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise RuntimeError(f"{tool} cannot read {cubin}: {result.stderr.strip()}")
    return result.stdout


def count_resources(sass: str) -> Resources:
    """Count in the text that ``disassemble`` returns."""
    instructions = [name for name in _INSTRUCTION.findall(sass) if name != "NOP"]
    by_base = Counter(name.partition(".")[0] for name in instructions)
    return Resources(
        registers=max(int(count, 16) for count in _REGISTERS.findall(sass)),
        instructions=len(instructions),
        spill_loads=by_base["LDL"],
        spill_stores=by_base["STL"],
        hgmma=by_base["HGMMA"],
        waits=sum(name.startswith("WARPGROUP.DEPBAR") for name in instructions),
        exp2=sum(name.startswith("MUFU.EX2") for name in instructions),
        tcgen05=by_base["UTCHMMA"],
    )


def resources(cubin: Path) -> Resources:
    """Resources of a cubin on disk; see ``disassemble`` for errors."""
    return count_resources(disassemble(cubin))
