"""What configs of backwards say of mods, and what their gradients need; DSL-free."""


class ModFacts:
    """Of a config with the fields ``score_mod``, ``score_mod_bwd``, ``mask_mod`` and ``aux``; see ``common.mods``."""

    def check_mods(self):
        """Check that the mods go together.

        Raises:
            ValueError: they do not.
        """
        if (self.score_mod != 0) != (self.score_mod_bwd != 0):
            raise ValueError("score_mod and score_mod_bwd go together")
        if self.aux and not (self.score_mod or self.mask_mod):
            raise ValueError("aux without a mod that reads them")

    @property
    def natural(self) -> bool:
        """Scores are in natural units, not in those of log2: a score_mod takes them so."""
        return self.score_mod != 0

    @property
    def has_mods(self) -> bool:
        """Whether verbs need the place of each pair of query and key."""
        return has_mods(self)


def has_mods(facts) -> bool:
    """Whether a call, or a config, has mods."""
    return facts.score_mod != 0 or facts.mask_mod != 0


def fields_of_mods(problem) -> dict[str, int]:
    """What a config takes of a problem's mods; a derivative of no score_mod is nobody's."""
    return {
        "score_mod": problem.score_mod,
        "score_mod_bwd": problem.score_mod_bwd if problem.score_mod else 0,
        "mask_mod": problem.mask_mod,
        "aux": problem.aux,
    }


def lacks_derivative(problem) -> str | None:
    """Why no kernel can run the backward of a problem: its score_mod has no derivative; else None."""
    if problem.score_mod and not problem.score_mod_bwd:
        return (
            "gradients through score_mod need its derivative; pass "
            "score_mod_bwd(grad, score, batch, head, q_idx, kv_idx, seqlen_info, aux_tensors), the gradient of score"
        )
    return None
