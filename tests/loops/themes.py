"""Every loop there is: importing a theme lists its loops."""

import importlib

from .loop import LOOPS, Loop

#: Files of loops, with what their loops have in common.
THEMES = {
    "layers": "Ordinary layers and patterns, which have to be exact",
    "mixing": "Ops that combine samples",
    "mining": "Pairs, similarities and statistics of the batch in forward",
    "counting": "What the number of samples decides, and their places in the batch",
    "values": "What values of the batch decide: branches, sizes, repetitions",
    "later": "What the first batch does not show",
    "state": "Buffers and Python numbers that forward changes",
    "teachers": "Second networks, and parameters that forward writes",
    "random_numbers": "Random numbers, asked for as native draws them",
    "backward_alone": "What happens in backward: hooks, functions of one's own, nested gradients",
    "outputs": "Outputs of every form",
    "losses": "Losses over the batch, and losses with parameters and state of their own",
    "sequences": "Lengths, padding and recurrences",
    "turns": "Loops that are more than one backward and one step",
}


def every_loop() -> dict[str, Loop]:
    for theme in THEMES:
        importlib.import_module(f".{theme}", __package__)
    return LOOPS
