"""A trainer's evaluation: forward only, under its budget, without a trace."""

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import _C, _criteria, _trim, callbacks
from ._loader import Batches
from ._metrics import Metrics
from ._model import ModelView
from .errors import StateError
from .virtual_batch import batch_dim_for, forward_of

if TYPE_CHECKING:
    from .trainer import Trainer


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """What `Trainer.evaluate` found."""

    #: Over all samples: of a separable loss the sum by one denominator, else the mean of the
    #: batches' losses weighted by their samples.
    loss: float
    samples: int
    #: By the metrics' names.
    metrics: dict[str, Any]
    seconds: float


def evaluate(trainer: "Trainer", loader: Any, metrics: Any) -> EvaluationResult:
    """See `Trainer.evaluate`."""
    begin = time.perf_counter()
    counts = (trainer.epochs_done, trainer.steps_done)
    counted = Metrics(metrics)
    trainer._callbacks.on_evaluation_begin(callbacks.EvaluationBegin(trainer, *counts))
    batches = Batches(loader, trainer._targets)
    batches.at_work = trainer._batches.not_begun_twice()
    modules = list(trainer._model.modules())
    modes = [(module, module.training) for module in modules]
    sizes = ("memory_budget", "micro_batch_size", "micro_batch_tokens")
    options = {n: trainer._options[n] for n in sizes}
    if not any(options.values()):
        options["memory_budget"] = "auto"
    options["trim"] = _trim.for_forward(
        trainer._options["trim"], forward_of(trainer._model), wrapped=False
    )
    # Random state is kept from here on: iterating a DataLoader draws, too.
    evaluation = _C.Evaluation(
        ModelView(trainer._model, exact_coupling=False),
        _criteria.resolve(trainer._loss),
        on_micro_batch=counted,
        batch_dim=batch_dim_for(trainer._model, trainer._options["batch_dim"]),
        **options,
    )
    try:
        for module in modules:
            module.training = False
        batches.begin(0, 0)
        while (batch := batches.next()) is not None:
            evaluation.add(*batch)
        if evaluation.samples() == 0:
            raise StateError("the loader gave no batch to evaluate")
        loss, samples = evaluation.loss(), evaluation.samples()
        results = counted.results()
    finally:
        for module, mode in modes:
            module.training = mode
        batches.put_back(workers=batches._source is trainer._batches._source)
        evaluation.close()
    result = EvaluationResult(loss, samples, results, time.perf_counter() - begin)
    trainer._callbacks.on_evaluation_end(
        callbacks.EvaluationEnd(trainer, *counts, loss, samples, results, result.seconds)
    )
    return result
