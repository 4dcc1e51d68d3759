"""What a random model returns, and how its loss reads it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Output:
    #: What forward returns; `self.out` maps W features to CLASSES.
    returned: str
    #: What `logits(outputs)` gives: [N, CLASSES].
    logits: str
    init: str = ""
    tags: frozenset[str] = frozenset()


OUTPUTS = {
    "tensor": Output("self.out(h)", "outputs"),
    "pair": Output("self.out(h), h", "outputs[0] + outputs[1][:, :CLASSES]"),
    "dictionary": Output(
        "{'logits': self.out(h), 'features': h, 'classes': self.out(h).argmax(1)}",
        "outputs['logits'] * outputs['features'].square().sum(1, keepdim=True).tanh()",
    ),
    "list": Output("[self.out(h), self.out(torch.tanh(h))]", "outputs[0] - outputs[1]"),
    "sequence": Output(
        "self.out(h.unsqueeze(1) * self.steps)",
        "outputs.mean(1)",
        "self.steps = nn.Parameter(torch.randn(3, 1))",
    ),
    "time first": Output(
        "self.out(h * self.steps)",
        "outputs.mean(0)",
        "self.steps = nn.Parameter(torch.randn(3, 1, 1))",
    ),
    "temperature": Output(
        "self.out(h), self.temperature.exp()",
        "outputs[0] * outputs[1]",
        "self.temperature = nn.Parameter(torch.tensor(0.3))",
    ),
    "prototypes": Output(
        "h, torch.tanh(self.prototypes)",
        "outputs[0] @ outputs[1].t()",
        "self.prototypes = nn.Parameter(torch.randn(CLASSES, W))",
    ),
    "penalty": Output(
        "self.out(h), self.out.weight.square().sum()", "outputs[0] + 0.1 * outputs[1]"
    ),
    "views": Output("self.out(h).chunk(2, 1)", "torch.cat([outputs[1], outputs[0]], 1)"),
    "one twice": Output("(lambda o: (o, o))(self.out(h))", "outputs[0] + outputs[1]"),
    "number and none": Output(
        "{'logits': self.out(h), 'layers': 3, 'cache': None}",
        "outputs['logits'] * outputs['layers']",
    ),
    "all pairs": Output(
        "self.out(h), h @ h.t()",
        "outputs[0] + outputs[1].mean(1, keepdim=True)",
        tags=frozenset(["mixes"]),
    ),
    "mean of the batch": Output(
        "self.out(h), h.mean()", "outputs[0] + outputs[1]", tags=frozenset(["mixes"])
    ),
    "channels": Output("self.out(h)[:, :, None, None]", "outputs.flatten(1)"),
}
