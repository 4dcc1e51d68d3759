#pragma once

namespace infinitybatch::app::help {

inline constexpr const char* kProgram =
    "Trains with any batch size on any device: the exact gradient of the whole batch, inside the\n"
    "memory that you allow.";

inline constexpr const char* kProgramFooter =
    "Exit codes:\n"
    "  0    done\n"
    "  1    error: data that cannot be read, a check that failed\n"
    "  2    usage: a flag or a configuration key that cannot be used\n"
    "  3    out of memory, no plan fits the memory budget, or no room to offload what waits\n"
    "  130  interrupted by Ctrl-C (143: by SIGTERM); the interrupted step was discarded, and with\n"
    "       train --save a checkpoint written\n"
    "Errors are one line on stderr. With --json, stdout has JSON lines only.\n\n"
    "Example:\n"
    "  infinitybatch train --batch-size all --memory-budget 24MiB";

inline constexpr const char* kTrain = "Train a model on digits, images, vectors or text";

inline constexpr const char* kTrainFooter =
    "Examples:\n"
    "  infinitybatch train --batch-size all --memory-budget 24MiB\n"
    "  infinitybatch train --data x.npy --labels y.npy --model mlp --epochs 5 --json\n"
    "  infinitybatch train --data table.csv --labels price_class\n"
    "  infinitybatch train --data photos --image-size 32\n"
    "  infinitybatch train --data book.txt --model transformer --batch-size 4096\n"
    "  infinitybatch train --batch-size all --memory-budget 24MiB --host-budget 64MiB\n"
    "  infinitybatch train --config run.toml --lr 0.001\n"
    "  infinitybatch train --save model.safetensors --checkpoint-every 10\n"
    "  infinitybatch train --resume model.checkpoint.safetensors --epochs 80\n\n"
    "A residual network has BatchNorm, whose statistics are those of the whole batch: what its "
    "layers\n"
    "are given waits for all samples, and is offloaded to host and disk where the budget is small. "
    "Held-\n"
    "out samples are measured with the running statistics.\n\n"
    "A configuration file is TOML with the names of the flags; a flag given as well wins:\n"
    "  memory-budget = \"24MiB\"\n"
    "  epochs = 40";

inline constexpr const char* kEvaluate = "Measure a saved model on samples it was not trained on";

inline constexpr const char* kEvaluateFooter =
    "Without --data these are the samples that its training held out. Other data are read as the\n"
    "training's were: classes and columns by their names, with its scaling and its size of "
    "images;\n"
    "a class or a column that it did not have is an error.\n\n"
    "Examples:\n"
    "  infinitybatch evaluate model.safetensors\n"
    "  infinitybatch evaluate model.safetensors --data x.npy --labels y.npy --json";

inline constexpr const char* kPredict = "Write the classes that a saved model gives samples";

inline constexpr const char* kPredictFooter =
    "Classes are int64 [n], scores float32 [n, classes]; for text one for each byte as well. "
    "Numbers\n"
    "are those of the training's classes, whose names are printed. Other data are read as in\n"
    "evaluate.\n\n"
    "Examples:\n"
    "  infinitybatch predict model.safetensors --output classes.npy\n"
    "  infinitybatch predict model.safetensors --data x.npy --labels y.npy --output scores.npy "
    "--scores";

inline constexpr const char* kExport = "Write a saved model's weights for Python";

inline constexpr const char* kExportFooter =
    "A .pt file is a dictionary that torch.load(path, weights_only=True) reads; .safetensors has\n"
    "the model's description beside the weights. Of a checkpoint the state of training is left\n"
    "out.\n\n"
    "Example:\n"
    "  infinitybatch export model.safetensors --output model.pt";

inline constexpr const char* kPlan =
    "Show the micro-batch sizes that a memory budget allows, with their peak and time";

inline constexpr const char* kPlanFooter =
    "Example:\n"
    "  infinitybatch plan --batch-size all --memory-budget 24MiB";

inline constexpr const char* kVerify =
    "Compare the gradients of micro-batches with those of the whole batch at once";

inline constexpr const char* kVerifyFooter =
    "The exit code is 1 where a gradient is not exact.\n\n"
    "Example:\n"
    "  infinitybatch verify --model resnet --batch-size 256 --micro-batch-size 16";

inline constexpr const char* kBench =
    "Time the ways to compute a batch's gradient, in turn, against the whole batch at once";

inline constexpr const char* kBenchFooter =
    "Strategies are run in turn, in an order that changes from round to round; what is shown are "
    "the\n"
    "median and the quartiles of the rounds' ratios, and peaks with all that was there before:\n"
    "  native       the whole batch at once, in the memory that is free\n"
    "  stream       micro-batches, one pass\n"
    "  retain-...   as a loss is computed that couples samples: two passes, with none, half or "
    "all\n"
    "               of the micro-batches' graphs retained, the others replayed\n"
    "  rerun        the same with none retained, and the model run again in place of replaying\n"
    "The memory budget is that of all but native. Where native does not fit, ratios are over the\n"
    "cheapest. Leave the machine alone meanwhile.\n\n"
    "Example:\n"
    "  infinitybatch bench --model resnet --batch-size 256 --memory-budget 24MiB --rounds 15";

inline constexpr const char* kDoctor =
    "Check this installation and say what would fail and how to mend it";

inline constexpr const char* kDoctorFooter =
    "The exit code is 1 where something is broken; notes and warnings leave it 0.\n\n"
    "Example:\n"
    "  infinitybatch doctor --json";

}  // namespace infinitybatch::app::help
