"""Runs networks of packages that nobody here wrote beside the native whole batch.

    python tests/families/foreign.py [name …]         # compare with foreign.json
    python tests/families/foreign.py --write [name …]   # write it anew

Needs the packages whose versions foreign.json lists, which are no requirements of infinitybatch;
networks of a package that is not installed are left as they are listed, and said to be. Tiny ones,
in training mode, with dropout switched off, in float64. `streaming` and `wrap` are those of
compare.py; buffers are compared too. What forward draws at random is nobody's to compare, so no
such network is here.
"""

import importlib
import importlib.metadata
import importlib.util
import pathlib
import sys
import warnings
from collections.abc import Callable
from typing import Any

warnings.simplefilter("ignore")

import torch  # noqa: E402
from compare import N, beside_native  # noqa: E402
from listing import run_listed, without_chance  # noqa: E402
from torch import nn  # noqa: E402

RESULTS = pathlib.Path(__file__).parent / "foreign.json"
RANDOM = ("dropout", "drop_prob", "drop_rate", "p", "attn_drop", "proj_drop", "dropout_p")
Made = tuple[nn.Module, tuple[torch.Tensor, ...]]
#: Package on the index, module to import, how to make network and inputs.
NETWORKS: dict[str, tuple[str, str, Callable[[Any], Made]]] = {}


class Positional(nn.Module):
    """The network on inputs that are given by name."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, **inputs: torch.Tensor) -> Any:
        return self.network(*(inputs[key] for key in sorted(inputs)))


def network(package: str, module: str, name: str = "") -> Callable[..., Any]:
    def listed(make: Callable[[Any], Made]) -> Callable[[Any], Made]:
        NETWORKS[name or make.__name__] = (package, module, make)
        return make

    return listed


def images(size: int = 16, channels: int = 3) -> torch.Tensor:
    return torch.randn(N, channels, size, size)


def words(length: int = 8) -> torch.Tensor:
    return torch.randint(11, (N, length))


def sequences(length: int = 8, width: int = 16) -> torch.Tensor:
    return torch.randn(N, length, width)


# vit-pytorch: one image of 16 x 16, patches of 8 x 8, and what is special to each.
SMALL = dict(image_size=16, patch_size=8, num_classes=4, dim=16, depth=2, heads=2, mlp_dim=16)
VISION: dict[str, tuple[str, dict[str, Any]]] = {
    "vit": ("ViT", {}),
    "simple_vit": ("SimpleViT", {}),
    "deepvit": ("DeepViT", {}),
    "cait": ("CaiT", {"cls_depth": 1, "layer_dropout": 0.0}),
    "simple_vit_with_fft": ("SimpleViT", {"freq_patch_size": 8}),
    "simple_vit_with_register_tokens": ("SimpleViT", {}),
    "simple_vit_with_qk_norm": ("SimpleViT", {}),
    "vit_for_small_dataset": ("ViT", {}),
    "vit_with_patch_merger": ("ViT", {}),
    "parallel_vit": ("ViT", {"num_parallel_branches": 2}),
    "normalized_vit": ("nViT", {}),
    "rvt": ("RvT", {}),
    "learnable_memory_vit": ("ViT", {}),
    "simple_vit_with_value_residual": ("SimpleViT", {}),
    "simple_vit_with_hyper_connections": ("SimpleViT", {"num_residual_streams": 2}),
    "vit_with_keel_post_ln": ("ViT", {}),
    "simple_vit_orthog_residual_update": ("SimpleViT", {}),
    "simple_vit_with_specialized_cls": ("SimpleViT", {}),
    "simple_vit_with_relative_proj_pos_bias": ("SimpleViT", {}),
    "vit_5": ("ViT", {}),
    "xcit": ("XCiT", {"cls_depth": 1}),
    "simple_uvit": ("SimpleUViT", {"num_register_tokens": 1}),
}


def vision(kind: str, options: dict[str, Any]) -> Callable[[Any], Made]:
    return lambda module: (getattr(module, kind)(**{**SMALL, **options}), (images(),))


for _name, (_kind, _options) in VISION.items():
    network("vit-pytorch", f"vit_pytorch.{_name}", _name)(vision(_kind, _options))


@network("vit-pytorch", "vit_pytorch.levit")
def levit(m: Any) -> Made:
    sizes = {"stages": 2, "dim": (16, 16), "depth": 1, "heads": (2, 2), "mlp_mult": 2}
    return m.LeViT(image_size=64, num_classes=4, **sizes), (images(64),)


@network("vit-pytorch", "vit_pytorch.nest")
def nest(m: Any) -> Made:
    sizes = {"dim": 16, "heads": 2, "num_hierarchies": 2, "block_repeats": (1, 1)}
    return m.NesT(image_size=32, patch_size=4, num_classes=4, **sizes), (images(32),)


@network("vit-pytorch", "vit_pytorch.t2t")
def tokens_to_tokens(m: Any) -> Made:
    sizes = {"dim": 16, "depth": 1, "heads": 2, "mlp_dim": 16, "t2t_layers": ((7, 4), (3, 2))}
    return m.T2TViT(image_size=32, num_classes=4, **sizes), (images(32),)


@network("vit-pytorch", "vit_pytorch.mobile_vit")
def mobile_vit(m: Any) -> Made:
    channels = [4, 4, 8, 8, 8, 8, 8, 8, 8, 8, 16]
    return m.MobileViT((64, 64), [8, 8, 8], channels, num_classes=4), (images(64),)


@network("vit-pytorch", "vit_pytorch.max_vit")
def max_vit(m: Any) -> Made:
    sizes = {"dim_conv_stem": 8, "dim": 8, "dim_head": 8, "depth": (1, 1), "window_size": 4}
    return m.MaxViT(num_classes=4, mbconv_expansion_rate=2, dropout=0.0, **sizes), (images(32),)


@network("x-transformers", "x_transformers")
def rotary_decoder(m: Any) -> Made:
    options = {"dim": 16, "depth": 2, "heads": 2, "attn_dim_head": 8}
    layers = m.Decoder(rotary_pos_emb=True, attn_qk_norm=True, ff_glu=True, **options)
    return m.TransformerWrapper(num_tokens=11, max_seq_len=16, attn_layers=layers), (words(),)


@network("x-transformers", "x_transformers")
def residual_attention(m: Any) -> Made:
    options = {"dim": 16, "depth": 2, "heads": 2, "attn_dim_head": 8}
    layers = m.Encoder(residual_attn=True, sandwich_norm=True, **options)
    return m.TransformerWrapper(num_tokens=11, max_seq_len=16, attn_layers=layers), (words(),)


def quantized(layer: nn.Module, width: int = 8) -> Made:
    class Quantized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encode, self.quantize = nn.Linear(16, width), layer
            self.decode = nn.Linear(width, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.decode(self.quantize(self.encode(x))[0])

    return Quantized(), (sequences(),)


@network("vector-quantize-pytorch", "vector_quantize_pytorch")
def moving_codebook(m: Any) -> Made:
    return quantized(m.VectorQuantize(dim=8, codebook_size=16))


@network("vector-quantize-pytorch", "vector_quantize_pytorch")
def learned_codebook(m: Any) -> Made:
    options = {"learnable_codebook": True, "ema_update": False}
    return quantized(m.VectorQuantize(dim=8, codebook_size=16, **options))


@network("vector-quantize-pytorch", "vector_quantize_pytorch")
def finite_scalar(m: Any) -> Made:
    return quantized(m.FSQ(levels=[5, 5, 3]), 3)


@network("performer-pytorch", "performer_pytorch")
def performer(m: Any) -> Made:
    options = {"dim": 16, "depth": 2, "heads": 2, "dim_head": 8, "causal": False}
    return m.PerformerLM(num_tokens=11, max_seq_len=16, **options), (words(),)


@network("performer-pytorch", "performer_pytorch")
def reversible_performer(m: Any) -> Made:
    options = {"dim": 16, "depth": 2, "heads": 2, "dim_head": 8, "causal": False}
    return m.PerformerLM(num_tokens=11, max_seq_len=16, reversible=True, **options), (words(),)


@network("linformer", "linformer")
def linformer(m: Any) -> Made:
    return m.LinformerLM(num_tokens=11, seq_len=8, dim=16, depth=2, heads=2, k=4), (words(),)


@network("conformer", "conformer")
def conformer(m: Any) -> Made:
    sizes = {"ff_mult": 2, "conv_expansion_factor": 2, "conv_kernel_size": 7}
    return m.Conformer(dim=16, depth=2, dim_head=8, heads=2, **sizes), (sequences(),)


@network("perceiver-pytorch", "perceiver_pytorch")
def perceiver(m: Any) -> Made:
    latent = {"num_latents": 4, "latent_dim": 16, "latent_heads": 2, "latent_dim_head": 8}
    inputs = {"input_channels": 3, "input_axis": 2, "num_freq_bands": 2, "max_freq": 4.0}
    network = m.Perceiver(
        depth=2, cross_heads=1, cross_dim_head=8, num_classes=4, **inputs, **latent
    )
    return network, (torch.randn(N, 8, 8, 3),)


@network("egnn-pytorch", "egnn_pytorch")
def equivariant_graph(m: Any) -> Made:
    options = {"num_nearest_neighbors": 3, "norm_coors": True}
    graph = m.EGNN_Network(num_tokens=5, num_positions=6, dim=8, depth=2, **options)
    return graph, (torch.randint(5, (N, 6)), torch.randn(N, 6, 3))


@network("lambda-networks", "lambda_networks")
def lambda_layer(m: Any) -> Made:
    return m.LambdaLayer(dim=8, dim_out=8, r=5, dim_k=4, heads=2, dim_u=2), (images(8, 8),)


@network("bottleneck-transformer-pytorch", "bottleneck_transformer_pytorch")
def bottleneck_attention(m: Any) -> Made:
    sizes = {"proj_factor": 2, "downsample": True, "heads": 2, "dim_head": 4}
    return m.BottleStack(dim=8, fmap_size=8, dim_out=16, num_layers=2, **sizes), (images(8, 8),)


@network("local-attention", "local_attention")
def local_attention(m: Any) -> Made:
    sizes = {"dim": 16, "depth": 2, "heads": 2, "dim_head": 8, "local_attn_window_size": 4}
    return m.LocalTransformer(num_tokens=11, max_seq_len=16, **sizes), (words(16),)


@network("product-key-memory", "product_key_memory")
def product_key_memory(m: Any) -> Made:
    return m.PKM(dim=16, heads=2, dim_head=8, num_keys=8, topk=4), (sequences(),)


@network("pytorch-crf", "torchcrf")
def random_field(m: Any) -> Made:
    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scores, self.field = nn.Linear(6, 4), m.CRF(4, batch_first=True)

        def forward(self, x: torch.Tensor, tags: torch.Tensor) -> torch.Tensor:
            return -self.field(self.scores(x), tags, reduction="none")[:, None].expand(-1, 2)

    return Tagger(), (torch.randn(N, 7, 6), torch.randint(4, (N, 7)))


@network("rtdl-revisiting-models", "rtdl_revisiting_models")
def tabular_resnet(m: Any) -> Made:
    sizes = {"n_blocks": 2, "d_block": 8, "d_hidden": None, "d_hidden_multiplier": 2.0}
    return m.ResNet(d_in=4, d_out=2, dropout1=0.0, dropout2=0.0, **sizes), (torch.randn(N, 4),)


@network("torchdiffeq", "torchdiffeq")
def fixed_step_ode(m: Any) -> Made:
    class Flow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            times = torch.linspace(0, 1, 3, dtype=x.dtype)
            return m.odeint(lambda t, y: self.net(y), x, times, method="rk4")[-1]

    return Flow(), (torch.randn(N, 4),)


@network("normflows", "normflows")
def glow(m: Any) -> Made:
    """Its first forward initialises scale and shift from the samples."""

    class Glow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([m.flows.GlowBlock(4, 8) for _ in range(2)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x, _ = block.inverse(x)
            return x

    return Glow(), (torch.randn(N, 4, 4, 4),)


@network("lightly", "lightly.models.modules")
def siamese_heads(m: Any) -> Made:
    return nn.Sequential(nn.Linear(6, 8), m.SimCLRProjectionHead(8, 8, 4)), (torch.randn(N, 6),)


@network("lightly", "lightly.models.modules")
def memory_bank(m: Any) -> Made:
    class Nearest(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encode, self.bank = nn.Linear(6, 8), m.NNMemoryBankModule(size=(16, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.encode(x)
            return y - self.bank(y.detach(), update=True)

    return Nearest(), (torch.randn(N, 6),)


@network("opacus", "opacus.layers")
def private_lstm(m: Any) -> Made:
    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.head = m.DPLSTM(6, 8, batch_first=True), nn.Linear(8, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.lstm(x)[0])

    return Tagger(), (torch.randn(N, 4, 6),)


@network("efficientnet-pytorch", "efficientnet_pytorch")
def efficientnet(m: Any) -> Made:
    model = m.EfficientNet.from_name("efficientnet-b0", num_classes=4)
    model.set_swish(memory_efficient=False)
    model._global_params = model._global_params._replace(drop_connect_rate=0.0, dropout_rate=0.0)
    return model, (images(32),)


def outcome(name: str) -> dict[str, str]:
    package, module, make = NETWORKS[name]
    torch.manual_seed(0)
    model, inputs = make(importlib.import_module(module))
    torch.manual_seed(1)
    doubled = [t.double() if t.is_floating_point() else t for t in inputs]
    given = {f"x{i}": tensor for i, tensor in enumerate(doubled)}
    found = beside_native(Positional(without_chance(model, RANDOM)), given)
    return {"package": f"{package}=={importlib.metadata.version(package)}", **found}


def installed(name: str) -> bool:
    return importlib.util.find_spec(NETWORKS[name][1].split(".")[0]) is not None


def left_out(name: str) -> str | None:
    return None if installed(name) else f"{NETWORKS[name][0]} is not installed"


if __name__ == "__main__":
    sys.exit(run_listed(RESULTS, lambda: NETWORKS, outcome, left_out))
