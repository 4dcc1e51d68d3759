"""What README's loop is given: the names that any training loop has."""

import infinitybatch as ib  # noqa: F401
import torch

model, criterion = torch.nn.Linear(4, 3), torch.nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = [(torch.randn(8, 4), torch.randint(3, (8,)))]
