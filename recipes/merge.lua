-- SPDX-License-Identifier: Apache-2.0
--- Merges an adapter into its base model: a new checkpoint folder that needs no adapter.
--
--   bslua recipes/merge.lua model=DIR adapter=DIR out=DIR [overwrite=true]
--
-- Works tensor by tensor: memory holds one weight. The base is not changed. The merged model is written beside out= and
-- put there when it is complete, so that a model that is there is whole until then: the disk needs room for both.
local bs = require "bs"
local args = require "bs.args"
local merge = require "bs.model.merge"
local budget = require "bs.plan.budget"

local cfg = args.parse(arg, {
  model = { "", "folder of the base model" },
  family = { "", "Lua file of a family, run in place of the one found by config.json's model_type" },
  adapter = { "", "folder of the PEFT adapter" },
  out = { "", "folder for the merged model: absent or empty" },
  overwrite = { false, "replace the model that is in out=; files that are no model's stay" },
  ignore = { {}, "patterns of tensors in the model's files to go on with where nothing reads them; they are copied" },
  threads = { 0, "threads of the arithmetic; 0: all cores", 0, 1024 },
})
for _, name in ipairs { "model", "adapter", "out" } do
  if cfg[name] == "" then bs.fail("usage", "%s=DIR is required (try: help)", name) end
end

local say <const> = bs.say

local r = merge.run {
  model = cfg.model, family = cfg.family ~= "" and cfg.family or nil, adapter = cfg.adapter, out = cfg.out,
  overwrite = cfg.overwrite, ignore = cfg.ignore, threads = cfg.threads, say = say,
}
if #r.left > 0 then say("not copied: %s", table.concat(r.left, ", ")) end
local _, peak = bs.rss()
say("%s: %d tensors merged, %s in %.1f s (%.0f MB/s); peak resident set %s", cfg.out, r.tensors, budget.mib(r.bytes),
  r.seconds, r.bytes / 1e6 / r.seconds, budget.mib(peak))
