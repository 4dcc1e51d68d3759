"""How many networks of the lists in tests/families are exact, as text."""

import json
from pathlib import Path

from quoted import NotToBeQuoted

FAMILIES = Path(__file__).resolve().parents[1] / "tests" / "families"


def of_list(name: str, what: str) -> str:
    """How many networks of a list are exact in every way, and what the others are.

    Raises:
        NotToBeQuoted: where one is wrong.
    """
    listed = json.loads((FAMILIES / name).read_text())["networks"]
    tried = {n: each for n, each in listed.items() if "left out" not in each}
    ways = [[each["streaming"], each["wrap"]] for each in tried.values()]
    if wrong := [n for n, each in tried.items() if "WRONG" in str(each)]:
        raise NotToBeQuoted(f"{name}: {', '.join(wrong)}: WRONG")
    exact = sum(all(way == "exact" for way in both) for both in ways)
    others = []
    for begin, words in (
        ("as native rounds", "within what native moves in other orders and scales"),
        ("native ", "not run natively in fp64"),
    ):
        if count := sum(any(way.startswith(begin) for way in both) for both in ways):
            others.append(f"{count} {words}")
    refused = [each for each in tried.values() if "refused: " in each["streaming"] + each["wrap"]]
    # In micro-batches of another size, or by the other way, it is exact.
    at_times = sum("exact" in str(each) for each in refused)
    if at_times:
        others.append(f"{at_times} refused by a typed error in some sizes of micro-batches")
    if len(refused) > at_times:
        others.append(f"{len(refused) - at_times} in all")
    if len(listed) > len(tried):
        others.append(f"{len(listed) - len(tried)} more are too large for the list")
    others.append(f"`tests/families/{name}`")
    return f"{exact} of {len(tried)} {what} are exact ({', '.join(others)})"


def families() -> str:
    hugging_face = json.loads((FAMILIES / "results.json").read_text())["networks"].values()
    replay = sum(each["tape"] == "replays" for each in hugging_face)
    lists = [
        of_list("results.json", "tiny Hugging Face families"),
        of_list("images.json", "modules of timm, each by its smallest model,"),
        of_list("foreign.json", "small networks of other packages"),
    ]
    return (
        f"In fp64 beside the native whole batch, by streaming and by `wrap`: {'; '.join(lists)}. Of "
        f"the Hugging Face ones {replay} replay, the others run twice."
    )
