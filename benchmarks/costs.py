"""What infinitybatch costs beside native and beside peers, as text made of results."""

from pathlib import Path

from quoted import RESULTS, NotToBeQuoted, Quoted, latest

DEEP = "residual, 53 BatchNorm, 256 images"  # in results of `recompute`


def table(folder: Path) -> list[tuple[str, str, str]]:
    """What is in a row, time ÷ native, peaks."""
    rows = []
    time = latest("time", folder=folder)
    for workload, name in (
        ("convnet", "convnet, 512 images, a budget"),
        ("encoder", "transformer encoder, 256 sequences, a budget"),
        ("wide MLP", "wide MLP, 1,024 samples, a budget (its weights are its memory)"),
    ):
        ours = {"workload": workload, "contestant": "ours, budget"}
        peaks = f"{time.native_mib(workload)} ➝ {time.mib(**ours)} MiB"
        rows.append((name, f"{time.ratio(**ours):.2f}", peaks))

    coupled = latest("coupled", folder=folder)
    for workload in ("convnet", "encoder", "wide MLP"):
        ways = [
            {"workload": workload, "contestant": f"infinitybatch, {way}"}
            for way in ("none retained", "all retained")
        ]
        ratios = "; ".join(f"{coupled.ratio(**way):.2f}" for way in ways)
        if workload == "wide MLP":
            by_hand = coupled.ratio(workload=workload, contestant="accumulated pass")
            fits = coupled.ratio(workload=workload, contestant="infinitybatch, where it fits")
            ratios += f", where one pass over the same micro-batches by hand takes {by_hand:.2f}"
            ratios += f"; {fits:.2f} with a budget in which the whole batch fits"
        peaks = "; ".join(coupled.mib(**way) for way in ways)
        name = f"{workload}, contrastive loss, no graph kept; all kept"
        rows.append((name, ratios, f"{coupled.native_mib(workload)} ➝ {peaks} MiB"))

    losses = latest("losses", folder=folder)
    pairs = "4,096 pairs"
    ways = [
        {"workload": pairs, "contestant": who} for who in ("infinitybatch", "sentence-transformers")
    ]
    rows.append(
        (
            "4,096 pairs, small encoder, `losses.info_nce`; sentence-transformers' cached loss",
            "; ".join(f"{losses.ratio(**way):.2f}" for way in ways),
            f"{losses.native_mib(pairs)} ➝ {'; '.join(losses.mib(**way) for way in ways)} MiB",
        )
    )

    lengths = latest("lengths", folder=folder)
    texts = "contrastive, log-normal"
    ways = [
        {"workload": texts, "contestant": who}
        for who in (
            "infinitybatch VirtualBatch, planned",
            "infinitybatch wrap, tuned",
            "sentence-transformers, tuned",
        )
    ]
    rows.append(
        (
            "256 pairs of texts of 2 to 285 tokens, contrastive loss, padding trimmed: `VirtualBatch` "
            "under a budget; `wrap`; sentence-transformers' cached loss, trimmed",
            "; ".join(f"{lengths.ratio(**way):.2f}" for way in ways),
            f"{lengths.native_mib(texts)} ➝ {'; '.join(lengths.mib(**way) for way in ways)} MiB",
        )
    )

    heads = latest("heads", folder=folder)
    head = {"contestant": "infinitybatch, VirtualBatch"}
    rows.append(
        (
            "language model's head, 40,000 words, 8,000 tokens, `losses.linear_cross_entropy`",
            f"{heads.ratio(**head):.2f}",
            f"{heads.native_mib(heads.figure(**head)['workload'])} ➝ {heads.mib(**head)} MiB",
        )
    )

    sample = latest("sample", folder=folder)
    for workload, name in (
        (
            "transformer",
            "one sample of a transformer, `checkpoint_segments`; `torch.utils.checkpoint` around "
            "each block",
        ),
        ("residual net", "one sample of a residual net, the same"),
    ):
        names = [figure["contestant"] for figure in sample.figures(workload=workload)]
        ours = next(name for name in names if name.startswith("infinitybatch, checkpoint"))
        theirs = next(name for name in names if name.startswith("torch.utils.checkpoint"))
        ways = [{"workload": workload, "contestant": who} for who in (ours, theirs)]
        ratios = "; ".join(f"{sample.ratio(**way):.2f}" for way in ways)
        peaks = "; ".join(sample.mib(**way) for way in ways)
        rows.append((name, ratios, f"{sample.native_mib(workload)} ➝ {peaks} MiB"))

    norm = latest("batchnorm", folder=folder)
    ways = [
        {"workload": "residual net", "contestant": f"infinitybatch, {way}"}
        for way in ("none retained", "static graph, all retained")
    ]
    rows.append(
        (
            "residual net with BatchNorm, 256 images, micro-batches of 32: nothing kept; static "
            "graph, all kept",
            "; ".join(f"{norm.ratio(**way):.2f}" for way in ways),
            f"{norm.native_mib('residual net')} ➝ {'; '.join(norm.mib(**w) for w in ways)} MiB",
        )
    )

    again = latest("recompute", folder=folder)
    ways = [
        {"workload": DEEP, "contestant": f"infinitybatch, {way}"}
        for way in ("all kept", "within 60% of native", "within 35% of native")
    ]
    rows.append(
        (
            "residual net with 53 BatchNorm layers, nothing offloaded: all activations in front of "
            "them kept; budgets of 60 and 35 % of native's peak",
            "; ".join(f"{again.ratio(**way):.2f}" for way in ways),
            f"{again.native_mib(DEEP)} ➝ {'; '.join(again.mib(**way) for way in ways)} MiB",
        )
    )
    return rows


def sentences(folder: Path) -> list[str]:
    found = ["With BatchNorm the inputs of each such layer are kept for the whole batch. Where they do "
             "not fit the budget, some are recomputed: less memory takes more time."]  # fmt: skip
    two = latest("time", threads=2, folder=folder)
    budget, loop = (
        [
            next(
                two.ratio(workload=workload, contestant=figure["contestant"])
                for figure in two.figures(workload=workload)
                if matches(figure["contestant"])
            )
            for workload in ("convnet", "encoder")
        ]
        for matches in (lambda c: c == "ours, budget", lambda c: c.endswith("(the budget's)"))
    )
    found.append(
        "With two threads small micro-batches share the cores worse than a whole batch does: convnet "
        f"and encoder under a budget took {budget[0]:.2f} and {budget[1]:.2f} of native's time, "
        f"where the loop written by hand took {loop[0]:.2f} and {loop[1]:.2f}."
    )
    goals = latest("budget", folder=folder).run["findings"]["goals"]
    predicted = next(goal["measured"] for goal in goals if goal["promise"].startswith("predicted"))
    chosen = next(goal["measured"] for goal in goals if goal["promise"].startswith("chosen"))
    found.append(
        "Predicted peaks of convnet, encoder and MLP at 256, 4,096 and 65,536 samples are off by "
        f"{predicted.split(' (')[0]} at most, and the chosen micro-batch takes "
        f"{float(chosen.split()[0]):.2f} of the time of the fastest that fits at most."
    )
    cost = latest("loop", folder=folder)
    ratios = {
        count: [
            f"{100 * (figure['CPU ratio']['median'] - 1):.0f} %"
            for figure in cost.figures(contestant="infinitybatch", **{"micro-batches": count})
        ]
        for count in (8, 64, 512)
    }
    cold = f" ({ratios[8][1]} where each step begins with cold caches)" if ratios[8][1:] else ""
    found.append(
        f"The loop around tiny micro-batches costs {ratios[8][0]} over one written by hand at 8 of "
        f"them a step{cold}, {ratios[64][0]} at 64 and {ratios[512][0]} at 512."
    )
    try:
        found.append(data_set(latest("mnist", folder=folder)))
    except NotToBeQuoted:
        pass  # a sentence that nobody misses; a row would be
    found.append(beside_peers(latest("coupled", folder=folder)))
    found.append(allocator(latest("allocator", folder=folder)))
    return found


def allocator(native: Quoted) -> str:
    ours = native.figures(contestant="after import infinitybatch, malloc: default")
    torch = native.figures(contestant="torch, malloc: default")
    ratios = [figure["CPU over torch, default malloc"]["median"] for figure in ours]
    held = [a["resident"] / b["resident"] for a, b in zip(ours, torch, strict=True)]
    return (
        "Native training itself, with malloc as it is by default, takes "
        f"{min(ratios):.2f} to {max(ratios):.2f} of the time after `import infinitybatch` "
        f"(Linux), and the process holds {min(held):.2f} to {max(held):.2f} of the memory: large "
        "tensors come in pages that are kept for the next ones."
    )


def data_set(mnist: Quoted) -> str:
    rows = {row[0]: row for each in mnist.run["findings"]["tables"] for row in each["rows"]
            if "command line" in each["caption"]}  # fmt: skip
    small, large = rows["MNIST"], rows["MNIST, 1,000,000 samples"]
    return (
        "`infinitybatch train` took all 60,000 images of MNIST as one batch within 32 MiB "
        f"({small[7]} held-out accuracy after {small[2]} steps), and 1,000,000 images within 256 MiB "
        f"at {large[8]} µs of CPU a sample; native runs out of memory in both."
    )


def beside_peers(coupled: Quoted) -> str:
    """Of their time at their peak, and at the same micro-batches."""
    peers = ("gradient caching by hand", "GradCache", "sentence-transformers")
    at_peak, alike = [], []
    for workload in ("convnet", "encoder", "wide MLP"):
        for peer in peers:
            key = {"workload": workload}
            if not coupled.figures(**key, contestant=peer):
                continue
            theirs = coupled.ratio(**key, contestant=peer)
            for best in (peer, f"{peer}, tuned"):  # results of before peers were tuned have none
                at = f"infinitybatch, at the peak of {best}"
                if coupled.figures(**key, contestant=at):
                    ours = coupled.ratio(**key, contestant=at)
                    at_peak.append(ours / coupled.ratio(**key, contestant=best))
            alike.append(coupled.ratio(**key, contestant="infinitybatch, none retained") / theirs)
    return (
        "Within the peak of gradient caching (GradCache, sentence-transformers' cached loss and, "
        "where it was run so, by hand) contrastive steps took "
        f"{min(at_peak):.2f} to {max(at_peak):.2f} of its time on convnet, encoder and wide MLP; in "
        f"micro-batches of the same size, with no graph kept, {min(alike):.2f} to {max(alike):.2f}."
    )


def as_table(rows: list[tuple[str, str, str]]) -> list[str]:
    head = ["| | time ÷ native | peak of native ➝ ours |", "|---|---|---|"]
    return head + [f"| {' | '.join(row)} |" for row in rows]


def whole(folder: Path = RESULTS) -> str:
    """Every row, and what they do not show."""
    rest = [f"- {each}" for each in sentences(folder)]
    return "\n\n" + "\n".join([*as_table(table(folder)), "", *rest, "", ""])


def short(folder: Path = RESULTS) -> str:
    """Five rows, the dearest among them: where samples are independent, where the loss compares
    them, where they are of other lengths, where layers see the whole batch, and a large head."""
    rows = []
    for suite, workload, contestant, name in (
        ("time", "convnet", "ours, budget", "convnet, 512 images"),
        ("coupled", "encoder", "infinitybatch, none retained", "encoder, contrastive loss"),
        ("lengths", "contrastive, log-normal", "infinitybatch wrap, tuned", "texts, trimmed"),
        ("recompute", DEEP, "infinitybatch, within 35% of native", "residual net, BatchNorm"),
        ("heads", "", "infinitybatch, VirtualBatch", "head of a language model"),
    ):
        quoted = latest(suite, folder=folder)
        ours = {"contestant": contestant} | ({"workload": workload} if workload else {})
        native = quoted.native_mib(quoted.figure(**ours)["workload"])
        rows.append((name, f"{quoted.ratio(**ours):.2f}", f"{native} ➝ {quoted.mib(**ours)} MiB"))
    return "\n\n" + "\n".join([*as_table(rows), "", ""])
