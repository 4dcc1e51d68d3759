import infinitybatch as ib
import torch

model = torch.nn.Sequential(torch.nn.Linear(784, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 10))
optimizer = torch.optim.Adam(model.parameters())
batch = ib.VirtualBatch(model, torch.nn.CrossEntropyLoss(), memory_budget="64MiB")

images, labels = torch.randn(10000, 784), torch.randint(10, (10000,))
for step in range(3):
    optimizer.zero_grad()
    report = batch.backward(images, labels)  # exact gradients now in .grad
    optimizer.step()
    print(f"step {step}: loss {report.loss:.4f}, peak {report.peak_bytes} bytes")
