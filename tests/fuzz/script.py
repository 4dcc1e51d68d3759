"""A case as a script that needs nothing but torch and infinitybatch."""

from .case import Case

BODY = """

def made():
    torch.manual_seed({seed})
    random.seed({seed})
    np.random.seed({seed})
    return Model().double()


def batch(step, rows, further=False):
    g = torch.Generator().manual_seed({seed} * 100 + 10 * further + step)
    real = dict(generator=g, dtype=torch.float64)
    inputs = {{"x": torch.randn(rows, 5, **real)}}
{inputs}{targets}{layouts}{gradient}    return inputs, y


def seeded(step):
    torch.manual_seed({seed} + step)
    random.seed({seed} + step)
    np.random.seed({seed} + step)


def train(call, model, one_step, look):
    found = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum={momentum})
    for step, rows in enumerate({rows}):
{zero}        seeded(step)
{turn}        inputs, y = batch(step, rows)
        other, y_other = batch(step, rows, further=True)
        value = one_step(inputs, y, other, y_other)
        found.append({{"loss": value.detach().clone(), "next number": torch.rand(()),
                      "FIRED": torch.tensor(sum(FIRED.values()))}}
                     | {{n: None if p.grad is None else p.grad.to_dense().clone()
                        for n, p in model.named_parameters()}}
                     | {{n: b.clone() for n, b in model.named_buffers()}})
        FIRED.clear()
        if look:
            model.eval()
            with torch.no_grad():
                call(**batch(step, rows)[0])
            model.train()
        norm = sum(float(p.grad.to_dense().abs().square().sum())
                   for p in model.parameters() if p.grad is not None) ** 0.5
        optimizer.param_groups[0]["lr"] = 0.02 / max(1.0, norm)
        optimizer.step()
    return found


def loop(call, model):
    def one_step(inputs, y, other, y_other):
        value = loss(call(**inputs), y)
{loop}        return value

    return one_step


def marked(inputs):
    marks = {{"seq": lambda t: ib.batch_dim(t, 1), "table": ib.shared,
             "scale": ib.shared, "boxes": ib.shared}}
    return {{name: marks.get(name, lambda t: t)(value) for name, value in inputs.items()}}


native = made()
with ib.memory.peak() as scope:
    before = ib.memory.stats().live
    wanted = train(native, native, loop(native, native), {look})
needed = scope.peak - before
model = made()
options = {options}
{call}
for step, (a, b) in enumerate(zip(found, wanted)):
    for name in b:
        one, two = a[name], b[name]
        if one is None or two is None:
            print(step, name, "None for one alone" if one is not two else "None")
        else:
            print(step, name, float((one - two).abs().max()), "of", float(two.abs().max()))
"""

INPUTS = {
    "z": "torch.randn(rows, 4, **real)",
    "tokens": "torch.randint(7, (rows, 3), generator=g)",
    "seq": "torch.randn(3, rows, W, **real)",
    "table": "torch.randn(4, W, **real)",
    "scale": "torch.tensor(0.7, dtype=torch.float64)",
    "flag": "True",
    "ids": "torch.randint(3, (rows,), generator=g).double()",
    "boxes": "torch.cat([torch.randint(rows, (9, 1), generator=g).double(), "
    "torch.randn(9, 2, **real)], 1)",
    "words": "torch.randint(7, (rows, {words}), generator=g)",
    "numbers": "torch.randn(rows, {words}, **real)",
    "mask": "padded(rows, {words}, {left}, g)",
}
TARGETS = {
    "objects": "torch.cat([torch.randint(rows, (count := int(torch.randint(1, 3 * rows, (), "
    "generator=g)), 1), generator=g), torch.randn(count, CLASSES, **real)], 1)",
    "numbers": "torch.randn(rows, CLASSES, **real)",
    "labels": "torch.randint(CLASSES, (rows,), generator=g)",
    "classes": "torch.randint(CLASSES, (rows,), generator=g)\n    y[1::3] = -100",
    "words": "torch.randint(CLASSES, (rows, {words}), generator=g)\n"
    "    y[inputs['mask'] == 0] = -100",
}
LYING = """\
    x, how = inputs["x"], dict(enumerate({layouts})).get(step, "plain")
    inputs["x"] = {{
        "transposed": x.t().contiguous().t(),
        "holes": torch.stack([x, x], 2)[:, :, 0],
        "expanded": x[:, :1].expand_as(x),
    }}.get(how, x)
"""
LOOPS = {
    "once": "        value.backward()\n",
    "two calls": "        value = value + loss(call(**other), y_other)\n        value.backward()\n",
    "retain_graph": "        value.backward(retain_graph=True)\n        value.backward()\n",
    "no_grad between": "        with torch.no_grad():\n            call(**other)\n        value.backward()\n",
    "autograd.grad": (
        "        wanted = [p for p in model.parameters() if p.requires_grad]\n"
        "        grads = torch.autograd.grad(value, wanted, allow_unused=True)\n"
        "        for p, g in zip(wanted, grads):\n            p.grad = g\n"
    ),
}
NESTED = {
    "": "",
    "itself": "model = ib.wrap(model, micro_batch_size=2)\n",
    "the outlet": "model.out = ib.wrap(model.out, micro_batch_size=2)\n",
    "each child": "for name, child in list(model.named_children()):\n"
    "    setattr(model, name, ib.wrap(child, micro_batch_size=2))\n",
}
WRAP = """call = ib.wrap(model, **options)
called = lambda **inputs: call(**marked(inputs))
found = train(called, model, loop(called, model), {look})"""
VIRTUAL = """step = ib.VirtualBatch(model, ours, **options)
found = train(model, model, lambda i, y, *_: step.backward(marked(i), y).loss, {look})"""


def script_of(case: Case, comment: str = "") -> str:
    way, options = case.way, dict(case.way.options)
    if way.size is not None:
        options["micro_batch_size"] = way.size
    elif way.budget is None and "micro_batch_tokens" not in options:
        options["micro_batch_size"] = max(case.rows)
    budget = f"memory_budget=ib.memory.stats().live + int({way.budget} * needed)"
    given = ", ".join(
        [f"{k}={v!r}" for k, v in options.items()]
        + [budget] * (way.budget is not None)
        + [f"trim={way.trim}"] * bool(way.trim)
    )
    # In the order in which the fuzzer draws them.
    inputs = "".join(
        f"    inputs[{n!r}] = {text.format(words=case.words, left=case.left)}\n"
        for n, text in INPUTS.items()
        if n in case.inputs
    )
    body = BODY.format(
        seed=case.seed,
        inputs=inputs,
        gradient='    inputs["x"].requires_grad_()\n' * way.input_gradient,
        targets="    y = " + TARGETS[case.criterion.targets].format(words=case.words) + "\n",
        layouts=LYING.format(layouts=case.layouts) if case.layouts else "",
        turn="        turn(model, step)\n" * case.turns,
        momentum=case.momentum,
        rows=case.rows,
        loop=LOOPS[way.loop],
        look=case.evaluate,
        zero="" if case.accumulate else "        optimizer.zero_grad()\n",
        options=f"dict({given})",
        call=NESTED[way.nested]
        + (WRAP if way.api == "wrap" else VIRTUAL).format(look=case.evaluate),
    )
    said = "".join(f"# {line}\n" for line in comment.splitlines())
    return said + case.source() + body
