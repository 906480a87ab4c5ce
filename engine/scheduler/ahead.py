"""When a step may be scheduled while the answer to the one before is still to come.

Its sequences are those that the answer may end, and their newest tokens are not known. Where a sequence ends by its
length is known, so it gets no row too many; one that ends by a stop token gets one, whose token is dropped.
"""

from collections.abc import Iterable

from engine.scheduler.sequence import Sequence


def must_wait(running: Iterable[Sequence], num_running: int, num_available_blocks: int) -> bool:
    """Whether the next step can only be scheduled when the answer is there. Then the whole step waits: a step without
    the sequences that wait, and another one for them, would read all weights twice.

    A sequence waits when its next row needs its newest token as such. All wait when a sequence might be preempted:
    each may need a block, and the token that is being sampled would be lost, or the one to preempt might just end.
    """
    if num_available_blocks < num_running:
        return True
    return any(
        seq.follows_tokens and len(seq.token_ids) <= seq.num_computed_tokens < seq.num_to_compute for seq in running
    )
