"""Writing in place, buffers, plain attributes, hooks, code that no recording can hold."""

from .statement import Statement, of

LINE = "torch.linspace(0, 1, W, dtype=h.dtype)"


def made_once(name: str, slot: str, init: str, value: str = LINE) -> Statement:
    """What the first call makes, of no sample, and all read."""
    forward = f"""
if self.{slot} is None:
    self.{slot} = {value}
h = h + self.{slot}"""
    return of(name, forward, init, tags="first_call")


IN_PLACE = [
    of("multiply in place", "h = h * 1.0\nh.mul_(1.2)"),
    of(
        "columns in place",
        "h = h.clone()\nh[:, :2] += self.p$\nh[:, 3].mul_(0.5)",
        "self.p$ = nn.Parameter(torch.randn(2))",
    ),
    of("activation in place", "h = F.leaky_relu_(self.m$(h), 0.2)", "self.m$ = nn.Linear(W, W)"),
    of("through a view", "h = h * 1.0\nv$ = h.view(-1)\nv$.add_(0.25)\nh = torch.tanh(h)"),
    of("base after view", "h = h * 1.0\nv$ = h.t()[0]\nh.mul_(1.5)\nh = h + v$.unsqueeze(1)"),
    of(
        "into an empty tensor",
        """
e$ = torch.empty_like(h)
e$[:, ::2] = h[:, 1::2] * 2
e$[:, 1::2] = h[:, ::2]
h = e$""",
    ),
    of("split written", "a$, b$ = (h * 1.0).split(3, 1)\nh = torch.cat([a$ * b$, b$], 1)"),
    of("masked fill", "h = (h * 1.0).masked_fill_(h.detach() > 1.5, 1.5)"),
    of("scatter in place", "h = (h * 1.0).scatter_add_(1, h.detach().argsort(1), h * 0.5)"),
    of(
        "out=",
        "with torch.no_grad():\n    o$ = torch.empty_like(h)\n    torch.exp(-h * h, out=o$)\nh = h * o$",
    ),
    of(
        "writes the input",
        "z.mul_(1.01)\nh = h + z.sum(1, keepdim=True)",
        tags="input_write",
        inputs="z",
    ),
    of("detached write", "h = h * 1.0\nh.detach().mul_(2.0)", tags="dispatch_only"),
    of("data write", "h = h * 1.0\nh.data.add_(0.5)", tags="dispatch_only"),
]

STATE = [
    of(
        "counter buffer",
        "self.b$ += 1\nh = h * 1.0",
        "self.register_buffer('b$', torch.zeros((), dtype=torch.long))",
    ),
    of(
        "counter buffer that is read",
        "self.b$ += 1\nh = h * (1 + 0.1 * self.b$)",
        "self.register_buffer('b$', torch.zeros((), dtype=torch.long))",
    ),
    of(
        "decaying buffer",
        "h = h * self.b$.clone()\nself.b$.mul_(0.9)",
        "self.register_buffer('b$', torch.ones(W))",
    ),
    of(
        "new buffer",
        "self.b$ = self.b$ * 0.5 + 0.5\nh = h + self.b$",
        "self.register_buffer('b$', torch.zeros(W))",
    ),
    of(
        "buffer of weights",
        """
with torch.no_grad():
    self.b$.lerp_(self.m$.weight, 0.1)
h = self.m$(h) + F.linear(h, self.b$)""",
        """
self.m$ = nn.Linear(W, W)
self.register_buffer('b$', torch.zeros(W, W))""",
    ),
    of(
        "momentum encoder",
        """
with torch.no_grad():
    for a$, b$ in zip(self.m$.parameters(), self.n$.parameters()):
        a$.mul_(0.9).add_(b$, alpha=0.1)
    t$ = self.m$(h)
h = self.n$(h) * torch.sigmoid(t$)""",
        """
self.n$ = nn.Linear(W, W)
self.m$ = nn.Linear(W, W).requires_grad_(False)""",
        tags="weight_written",
    ),
    of(
        "moving average",
        """
if self.training:
    with torch.no_grad():
        self.b$.lerp_(h.mean(0), 0.1)
h = h - self.b$""",
        "self.register_buffer('b$', torch.zeros(W))",
        tags="samples_in_state mixes",
    ),
    of(
        "sample count",
        "self.b$ += len(h)\nh = h * 1.0",
        "self.register_buffer('b$', torch.zeros(()))",
        tags="samples_in_state",
    ),
    of("call counter", "self.calls$ += 1\nh = h * 1.0", "self.calls$ = 0", tags="number_state"),
    of(
        "warm-up",
        "self.calls$ += 1\nh = h * min(1.0, 0.3 * self.calls$)",
        "self.calls$ = 0",
        tags="number_state number_read",
    ),
    of("schedule by phase", "h = h * self.phase$ if self.training else h", "self.phase$ = 0.7"),
    of(
        "switch that flips",
        """
self.flip$ = not self.flip$
h = torch.tanh(h) if self.flip$ else torch.sin(h)""",
        "self.flip$ = False",
        tags="number_state number_read",
    ),
    of(
        "list of numbers",
        "self.rows_seen$.append(len(h))\nh = h * 1.0",
        "self.rows_seen$ = []",
        tags="number_state",
    ),
    of("left features", "self.left$ = h.detach()", "self.left$ = None", tags="leaves"),
    of(
        "hidden state",
        """
if self.left$ is not None and self.left$.shape == h.shape:
    h = h + 0.1 * self.left$
self.left$ = h.detach()""",
        "self.left$ = None",
        tags="carried samples_in_state",
    ),
    made_once("cache made once", "table$", "self.table$ = None"),
    of(
        "sparse buffer",
        "h = (self.b$.to(h.dtype) @ h.t()).t()",
        "self.register_buffer('b$', (torch.eye(W) + torch.eye(W).roll(1, 0)).to_sparse())",
    ),
    of(
        "sparse attribute",
        "h = (self.b$.to(h.dtype) @ h.t()).t()",
        "self.b$ = (torch.eye(W) - torch.eye(W).roll(2, 0)).to_sparse()",
    ),
    of(
        "sparse buffer that is written",
        """
h = (self.b$.to(h.dtype) @ h.t()).t()
with torch.no_grad():
    self.b$.mul_(0.9)""",
        "self.register_buffer('b$', torch.eye(W).roll(1, 0).to_sparse())",
        tags="opaque",
    ),
    of(
        "quantized buffer",
        "h = h + self.b$.dequantize().to(h.dtype)",
        """
v$ = torch.linspace(-1, 1, W, dtype=torch.float32)
self.register_buffer('b$', torch.quantize_per_tensor(v$, 0.05, 3, torch.qint8))""",
    ),
    of(
        "buffer quantized by channel that is written",
        """
h = h + self.b$.dequantize().to(h.dtype).sum(1)
with torch.no_grad():
    self.b$.copy_(self.b$.clone())""",
        """
v$ = torch.linspace(-1, 1, 2 * W, dtype=torch.float32).view(W, 2)
s$, z$ = torch.linspace(0.1, 0.2, W), torch.zeros(W, dtype=torch.long)
self.register_buffer('b$', torch.quantize_per_channel(v$, s$, z$, 0, torch.qint8))""",
        tags="opaque",
    ),
    of(
        "expanded buffer",
        "h = h * self.b$",
        "self.register_buffer('b$', torch.full((1,), 0.8).expand(W))",
    ),
    of(
        "list that is read",
        """
self.history$.append(0.1 * (len(self.history$) + 1))
h = h * (0.5 + self.history$[-1])""",
        "self.history$ = []",
        tags="number_state number_read",
    ),
    of(
        "list that is read from its third entry on",
        """
self.history$.append(0.3 * (len(self.history$) + 1))
h = h * self.history$[2] if len(self.history$) > 2 else h * 1.0""",
        "self.history$ = []",
        tags="number_state number_read",
    ),
    of(
        "dict that counts",
        """
self.counts$['n'] = self.counts$.get('n', 0) + 1
h = h * (1.0 if self.counts$['n'] < 3 else 0.6)""",
        "self.counts$ = {}",
        tags="number_state number_read",
    ),
    of(
        "means that are read later",
        """
self.means$.append(float(h.detach().mean()))
h = h * (1.2 + self.means$[1]) if len(self.means$) > 2 else h * 1.0""",
        "self.means$ = []",
        tags="number_state number_read samples_in_state host_read",
    ),
    of(
        "hook that keeps features",
        """
self.kept$.clear()
h = self.m$(h)
h = h + 0.1 * torch.sin(self.kept$[-1])""",
        """
self.m$ = nn.Linear(W, W)
self.kept$ = []
self.m$.register_forward_hook(lambda module, given, made: self.kept$.append(made))""",
        tags="leaves",
    ),
]

#: Buffers and parameters that hold nothing until the first call, or lie in each other's memory.
SLOTS = [
    of(
        "buffer of the first batch",
        """
if self.b$ is None:
    self.b$ = h.detach().mean(0)
h = h - self.b$""",
        "self.register_buffer('b$', None)",
        tags="samples_in_state mixes first_call",
    ),
    of(
        "flag and buffer of the first batch",
        """
if not self.ready$:
    self.b$, self.ready$ = h.detach().mean(0), True
h = h - self.b$""",
        "self.register_buffer('b$', None)\nself.ready$ = False",
        tags="samples_in_state mixes first_call number_state",
    ),
    of(
        "weights of the first batch",
        """
if self.ready$.item() == 0:
    with torch.no_grad():
        self.g$.copy_(h.detach().abs().mean(0))
        self.ready$.fill_(1)
h = h * self.g$""",
        "self.g$ = nn.Parameter(torch.ones(W))\nself.register_buffer('ready$', torch.zeros(()))",
        tags="samples_in_state mixes first_call weight_written host_read",
    ),
    made_once("mask of the first call", "b$", "self.register_buffer('b$', None)"),
    made_once(
        "parameter of the first call",
        "g$",
        "self.register_parameter('g$', None)",
        f"nn.Parameter({LINE})",
    ),
    of(
        "buffer that is used once",
        """
if self.b$ is not None:
    h, self.b$ = h + self.b$, None""",
        "self.register_buffer('b$', torch.ones(W))",
        tags="first_call",
    ),
    of(
        "buffer and its view",
        "self.b$.mul_(0.9)\nh = h * torch.cat([self.v$, self.v$])",
        """
self.register_buffer('b$', torch.ones(W, dtype=torch.float64))
self.register_buffer('v$', self.b$[:W // 2])""",
        tags="opaque",
    ),
    of(
        "view and its buffer",
        "h = h * self.b$\nself.v$.mul_(0.9)\nh = h + self.b$",
        """
self.register_buffer('b$', torch.ones(W, dtype=torch.float64))
self.register_buffer('v$', self.b$.data[:W // 2])""",
        tags="opaque",
    ),
    of(
        "buffers that change places, and one is written",
        """
self.b$, self.v$ = self.v$, self.b$
self.b$.add_(0.3)
h = h * (1 + 0.1 * self.b$ - 0.1 * self.v$)""",
        """
self.register_buffer('b$', torch.ones(W))
self.register_buffer('v$', torch.zeros(W))""",
        tags="opaque",
    ),
    of(
        "buffer in a parameter's memory",
        "self.b$ = self.m$.weight.detach()\nh = self.m$(h) + F.linear(h, self.b$)",
        "self.m$ = nn.Linear(W, W)\nself.register_buffer('b$', None)",
        tags="opaque",
    ),
    of(
        "module of the first call",
        """
if self.m$ is None:
    self.m$ = nn.Linear(W, W).to(h.dtype)
    with torch.no_grad():
        for p$ in self.m$.parameters():
            p$.copy_(torch.linspace(-0.5, 0.5, p$.numel(), dtype=h.dtype).view_as(p$))
h = h + self.m$(h)""",
        "self.m$ = None",
        tags="first_call",
    ),
    of(
        "list of parameters of the first call, and a log",
        """
self.calls$.append(len(self.calls$))
if not self.kept$:
    self.kept$.append(nn.Parameter(torch.linspace(0.5, 1, W, dtype=h.dtype)))
h = h * self.kept$[0] * (1 + 0.1 * len(self.calls$))""",
        "self.kept$, self.calls$ = [], []",
        tags="first_call number_state number_read",
    ),
]

HOOKS = [
    of(
        "forward hook",
        "h = self.m$(h)",
        """
self.m$ = nn.Linear(W, W)
self.m$.register_forward_hook(lambda module, given, made: made * 1.1)""",
    ),
    of(
        "forward pre-hook",
        "h = self.m$(h)",
        """
self.m$ = nn.Linear(W, W)
self.m$.register_forward_pre_hook(lambda module, given: (torch.sin(given[0]),))""",
    ),
    of(
        "counting forward hook",
        "h = self.m$(h)",
        """
self.m$ = nn.Linear(W, W)
self.m$.rows_seen = []
self.m$.register_forward_hook(lambda module, given, made: module.rows_seen.append(len(made)))""",
        tags="noted",
    ),
    of(
        "backward hook",
        "h = self.m$(h)",
        """
self.m$ = nn.Linear(W, W)
self.m$.register_full_backward_hook(lambda module, inward, outward: (inward[0] * 0.5,))""",
        tags="opaque",
    ),
    of(
        "parameter hook",
        "h = self.m$(h)",
        """
self.m$ = nn.Linear(W, W)
self.m$.weight.register_hook(lambda gradient: FIRED.update(['parameter $']) or gradient * 2)""",
    ),
    of(
        "post-accumulate hook",
        "h = self.m$(h)",
        """
self.m$ = nn.Linear(W, W)
self.m$.weight.register_post_accumulate_grad_hook(lambda p: FIRED.update(['accumulated $']))""",
    ),
    of(
        "tensor hook",
        """
h = h * 1.0
if h.requires_grad:
    h.register_hook(lambda gradient: gradient * 0.7)""",
        tags="opaque",
    ),
    of(
        "hook installed once",
        """
if not self.on$:
    self.m$.register_forward_hook(lambda module, given, made: made * 0.9)
    self.on$ = True
h = self.m$(h)""",
        "self.m$ = nn.Linear(W, W)\nself.on$ = False",
        tags="first_call number_state",
    ),
    of(
        "hook for each call",
        """
handle$ = self.m$.register_forward_hook(lambda module, given, made: made + 0.1)
h = self.m$(h)
handle$.remove()""",
        "self.m$ = nn.Linear(W, W)",
    ),
]

CODE = [
    of("no_grad stretch", "with torch.no_grad():\n    s$ = torch.sigmoid(h) * 2\nh = h * s$"),
    of("detach", "h = h + torch.tanh(h).detach() * 0.5"),
    of(
        "enable_grad within no_grad",
        """
with torch.no_grad():
    s$ = torch.cos(h)
    with torch.enable_grad():
        h = h * s$ + torch.sin(h)""",
    ),
    of(
        "checkpoint",
        "h = checkpoint(lambda t: torch.tanh(self.m$(t)) + t, h, use_reentrant=False)",
        "self.m$ = nn.Linear(W, W)",
        tags="opaque",
    ),
    of(
        "re-entrant checkpoint",
        "h = checkpoint(self.m$, h, use_reentrant=True)",
        "self.m$ = nn.Sequential(nn.Linear(W, W), nn.Tanh())",
        tags="opaque",
    ),
    of("autograd.Function", "h = Square.apply(torch.tanh(h)) + h", tags="opaque"),
    of("straight through", "h = h + (h.round() - h).detach()"),
    of("autograd.Function that is straight through", "h = Sign.apply(h) * 0.5 + h", tags="opaque"),
    of(
        "gradient in forward",
        """
with torch.enable_grad():
    t$ = h.detach().requires_grad_()
    g$, = torch.autograd.grad(torch.sin(t$).sum(), t$)
h = h + g$""",
        tags="opaque",
    ),
    of(
        "read by the host for a table",
        """
order$ = [int(i) for i in self.b$.tolist()]
h = h[:, order$]""",
        "self.register_buffer('b$', torch.arange(W).flip(0))",
        tags="host_read",
    ),
    of(
        "read by the host",
        "h = torch.stack([r * (1.5 if float(r[0]) > 0 else 0.5) for r in h])",
        tags="host_read dynamic",
    ),
    of(
        "through NumPy",
        "h = h + torch.from_numpy(np.sin(h.detach().cpu().numpy())).to(h)",
        tags="opaque host_read",
    ),
]

#: Settings inside of attributes, which the loop changes between steps.
DIALS = [
    of("dial in a dict", "h = h * self.dial$['by']", "self.dial$ = {'by': 0.7}", tags="dial"),
    of(
        "dial of a partial",
        "h = self.dial$(h)",
        "self.dial$ = functools.partial(torch.mul, other=0.7)",
        tags="dial",
    ),
    of("dial in an object", "h = h * self.dial$.by", "self.dial$ = Dial()", tags="dial"),
    of(
        "dial of a class",
        "h = h * self.dial$.by",
        "self.dial$ = type('Own', (Dial,), {})",
        tags="dial",
    ),
    of(
        "dial that is a function",
        "h = self.dial$(h)",
        "self.dial$ = lambda h: h * 0.7",
        tags="dial",
    ),
]
