-- SPDX-License-Identifier: Apache-2.0
--- Public name. Arguments of recipes: key=value words against a table of settings.
return require "bs.settings.args"
