-- SPDX-License-Identifier: Apache-2.0
--- Public name. A job: a spec, its plan and instance, and the optimizer's progress.
return require "bs.train.job"
