-- SPDX-License-Identifier: Apache-2.0
--- Parts of layers that families share: tensors by their usual names, and what they compute.
local bs = require "bs"

local layers = {}

--- Layer norm with the {weight, bias} that `w` has for a norm with both.
function layers.layernorm(x, w, eps) return bs.op.layernorm(x, w.weight, w.bias, eps) end

--- Tensors of a linear layer: weight [out, in] and, if asked, bias [out], appended to a list.
function layers.linear(list, name, out, inn, bias)
  list[#list + 1] = { name = name .. ".weight", dims = { out, inn } }
  if bias then list[#list + 1] = { name = name .. ".bias", dims = { out } } end
end

--- A vector (norm weight), appended to a list.
function layers.vector(list, name, n)
  list[#list + 1] = { name = name, dims = { n } }
end

--- Weight and bias of a layer norm, appended to a list.
function layers.norm(list, name, n)
  layers.vector(list, name .. ".weight", n)
  layers.vector(list, name .. ".bias", n)
end

--- self_attn.{q,k,v,o}_proj of c.heads and c.kv_heads heads. bias: of q, k and v; o_bias: of o.
function layers.attention_tensors(list, c, bias, o_bias)
  local H, D = c.channels, c.head_dim
  layers.linear(list, "self_attn.q_proj", c.heads * D, H, bias)
  layers.linear(list, "self_attn.k_proj", c.kv_heads * D, H, bias)
  layers.linear(list, "self_attn.v_proj", c.kv_heads * D, H, bias)
  layers.linear(list, "self_attn.o_proj", H, c.heads * D, o_bias)
end

--- mlp.{gate,up,down}_proj.
function layers.mlp_tensors(list, c, bias)
  layers.linear(list, "mlp.gate_proj", c.hidden, c.channels, bias)
  layers.linear(list, "mlp.up_proj", c.hidden, c.channels, bias)
  layers.linear(list, "mlp.down_proj", c.channels, c.hidden, bias)
end

--- mlp.gate_up_proj, whose first half of rows is the gate, and mlp.down_proj.
function layers.fused_mlp_tensors(list, c)
  layers.linear(list, "mlp.gate_up_proj", 2 * c.hidden, c.channels)
  layers.linear(list, "mlp.down_proj", c.channels, c.hidden)
end

--- Causal attention with the numbers of c: heads, kv_heads, head_dim; scale (nil: head_dim^-0.5), softcap,
-- and the window in the layers that c.sliding names. sinks: a weight of one score per head, or nil.
function layers.attention(c, ctx, q, k, v, sinks)
  return ctx.attend(q, k, v, {
    sinks = sinks,
    heads = c.heads, kv_heads = c.kv_heads, head_dim = c.head_dim, scale = c.scale, softcap = c.softcap,
    window = c.sliding and c.sliding[ctx.layer] and c.window or 0,
  })
end

--- down(act(gate(x)) * up(x)) (+ residual, where one is given), Shazeer 2020; m: the `mlp` weights.
function layers.mlp(c, m, x, residual)
  return m.down_proj(bs.op.glu(m.gate_proj(x), m.up_proj(x), c.act), residual)
end

--- The same where one linear holds gate and up.
function layers.fused_mlp(c, m, x, residual)
  local both = m.gate_up_proj(x)
  local gate, up = bs.op.columns(both, 1, c.hidden), bs.op.columns(both, c.hidden + 1, c.hidden)
  return m.down_proj(bs.op.glu(gate, up, c.act), residual)
end

--- For a staged family whose experts are SwiGLUs of width c.expert_hidden: expert_tensors(c), and stages.expert. names:
-- of gate, up and down in an expert. The weight of a row is applied before the last product, where it costs less and
-- its gradient does not need the product; it is a factor of the row either way.
function layers.swiglu_experts(names)
  local function tensors(c)
    local t = {}
    layers.linear(t, names.gate, c.expert_hidden, c.channels)
    layers.linear(t, names.up, c.expert_hidden, c.channels)
    layers.linear(t, names.down, c.channels, c.expert_hidden)
    return t
  end
  return tensors, function(c, w, x, weight)
    return w[names.down](bs.op.row_scale(bs.op.glu(w[names.gate](x), w[names.up](x), c.act), weight, 1))
  end
end

--- stages.join of layers that add what their experts give.
function layers.join(_, h, y) return h + y end

--- Groups of LoRA targets under the usual names.
layers.lora = {
  attention = { "q_proj", "k_proj", "v_proj", "o_proj" },
  mlp = { "gate_proj", "up_proj", "down_proj" },
}

--- A family with what decoders of Llama's layout have in common: embed, head, prefix, peft_prefix, tensors, lora. What
-- is given stays; model_types, config and layer are the family's own. tensors asks c for bias (of q, k and v), o_bias
-- and mlp_bias.
function layers.decoder(family)
  local common = {
    peft_prefix = "base_model.model.", lora = layers.lora,
    embed = { name = "model.embed_tokens.weight" },
    head = { norm = "model.norm.weight", weight = "lm_head.weight" },
    prefix = function(i) return ("model.layers.%d."):format(i) end,
    tensors = function(c)
      local t = {}
      layers.vector(t, "input_layernorm.weight", c.channels)
      layers.attention_tensors(t, c, c.bias, c.o_bias)
      layers.vector(t, "post_attention_layernorm.weight", c.channels)
      layers.mlp_tensors(t, c, c.mlp_bias)
      return t
    end,
  }
  for field, value in pairs(common) do
    if family[field] == nil then family[field] = value end
  end
  return family
end

return layers
