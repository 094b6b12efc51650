-- SPDX-License-Identifier: Apache-2.0
--- Public name. Training rows from files.
return require "bs.data.loader"
