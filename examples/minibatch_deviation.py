import infinitybatch as ib
import torch
from torch.nn import functional as F


def deviation(x):  # StyleGAN2: how much samples differ from others of their group
    groups = x.reshape(4, -1, x.shape[1])
    return groups.std(0, unbiased=False).mean(1, keepdim=True).repeat(4, 1)


class Discriminator(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = torch.nn.Linear(256, 512), torch.nn.Linear(513, 1)

    def forward(self, x):
        x = F.leaky_relu(self.first(x), 0.2)
        spread = ib.across_batch(deviation, x)  # of the whole batch, in any micro-batch
        return self.last(torch.cat([x, spread], 1))


batch = ib.VirtualBatch(Discriminator(), torch.nn.BCEWithLogitsLoss(), micro_batch_size=100)
report = batch.backward(torch.randn(1024, 256), torch.randint(2, (1024, 1)).float())
print(f"loss {report.loss:.4f}, peak {report.peak_bytes} bytes, {report.strategy}")
