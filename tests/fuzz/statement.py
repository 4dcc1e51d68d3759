"""A statement of a random model: lines of Python that take `h` [N, W] to `h` [N, W]."""

from dataclasses import dataclass

#: Features of `h`: divisible by 2 and by 3.
WIDTH = 6


@dataclass(frozen=True)
class Statement:
    """`$` stands for the statement's place in the model, so that names do not meet.

    Any statement can be left out of a model, which is how failing ones are made small.
    """

    name: str
    #: Lines of forward, which find `h` and `kept`, a list of earlier values.
    forward: str
    #: Lines of __init__.
    init: str = ""
    #: What a refusal may be excused by, and what is not compared (see refusals.py, oracle.py).
    tags: frozenset[str] = frozenset()
    #: Inputs beside `x` that it reads.
    inputs: frozenset[str] = frozenset()

    def numbered(self, number: int) -> tuple[list[str], list[str]]:
        """Its lines of __init__ and of forward."""
        init, forward = (
            text.replace("$", str(number)).strip("\n").split("\n") if text else []
            for text in (self.init, self.forward)
        )
        return init, forward


def of(name: str, forward: str, init: str = "", tags: str = "", inputs: str = "") -> Statement:
    return Statement(name, forward, init, frozenset(tags.split()), frozenset(inputs.split()))
