"""The transfer without rows: every proxy token is proposed as a certainty."""

from __future__ import annotations


def point_mass_rows(**_drafted: object) -> None:
    """No rows, whatever was drafted and aligned (the arguments of ``paper.paper_scalars``).

    Lossless. A proxy token t without a row counts as drawn from the point mass at t, and however it was made, given all
    that made it, it *is* t with certainty. The verifier accepts it with probability q(t), and after a rejection samples
    from q with t taken out and the rest scaled to one. So t comes out with probability q(t) and any other token x with
    (1 - q(t)) · q(x) / (1 - q(t)) = q(x): the target's law. No property of the draft, of its tokenizer or of the
    alignment is needed (Leviathan et al., arXiv 2211.17192, appendix A.1, with the point mass as p).
    """
