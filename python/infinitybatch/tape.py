"""Recording what a function does as a list of ATen ops, and replaying it without the function.

    outputs, tape = ib.tape.record(model, (images,), buffers=list(model.buffers()))
    print(tape)                  # one line for each op
    again = tape.replay(images)  # the same bits, with a graph of its own

What a list of ops cannot tell (autograd functions, hooks set inside, compiled regions) is noticed:
`tape.opaque` says why, and `replay` refuses.
"""

from ._C.tape import Tape, record

__all__ = ["Tape", "record"]


def __dir__() -> list[str]:
    """Public names alone, for completion."""
    return __all__
