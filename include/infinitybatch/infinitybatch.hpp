#pragma once

// Everything that a program needs. Code that cares about compile times includes single headers.

#include <infinitybatch/core/batch.hpp>
#include <infinitybatch/core/batch_source.hpp>
#include <infinitybatch/core/bytes.hpp>
#include <infinitybatch/core/errors.hpp>
#include <infinitybatch/coupled/across_batch.hpp>
#include <infinitybatch/loss/contrastive.hpp>
#include <infinitybatch/loss/coupled.hpp>
#include <infinitybatch/loss/criteria.hpp>
#include <infinitybatch/loss/loss.hpp>
#include <infinitybatch/memory/budget.hpp>
#include <infinitybatch/memory/limit.hpp>
#include <infinitybatch/memory/statistics.hpp>
#include <infinitybatch/step/batch_dim.hpp>
#include <infinitybatch/step/bench.hpp>
#include <infinitybatch/step/module.hpp>
#include <infinitybatch/step/verify.hpp>
#include <infinitybatch/step/virtual_batch.hpp>
#include <infinitybatch/step/wrap.hpp>
#include <infinitybatch/train/callback.hpp>
#include <infinitybatch/train/evaluation.hpp>
#include <infinitybatch/train/noise_scale.hpp>
#include <infinitybatch/train/trainer.hpp>
