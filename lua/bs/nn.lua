-- SPDX-License-Identifier: Apache-2.0
--- Public name. What a family file is written with.
return require "bs.nn.nn"
