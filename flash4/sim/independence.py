"""Which steps of a schedule cannot disturb each other, so that one order of them stands for all.

Every step reads, writes or adds to some objects: barriers, lanes, bytes, and the lives of CTAs. Two steps whose objects do
not clash give the same state in either order. In a state, let a set of actors be closed: whoever may later clash with
the next step of one of its members is a member. Then nothing outside can get in between, and it is enough to go on with
that set (a persistent set). Every order of steps that do clash is still walked through.
"""

from typing import NamedTuple

from flash4.sim.machine import Step
from flash4.sim.memory import ADD


class Use(NamedTuple):
    """Objects that steps use, as bits."""

    reads: int = 0
    writes: int = 0
    adds: int = 0

    def __or__(self, other: "Use") -> "Use":
        return Use(self[0] | other[0], self[1] | other[1], self[2] | other[2])


class Independence:
    """Uses of every actor at each of its positions.

    Args:
        programs: steps of each actor, in groups.
        touches: (lane, number) -> the step that issued it.
        behind: lane -> the lane that its landings wait for.
        private: ids of spaces that only one actor uses.
        lives: for each CTA its tasks, as actors; and for each actor and position the CTAs that it uses.
    """

    def __init__(self, programs: list[list[list[Step]]], touches, behind, private, lives):
        self._touches, self._behind, self._private = touches, behind, private
        self._bits: dict[object, int] = {}
        steps = [step for program in programs for group in program for step in group]
        self._plain = {s.target for s in steps if s.kind == "arrive"} - {
            s.target for s in steps if s.kind == "arrive" and (s.count != 1 or s.nbytes)
        }
        self._masks = self._find_overlaps(steps)
        self._next = [[self._use_of(group) for group in program] for program in programs]
        self._add_lives(programs, *lives)
        self._future = []
        for uses in self._next:
            future = [Use()]
            for use in reversed(uses):
                future.append(future[-1] | use)
            self._future.append(future[::-1])

    def _bit(self, key) -> int:
        return 1 << self._bits.setdefault(key, len(self._bits))

    def _find_overlaps(self, steps) -> dict[object, int]:
        """Region -> bits of all regions that it overlaps."""
        regions = list(
            {
                id(region): region
                for step in steps
                for region, _ in step.touches
                if id(region.space) not in self._private
            }.values()
        )
        return {
            a: sum(self._bit(("bytes", id(b))) for b in regions if a.overlaps(b)) for a in regions
        }

    def _use_of(self, group: list[Step]) -> Use:
        use = Use()
        for step in group:
            touches = step.touches
            if step.kind == "wait":
                use |= Use(reads=self._bit(("barrier", step.target)))
            elif step.kind == "arrive":
                bit = self._bit(("barrier", step.target))
                use |= Use(adds=bit) if step.target in self._plain else Use(writes=bit)
            elif step.kind in ("issue", "land", "join"):
                lane = step.actor if step.kind == "land" else step.target
                use |= Use(writes=self._bit(("lane", lane)))
                if step.kind == "land":
                    touches = self._touches[lane, step.count].touches
                    if lane in self._behind:
                        use |= Use(writes=self._bit(("lane", self._behind[lane])))
            for region, write in touches:
                mask = self._masks.get(region, 0)
                kinds = Use(adds=mask) if write == ADD else Use(writes=mask)
                use |= kinds if write else Use(reads=mask)
        return use

    def _add_lives(self, programs, tasks: dict, visits: list[list[set]]):
        """The last step of a CTA's tasks against the last use of it by others; and their first against the first."""
        for cta, actors in tasks.items():
            ends = [("end", -1)] if cta.peers else [("end", -1), ("start", 0)]
            for name, end in ends:
                bit = self._bit((name, id(cta)))
                for actor, uses in enumerate(self._next):
                    mine = actor in actors
                    at = [i for i, visited in enumerate(visits[actor]) if cta in visited]
                    at = range(len(programs[actor])) if mine else at
                    if at:
                        uses[at[end]] |= Use(adds=bit) if mine else Use(reads=bit)

    def pick(self, positions: tuple[int, ...], able: list[int]) -> list[int]:
        """Those of the able actors that have to be tried."""
        best = able
        for seed in able:
            found = self._closure(positions, seed, able, len(best))
            if found is not None:
                best = found
            if len(best) == 1:
                break
        return best

    def _closure(self, positions, seed: int, able: list[int], limit: int) -> list[int] | None:
        """The able members of the closed set around one actor; None if they are not fewer than ``limit``."""
        members, use = {seed}, self._next[seed][positions[seed]]
        others = [
            actor
            for actor, uses in enumerate(self._next)
            if actor != seed and positions[actor] < len(uses)
        ]
        grown = True
        while grown:
            grown = False
            reads, writes, adds = use
            any_of, but_reads, but_adds = reads | writes | adds, writes | adds, reads | writes
            for actor in others:
                if actor in members:
                    continue
                later = self._future[actor][positions[actor]]
                if later[1] & any_of or later[0] & but_reads or later[2] & but_adds:
                    members.add(actor)
                    use |= self._next[actor][positions[actor]]
                    grown = True
                    break
            if sum(actor in members for actor in able) >= limit:
                return None
        return [actor for actor in able if actor in members]
