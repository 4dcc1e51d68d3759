"""Audits around the loops of others, with their own defaults. Nothing is downloaded."""

import os
from pathlib import Path
from typing import Any

import infinitybatch as ib
import pytest
import torch
from audit_support import CRITERION, X, Y, codes, loader, loss, net, sgd, with_dropout
from torch import nn
from torch.nn import functional as F

os.environ["HF_HUB_OFFLINE"] = "1"
accelerate = pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")
pl = pytest.importorskip("pytorch_lightning")
transformers.logging.set_verbosity_error()
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def no_state_of_accelerate() -> Any:
    yield
    accelerate.state.AcceleratorState._reset_state(True)
    accelerate.state.GradientState._reset_state()


@pytest.mark.parametrize("given", [None, loss])
@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("make", [net, with_dropout])
def test_accelerate(make: Any, precision: str, given: Any) -> None:
    """Divides each loss by gradient_accumulation_steps: right while all windows are full and even."""
    for samples, wanted in ((24, ["right", "right"]), (28, ["right", "right", "wrong"])):
        machine = accelerate.Accelerator(
            cpu=True, gradient_accumulation_steps=3, mixed_precision=precision
        )
        inner = make().float()
        model, optimizer, batches = machine.prepare(
            inner, sgd(inner), loader(4, samples, X.float().repeat(2, 1), Y.repeat(2))
        )
        with ib.audit.watch(model, optimizer, batches, loss=given) as watch:
            for x, y in batches:
                with machine.accumulate(model):
                    machine.backward(CRITERION(model(x), y))
                    optimizer.step()
                    optimizer.zero_grad()
        assert [report.verdict for report in watch.reports] == wanted, print(watch)
        accelerate.state.AcceleratorState._reset_state(True)
        accelerate.state.GradientState._reset_state()
    assert codes(watch.report) == ["other_divisor"] and "divided by 3" in str(watch)


class Classifier(pl.LightningModule):
    def __init__(self, past_forward: bool) -> None:
        super().__init__()
        self.net = net()
        self.past_forward = past_forward

    def forward(self, x: Any) -> Any:
        return self.net(x)

    def training_step(self, batch: Any, number: int) -> Any:
        x, y = batch
        value = CRITERION((self.net if self.past_forward else self)(x), y)
        self.log("loss", value)
        return value

    def validation_step(self, batch: Any, number: int) -> None:
        self.log("validation", CRITERION(self(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def fit(model: Any, batches: Any, folder: Path, **options: Any) -> None:
    pl.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        default_root_dir=str(folder),
        **options,
    ).fit(model, batches, batches)


@pytest.mark.parametrize("given", [None, loss])
@pytest.mark.parametrize("past_forward", [False, True])
def test_lightning(past_forward: bool, given: Any, tmp_path: Path) -> None:
    """Divides by accumulate_grad_batches too, and steps after the last batch."""
    model, batches = Classifier(past_forward), loader(4, 16)
    with ib.audit.watch(model, loader=batches, loss=given) as watch:
        fit(model, batches, tmp_path, accumulate_grad_batches=3)
    assert [report.verdict for report in watch.reports] == ["right", "wrong"]
    assert codes(watch.report) == ["other_divisor"] and "divided by 3" in str(watch)
    full = Classifier(past_forward)
    with ib.audit.watch(full, loader=batches, loss=given) as watch:
        fit(full, batches, tmp_path, accumulate_grad_batches=2, gradient_clip_val=0.05)
    assert watch.ok and "clipped after the sum" in watch.report.notes[0]


class Halving(Classifier):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for parameter in self.parameters():
            parameter.grad.mul_(0.5)


class FirstRows(Classifier):
    def training_step(self, batch: Any, number: int) -> Any:
        return CRITERION(self(batch[0][:2].repeat(2, 1)), batch[1][:2].repeat(2))


@pytest.mark.parametrize(
    ("kind", "code"), [(Halving, "scaled_after_sum"), (FirstRows, "other_rows")]
)
def test_lightning_with_a_mistake(kind: Any, code: str, tmp_path: Path) -> None:
    model, batches = kind(False), loader(4, 16)
    with ib.audit.watch(model, loader=batches) as watch:
        fit(model, batches, tmp_path, accumulate_grad_batches=2)
    assert [codes(report) for report in watch.reports] == [[code], [code]], print(watch)


VOCABULARY = 23


def llama(**options: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=16,
        use_cache=False,
        **options,
    )
    return transformers.LlamaForCausalLM(config)


def gpt2() -> Any:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=16, n_embd=16, n_layer=1, n_head=2, use_cache=False
    )
    return transformers.GPT2LMHeadModel(config)


def texts(count: int = 24) -> list[dict[str, torch.Tensor]]:
    """The first labels of some are ignored, so that micro-batches weigh differently."""
    ids = torch.randint(VOCABULARY, (count, 8), generator=torch.Generator().manual_seed(1))
    return [
        {
            "input_ids": row,
            "attention_mask": torch.ones_like(row),
            "labels": row.where(torch.arange(8) >= i % 7, -100),
        }
        for i, row in enumerate(ids)
    ]


class Tagger(nn.Module):
    """A model with a loss of its own that does not take num_items_in_batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(VOCABULARY, 16)
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, input_ids: Any, attention_mask: Any = None, labels: Any = None) -> Any:
        logits = self.head(self.table(input_ids))
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


class OwnMean(transformers.Trainer):
    """A `compute_loss` that does not look at num_items_in_batch."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        inputs = dict(inputs)
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        value = F.cross_entropy(outputs["logits"].transpose(1, 2), labels)
        return (value, outputs) if return_outputs else value


THREE_BATCHES = {
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 3,
    "max_steps": 2,
    "report_to": [],
    "save_strategy": "no",
    "logging_strategy": "no",
    "disable_tqdm": True,
    "use_cpu": True,
}


def train(model: Any, folder: Path, kind: Any = transformers.Trainer, **options: Any) -> None:
    settings = transformers.TrainingArguments(
        output_dir=str(folder),
        **THREE_BATCHES,
        seed=0,
        **options,
    )
    kind(model=model, args=settings, train_dataset=texts()).train()


def smoothed(model: Any, batch: Any) -> torch.Tensor:
    logits = model(batch["input_ids"], batch["attention_mask"])["logits"]
    return F.cross_entropy(logits[:, :-1].transpose(1, 2), batch["labels"][:, 1:])


#: Model, Trainer, its settings, loss=, and what an audit finds.
TRAINERS = {
    "its own loss": (llama, transformers.Trainer, {}, None, []),
    "its own loss, bf16": (llama, transformers.Trainer, {"bf16": True}, None, []),
    "its own loss, dropout": (
        lambda: llama(attention_dropout=0.3, attn_implementation="eager"),
        transformers.Trainer,
        {},
        None,
        [],
    ),
    "the loss given": (llama, transformers.Trainer, {}, smoothed, []),
    # Trainer counts the first labels, which this model's loss does not have: 70 of 73.
    "labels that are counted and not predicted": (
        gpt2,
        transformers.Trainer,
        {},  # clips to 1.0, which hides a factor and is looked behind
        None,
        ["other_factor"],
    ),
    "a loss that takes no count": (Tagger, transformers.Trainer, {}, None, ["mean_of_means"]),
    # Trainer does not divide where forward takes any keyword.
    "compute_loss without the count": (
        llama,
        OwnMean,
        {"max_grad_norm": 0.0},
        None,
        ["no_division"],
    ),
}


@pytest.mark.parametrize("name", TRAINERS)
def test_trainer(name: str, tmp_path: Path) -> None:
    make, kind, options, given, wanted = TRAINERS[name]
    model = make()
    with ib.audit.watch(model, loss=given) as watch:
        train(model, tmp_path, kind, **options)
    assert codes(watch.report) == wanted, print(watch)
    assert watch.ok == (not wanted) and len(watch.reports) == 2


class HalvingCallback(transformers.TrainerCallback):
    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        for parameter in given["model"].parameters():
            parameter.grad.mul_(0.5)


def test_a_callback_of_trainer_that_changes_gradients(tmp_path: Path) -> None:
    model = llama()
    settings = transformers.TrainingArguments(output_dir=str(tmp_path), **THREE_BATCHES, seed=0)
    with ib.audit.watch(model) as watch:
        transformers.Trainer(
            model=model, args=settings, train_dataset=texts(), callbacks=[HalvingCallback()]
        ).train()
    assert codes(watch.report) == ["scaled_after_sum"], print(watch)


def test_trainer_with_smoothed_labels_asks_for_the_loss(tmp_path: Path) -> None:
    model = llama()
    with pytest.raises(ib.StateError, match="give loss="), ib.audit.watch(model):
        train(model, tmp_path, label_smoothing_factor=0.1)


def test_keras_s_rule_by_hand() -> None:
    """Keras 3.12's optimizers hold the sum of micro-batch means and divide it by their number at
    the step, whatever their sizes."""
    model, optimizer, batches = net(), None, loader(4, 10)
    optimizer = sgd(model)
    with ib.audit.watch(model, optimizer) as watch:
        for x, y in batches:
            CRITERION(model(x), y).backward()
        for parameter in model.parameters():
            parameter.grad /= len(batches)
        optimizer.step()
    assert codes(watch.report) == ["mean_of_means"], print(watch)


def test_sentence_transformers_compare_a_micro_batch_s_own_negatives(tmp_path: Path) -> None:
    sentences = pytest.importorskip("sentence_transformers")
    datasets = pytest.importorskip("datasets")
    from sentence_transformers.sentence_transformer import losses, modules

    words = [f"w{i}" for i in range(40)]
    draws = torch.Generator().manual_seed(1)
    rows = [
        [" ".join(words[int(j)] for j in torch.randint(40, (5,), generator=draws)) for _ in "ab"]
        for _ in range(24)
    ]
    torch.manual_seed(0)
    layers = [modules.BoW(words), modules.Dense(40, 16)]
    model = sentences.SentenceTransformer(modules=layers, device="cpu")
    ranking = losses.MultipleNegativesRankingLoss(model)

    def loss(model: Any, batch: Any) -> torch.Tensor:
        return ranking([dict(features) for features in batch], None)

    settings = sentences.SentenceTransformerTrainingArguments(
        output_dir=str(tmp_path),
        **THREE_BATCHES,
        max_grad_norm=0.0,
    )
    data = datasets.Dataset.from_dict(
        {"anchor": [a for a, _ in rows], "positive": [b for _, b in rows]}
    )
    with ib.audit.watch(model, loss=loss) as watch:
        sentences.SentenceTransformerTrainer(
            model=model, args=settings, train_dataset=data, loss=ranking
        ).train()
    assert codes(watch.report) == ["fraction_of_negatives"], print(watch)
