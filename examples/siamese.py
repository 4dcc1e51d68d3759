"""Two towers under one contrastive loss, each with its own optimizer, schedule and frequency."""

import infinitybatch as ib
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LinearLR, StepLR


class Pair(nn.Module):
    """Both views go in together, so that the loss sees every pair of the whole batch."""

    def __init__(self):
        super().__init__()
        self.image = nn.Sequential(
            nn.Linear(64, 128, bias=False), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 16)
        )
        self.text = nn.Sequential(nn.Linear(32, 64), nn.Dropout(0.1), nn.Tanh(), nn.Linear(64, 16))

    def forward(self, images, texts):
        return F.normalize(self.image(images), dim=-1), F.normalize(self.text(texts), dim=-1)


def info_nce(outputs):
    """How well each image finds its text among all, and each text its image."""
    scores = outputs[0] @ outputs[1].T / 0.1
    right = torch.arange(len(scores))
    return (F.cross_entropy(scores, right) + F.cross_entropy(scores.T, right)) / 2


class Training:
    """One exact gradient for both towers; the text tower steps with the sum of two batches'."""

    def __init__(self, pair, text_every=2, **options):
        self.pair, self.text_every, self.done = pair, text_every, 0
        self.batch = ib.VirtualBatch(pair, ib.losses.coupled(info_nce), **options)
        self.image_optimizer = torch.optim.Adam(pair.image.parameters(), lr=2e-3)
        self.text_optimizer = torch.optim.SGD(pair.text.parameters(), lr=0.2, momentum=0.9)
        self.image_schedule = LinearLR(self.image_optimizer, start_factor=0.1, total_iters=10)
        self.text_schedule = StepLR(self.text_optimizer, step_size=10, gamma=0.5)

    def step(self, images, texts):
        self.image_optimizer.zero_grad()
        report = self.batch.backward((images, texts))  # adds to what .grad of the text tower holds
        self.image_optimizer.step()
        self.image_schedule.step()
        self.done += 1
        if self.done % self.text_every == 0:
            self.text_optimizer.step()
            self.text_optimizer.zero_grad()
            self.text_schedule.step()
        return report


def views(samples):
    """Two noisy views of the same hidden causes."""
    rule = torch.Generator().manual_seed(0)
    to_images, to_texts = torch.randn(8, 64, generator=rule), torch.randn(8, 32, generator=rule)
    causes = torch.randn(samples, 8)
    images, texts = causes @ to_images, causes @ to_texts
    return images + 0.1 * torch.randn_like(images), texts + 0.1 * torch.randn_like(texts)


if __name__ == "__main__":
    torch.manual_seed(0)
    training = Training(Pair(), micro_batch_size=128)
    for number in range(60):
        report = training.step(*views(512))
        if number % 20 == 19:
            with torch.no_grad():
                images, texts = training.pair.eval()(*views(512))
            training.pair.train()
            found = ((images @ texts.T).argmax(1) == torch.arange(512)).float().mean()
            print(
                f"step {number + 1}: loss {report.loss:.3f}, {found:.0%} find their text among 512"
            )
