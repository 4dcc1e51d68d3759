"""Keras on torch: `fit` with an optimizer that accumulates."""

import os

import torch
from torch import nn

from .cases import IGNORED, SIZE, Case, Tokens, labelled
from .row import Row

DOCUMENTATION = "https://keras.io/api/optimizers/sgd/"


def fit(case: Case, model: nn.Module) -> None:
    os.environ["KERAS_BACKEND"] = "torch"
    import keras

    keras.config.set_floatx("float64")

    def in_batch(targets: torch.Tensor, outputs: torch.Tensor) -> torch.Tensor:
        return case.loss(outputs, targets)

    # Keras has classes last.
    last = [keras.layers.Permute((2, 1))] if isinstance(model, Tokens) else []
    network = keras.Sequential([keras.layers.TorchModuleWrapper(model), *last])
    cross_entropy = keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, ignore_class=IGNORED, dtype="float64"
    )
    optimizer = keras.optimizers.SGD(learning_rate=1.0, gradient_accumulation_steps=case.steps)
    network.compile(
        optimizer=optimizer,
        loss=cross_entropy if case.loss is labelled else in_batch,
        jit_compile=False,
    )
    network.fit(case.inputs, case.targets, batch_size=SIZE, epochs=1, shuffle=False, verbose=0)


ROWS = [
    Row("Keras", "`gradient_accumulation_steps=k`, torch backend", DOCUMENTATION, fit, ("keras",))
]
