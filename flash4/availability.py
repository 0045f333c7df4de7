"""Whether flash4 can run here, and if not, why."""

from dataclasses import dataclass

import torch

from flash4.dispatch import architecture
from flash4.jit import cache, versions


@dataclass(frozen=True)
class Availability:
    """Answer of ``is_available``: true or false, and ``print(it)`` says why.

    Attributes:
        devices: CUDA devices that flash4 has kernels for.
        reasons: what stands in the way; none if flash4 can run.
        notes: what works, but not as well as it could.
    """

    devices: tuple[int, ...] = ()
    reasons: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def __bool__(self):
        return not self.reasons

    def __str__(self):
        where = ", ".join(f"cuda:{index}" for index in self.devices)
        lines = [f"flash4 runs on {where}" if self else "flash4 cannot run"]
        lines += [f"  because {reason}" for reason in self.reasons]
        return "\n".join(lines + [f"  note: {note}" for note in self.notes])


def is_available(device=None) -> Availability:
    """Whether flash4 can run here; never raises. Looks at driver, devices and packages, and compiles nothing.

    Args:
        device: the CUDA device that is meant, as torch names it; default any.
    """
    reasons, devices = [], ()
    try:
        devices, found = _devices(device)
        reasons += found
    except Exception as error:  # a driver may fail in many ways
        reasons.append(f"PyTorch cannot ask for CUDA devices: {type(error).__name__}: {error}")
    notes = []
    loader, toolchain = versions.loader_obstacle(), versions.toolchain_obstacle()
    if loader is not None:
        reasons.append(loader)
    elif toolchain is not None:
        possible = versions.installed(versions.DSL) is not None or cache.CACHE.entries()
        (notes if possible else reasons).append(
            f"kernels that are not in {cache.cache_dir()} may not compile: {toolchain}"
        )
    problem = cache.CACHE.folder_obstacle()
    if problem is not None:
        notes.append(f"compiled kernels are not kept on disk: {problem}")
    return Availability(tuple(devices), tuple(reasons), tuple(notes))


def _devices(device) -> tuple[list[int], list[str]]:
    """(indices of the devices that have kernels, why there is none)."""
    if torch.version.cuda is None:
        return [], [f"this PyTorch ({torch.__version__}) is built without CUDA"]
    count = torch.cuda.device_count()
    if count == 0:
        return [], ["PyTorch sees no CUDA device; nvidia-smi and CUDA_VISIBLE_DEVICES may say why"]
    indices = range(count)
    if device is not None:
        asked = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        if asked.type != "cuda":
            return [], [f"{asked} is no CUDA device"]
        indices = [torch.cuda.current_device() if asked.index is None else asked.index]
    taken, reasons = [], []
    for index in indices:
        if index >= count:
            reasons.append(f"there is no cuda:{index}, PyTorch sees {count} devices")
            continue
        try:
            architecture(torch.cuda.get_device_capability(index))
            taken.append(index)
        except NotImplementedError as error:
            reasons.append(f"cuda:{index} ({torch.cuda.get_device_name(index)}): {error}")
    return taken, [] if taken else reasons
