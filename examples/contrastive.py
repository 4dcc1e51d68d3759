import infinitybatch as ib
import torch
from torch.nn import functional as F

encoder = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 64))
log_scale = torch.nn.Parameter(torch.tensor(2.0))


def info_nce(outputs):  # every pair of the whole batch, and a learnable temperature
    a, b = F.normalize(outputs, dim=-1).unbind(1)
    return F.cross_entropy(a @ b.T * log_scale.exp(), torch.arange(len(a)))


batch = ib.VirtualBatch(encoder, ib.losses.coupled(info_nce), memory_budget="32MiB")
report = batch.backward(torch.randn(1024, 2, 256))  # exact gradients of encoder and log_scale
print(f"loss {report.loss:.4f}, peak {report.peak_bytes} bytes, {report.strategy}")
