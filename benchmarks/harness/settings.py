"""How one run of a suite is set."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Settings:
    threads: int = 1
    malloc: str = "tuned"  #: "tuned" or "untuned", see machine.py
    rounds: int = 20
    toy: bool = False  #: sizes that only show that the harness works

    def __str__(self) -> str:
        threads = "one thread" if self.threads == 1 else f"{self.threads} threads"
        return f"{threads}, {self.malloc} malloc" + (", toy sizes" if self.toy else "")
