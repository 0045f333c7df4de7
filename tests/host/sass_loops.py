"""Loops of a kernel's machine code, found by their backward branches."""

import re
from dataclasses import dataclass

_LABEL = re.compile(r"^(\.L_x_\d+):")
_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+\s+)?([A-Z][\w.]*)(.*);", re.M)
_TARGET = re.compile(r"`\((\.L_x_\d+)\)")


@dataclass(frozen=True)
class Loop:
    """Instructions from the target of a backward branch to the branch."""

    names: tuple[str, ...]

    def count(self, *prefixes: str) -> int:
        """How many instructions begin with one of the prefixes; all without any, NOPs apart."""
        if not prefixes:
            return sum(name != "NOP" for name in self.names)
        return sum(name.startswith(prefixes) for name in self.names)


def loops(sass: str) -> list[Loop]:
    """All loops of a kernel, the shortest first; waits that spin far away make long ones that are none."""
    names, labels, branches = [], {}, []
    for line in sass.splitlines():
        label, instruction = _LABEL.match(line), _INSTRUCTION.match(line)
        if label:
            labels[label.group(1)] = len(names)
        elif instruction:
            target = _TARGET.search(instruction.group(2))
            if instruction.group(1).startswith("BRA") and target:
                branches.append((len(names), target.group(1)))
            names.append(instruction.group(1))
    found = {(labels[target], at) for at, target in branches if labels.get(target, at + 1) <= at}
    return [
        Loop(tuple(names[begin : end + 1]))
        for begin, end in sorted(found, key=lambda x: x[1] - x[0])
    ]
