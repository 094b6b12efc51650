-- SPDX-License-Identifier: Apache-2.0
--- Public name. A job: a model, a plan, an optimizer and data, to be stepped, run, saved.
return require "bs.train.job"
