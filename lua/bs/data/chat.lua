-- SPDX-License-Identifier: Apache-2.0
--- Plain chat layouts: what a model's own template writes around the turns of a text conversation. A family
-- names its layout as `chat`.
--
-- layout(messages, ctx) gives a list of segments {text, trained, special}, or nil and the reason.
--   messages  {role = "system" | "user" | "assistant", content = text}; a system message only comes first
--   ctx       has(piece): is it a token of the vocabulary; template: the model's own Jinja template or "",
--             looked at where models of one layout differ; generate: end where an answer begins
--   special   the text is one token; the texts of all other segments are plain, whatever they hold
--   trained   every answer, and the token that ends its turn
-- Segments are encoded one by one, so a training row has the same borders of tokens as a prompt whose answer
-- is generated.
local chat = {}

local function builder()
  local list = {}
  return list, function(text, trained)
    if text ~= "" then list[#list + 1] = { text = text, trained = trained == true, special = false } end
  end, function(text, trained)
    list[#list + 1] = { text = text, trained = trained == true, special = true }
  end
end

local function trim(text) return text:match("^%s*(.-)%s*$") end

local function mentions(ctx, text) return ctx.template:find(text, 1, true) ~= nil end

-- The messages without a leading system message, and its content.
local function split_system(messages)
  if messages[1].role ~= "system" then return messages end
  return table.move(messages, 2, #messages, 1, {}), messages[1].content
end

-- Layouts that have places for two roles only.
local function alternating(messages)
  for i, m in ipairs(messages) do
    if m.role ~= (i % 2 == 1 and "user" or "assistant") then
      return nil, "this model's layout takes user and assistant in turn, starting with user"
    end
  end
  return true
end

-- ---- ChatML --------------------------------------------------------------------------------------------

-- The system turn that some templates write where a conversation has none.
local function default_system(ctx)
  return ctx.template:match("<|im_start|>system\\n([^{}'\"]-)<|im_end|>")
    or ctx.template:match("<|im_start|>system\n([^{}'\"]-)<|im_end|>")
end

-- think(i): what stands before the content of answer i; content_of(i, content): the content as it is shown.
local function chatml(messages, ctx, think, content_of)
  local list, text, token = builder()
  local function turn(role, content, before, trained)
    token "<|im_start|>"
    text(role .. "\n" .. (trained and before or content))
    if trained then text(content, true) end
    token("<|im_end|>", trained)
    text "\n"
  end
  local system = messages[1].role ~= "system" and default_system(ctx)
  if system then turn("system", system) end
  for i, m in ipairs(messages) do
    local answer = m.role == "assistant"
    turn(m.role, answer and content_of(i, m.content) or m.content, answer and think(i), answer)
  end
  if ctx.generate then
    token "<|im_start|>"
    text("assistant\n" .. think(#messages + 1))
  end
  return list
end

--- Qwen 2, SmolLM2 and most others with <|im_start|>.
function chat.chatml(messages, ctx)
  return chatml(messages, ctx, function() return "" end, function(_, content) return content end)
end

--- Where the template knows enable_thinking, it is off: answers before the last question lose their reasoning,
-- the one after it has some, an empty one where the row gives none.
function chat.qwen3(messages, ctx)
  if not mentions(ctx, "enable_thinking") then return chat.chatml(messages, ctx) end
  local question = #messages
  for i, m in ipairs(messages) do
    if m.role == "user" then question = i end
  end
  local function reasons(i) return messages[i] and messages[i].content:find("</think>", 1, true) end
  return chatml(messages, ctx, function(i)
    return i > question and i >= #messages and not reasons(i) and "<think>\n\n</think>\n\n" or ""
  end, function(i, content)
    if i <= question then return content:match(".*</think>\n*(.*)") or content end
    return i == #messages and not reasons(i) and content:gsub("^\n+", "") or content
  end)
end

-- ---- Llama -----------------------------------------------------------------------------------------------

local function llama3(messages, ctx)
  local list, text, token = builder()
  token "<|begin_of_text|>"
  local function turn(role, content, trained)
    token "<|start_header_id|>"
    text(role)
    token "<|end_header_id|>"
    text("\n\n" .. (trained and "" or content))
    if trained then text(content, true) end
    token("<|eot_id|>", trained)
  end
  local rest, system = split_system(messages)
  -- From 3.1 on; the second date is the one that the template has where none is given.
  local dates = mentions(ctx, "Cutting Knowledge Date: December 2023")
    and "Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n" or ""
  if system or dates ~= "" then turn("system", dates .. trim(system or "")) end
  for _, m in ipairs(rest) do turn(m.role, trim(m.content), m.role == "assistant") end
  if ctx.generate then
    token "<|start_header_id|>"
    text "assistant"
    token "<|end_header_id|>"
    text "\n\n"
  end
  return list
end

local function llama2(messages)
  local list, text, token = builder()
  local rest, system = split_system(messages)
  local ok, reason = alternating(rest)
  if not ok then return nil, reason end
  for i, m in ipairs(rest) do
    local content = trim(m.content)
    if m.role == "assistant" then
      text(content .. " ", true)
      token("</s>", true)
    else
      if i == 1 and system then content = "<<SYS>>\n" .. system .. "\n<</SYS>>\n\n" .. content end
      token "<s>"
      text("[INST] " .. content .. " [/INST]")
    end
  end
  return list
end

--- Many models have Llama's layers; their tokens tell which layout they know.
function chat.llama(messages, ctx)
  if ctx.has "<|start_header_id|>" then return llama3(messages, ctx) end
  if ctx.has "<|im_start|>" then return chat.chatml(messages, ctx) end
  return llama2(messages)
end

-- ---- Mistral -----------------------------------------------------------------------------------------------

--- [INST] is text in the first models and a token later; the last ones write no space beside it.
function chat.mistral(messages, ctx)
  local list, text, token = builder()
  local rest, system = split_system(messages)
  local ok, reason = alternating(rest)
  if not ok then return nil, reason end
  local space = (ctx.template == "" or mentions(ctx, "[INST] ")) and " " or ""
  token "<s>"
  for i, m in ipairs(rest) do
    local content = m.content
    if m.role == "assistant" then
      text((ctx.has "[INST]" and space or "") .. content, true)
      token("</s>", true)
    else
      if i == 1 and system then content = system .. "\n\n" .. content end
      if ctx.has "[INST]" then
        token "[INST]"
        text(space .. content)
        token "[/INST]"
      else
        text("[INST] " .. content .. " [/INST]")
      end
    end
  end
  return list
end

-- ---- Gemma ---------------------------------------------------------------------------------------------------

function chat.gemma(messages, ctx)
  local list, text, token = builder()
  local rest, system = split_system(messages)
  local ok, reason = alternating(rest)
  if not ok then return nil, reason end
  token "<bos>"
  for i, m in ipairs(rest) do
    local content, answer = trim(m.content), m.role == "assistant"
    if i == 1 and system then content = system .. "\n\n" .. content end
    token "<start_of_turn>"
    text((answer and "model" or "user") .. "\n" .. (answer and "" or content))
    if answer then text(content, true) end
    token("<end_of_turn>", answer)
    text "\n"
  end
  if ctx.generate then
    token "<start_of_turn>"
    text "model\n"
  end
  return list
end

-- ---- Phi -------------------------------------------------------------------------------------------------------

local function phi4(messages, ctx)
  local list, text, token = builder()
  local function head(role)
    token "<|im_start|>"
    text(role)
    token "<|im_sep|>"
  end
  for _, m in ipairs(messages) do
    local answer = m.role == "assistant"
    head(m.role)
    text(m.content, answer)
    token("<|im_end|>", answer)
  end
  if ctx.generate then head "assistant" end
  return list
end

--- Phi-4 has other tokens; the template of Phi-4 mini has no line breaks.
function chat.phi3(messages, ctx)
  if ctx.has "<|im_sep|>" then return phi4(messages, ctx) end
  local list, text, token = builder()
  local lines = ctx.template == "" or mentions(ctx, "|>\n") or mentions(ctx, "|>\\n")
  local br = lines and "\n" or ""
  for _, m in ipairs(messages) do
    local answer = m.role == "assistant"
    token("<|" .. m.role .. "|>")
    text(br .. (answer and "" or m.content))
    if answer then text(m.content, true) end
    token("<|end|>", answer)
    text(br)
  end
  if ctx.generate then
    token "<|assistant|>"
    text(br)
  end
  return list
end

-- ---- GLM-4 -------------------------------------------------------------------------------------------------------

--- A turn has no end of its own: the next role's token ends it, after the last answer the user's. The line
-- break after <|assistant|> is the model's.
function chat.glm4(messages, ctx)
  local list, text, token = builder()
  token "[gMASK]"
  token "<sop>"
  for i, m in ipairs(messages) do
    local answer = m.role == "assistant"
    token("<|" .. m.role .. "|>", i > 1 and messages[i - 1].role == "assistant")
    text("\n" .. m.content, answer)
  end
  if ctx.generate then
    token "<|assistant|>"
  elseif messages[#messages].role == "assistant" then
    token("<|user|>", true)
  end
  return list
end

return chat
