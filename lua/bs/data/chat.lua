-- SPDX-License-Identifier: Apache-2.0
--- Chat layouts: what models' own templates write around the turns of a text conversation. tests/lua/chat_spec.lua
-- holds layouts to the renderings of the templates that they stand for (bs.data.templates). A family names the layout
-- of models that come without a template as `chat`.
--
-- layout(messages, ctx) gives a list of segments {text, trained, special}, or nil and the reason.
--   messages  {role = "system" | "user" | "assistant", content = text}; a system message only comes first
--   ctx       has(piece): is it a token of the vocabulary; bos, eos: these tokens as texts, "" where there is none
--             (nil: the layout's usual one); today: the day of the run; generate: end where an answer begins
--   special   the text is one token; the texts of all other segments are plain, whatever they hold
--   trained   every answer, and the token that ends its turn
local spaces = require "bs.data.spaces"

local chat = {}

-- A list of segments, and what appends a text and a token to it. Texts of one kind are one segment: where one ends, a
-- token of the whole text may be cut.
local function builder()
  local list = {}
  return list, function(text, trained)
    local last = list[#list]
    trained = trained == true
    if text == "" then return end
    if last and not last.special and last.trained == trained then
      last.text = last.text .. text
    else
      list[#list + 1] = { text = text, trained = trained, special = false }
    end
  end, function(text, trained)
    if text ~= "" then list[#list + 1] = { text = text, trained = trained == true, special = true } end
  end
end

local trim = spaces.trim

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

-- One turn by the builder's functions; before: what stands before an answer and is not trained.
local function chatml_turn(text, token, role, content, before)
  token "<|im_start|>"
  text(role .. "\n" .. (before or content))
  if before then text(content, true) end
  token("<|im_end|>", before ~= nil)
  text "\n"
end

local function chatml(messages, ctx, system)
  local list, text, token = builder()
  if system and messages[1].role ~= "system" then chatml_turn(text, token, "system", system) end
  for _, m in ipairs(messages) do chatml_turn(text, token, m.role, m.content, m.role == "assistant" and "" or nil) end
  if ctx.generate then
    token "<|im_start|>"
    text "assistant\n"
  end
  return list
end

--- Most models with <|im_start|>; qwen2, qwen2_5 and smollm2 begin with a system turn where a conversation has none.
function chat.chatml(messages, ctx) return chatml(messages, ctx) end

function chat.qwen2(messages, ctx) return chatml(messages, ctx, "You are a helpful assistant.") end

function chat.qwen2_5(messages, ctx)
  return chatml(messages, ctx, "You are Qwen, created by Alibaba Cloud. You are a helpful assistant.")
end

function chat.smollm2(messages, ctx)
  return chatml(messages, ctx, "You are a helpful AI assistant named SmolLM, trained by Hugging Face")
end

-- What an answer says behind its reasoning, and the reasoning (nil: it has none).
local function split_reasoning(content)
  local first = content:find("</think>", 1, true)
  if not first then return content end
  local reasoning = content:sub(1, first - 1):gsub("\n+$", "")
  reasoning = reasoning:match(".*<think>(.*)$") or reasoning
  return (content:match(".*</think>(.*)$"):gsub("^\n+", "")), (reasoning:gsub("^\n+", ""):gsub("\n+$", ""))
end

local function is_tool_response(content)
  return content:sub(1, 15) == "<tool_response>" and content:sub(-16) == "</tool_response>"
end

--- Thinking is off where an answer is asked for. Answers before the last question lose their reasoning; the last one
-- has some, an empty one where the row gives none.
function chat.qwen3(messages, ctx)
  local list, text, token = builder()
  local question = #messages
  for i = #messages, 1, -1 do
    if messages[i].role == "user" and not is_tool_response(messages[i].content) then
      question = i
      break
    end
  end
  local empty = "<think>\n\n</think>\n\n"
  for i, m in ipairs(messages) do
    local content, before = m.content, nil
    if m.role == "assistant" then
      local reasoning
      content, reasoning = split_reasoning(content)
      before = ""
      if i > question and (i == #messages or (reasoning or "") ~= "") then
        content = content:gsub("^\n+", "")
        if reasoning then content = "<think>\n" .. reasoning .. "\n</think>\n\n" .. content else before = empty end
      end
    end
    chatml_turn(text, token, m.role, content, before)
  end
  if ctx.generate then
    token "<|im_start|>"
    text("assistant\n" .. empty)
  end
  return list
end

-- ---- Llama -----------------------------------------------------------------------------------------------

-- date: of "Today Date", where there is such a line.
local function llama3(messages, ctx, date)
  local list, text, token = builder()
  token(ctx.bos or "<|begin_of_text|>")
  local function turn(role, content, trained)
    token "<|start_header_id|>"
    text(role)
    token "<|end_header_id|>"
    text("\n\n" .. (trained and "" or content))
    if trained then text(content, true) end
    token("<|eot_id|>", trained)
  end
  local rest, system = split_system(messages)
  local dates = date and ("Cutting Knowledge Date: December 2023\nToday Date: %s\n\n"):format(date) or ""
  if system or date then turn("system", dates .. trim(system or "")) end
  for _, m in ipairs(rest) do turn(m.role, trim(m.content), m.role == "assistant") end
  if ctx.generate then
    token "<|start_header_id|>"
    text "assistant"
    token "<|end_header_id|>"
    text "\n\n"
  end
  return list
end

--- llama3_1 (and 3.3) has a system turn with a fixed day, llama3_2 with today's.
function chat.llama3(messages, ctx) return llama3(messages, ctx) end
function chat.llama3_1(messages, ctx) return llama3(messages, ctx, "26 Jul 2024") end
function chat.llama3_2(messages, ctx) return llama3(messages, ctx, ctx.today or os.date "%d %b %Y") end

function chat.llama2(messages, ctx)
  local list, text, token = builder()
  local rest, system = split_system(messages)
  local ok, reason = alternating(rest)
  if not ok then return nil, reason end
  for i, m in ipairs(rest) do
    if m.role == "assistant" then
      text(" " .. trim(m.content) .. " ", true)
      token(ctx.eos or "</s>", true)
    else
      local content = i == 1 and system and "<<SYS>>\n" .. system .. "\n<</SYS>>\n\n" .. m.content or m.content
      token(ctx.bos or "<s>")
      text("[INST] " .. trim(content) .. " [/INST]")
    end
  end
  return list
end

-- ---- Mistral -----------------------------------------------------------------------------------------------

-- o: what stands before and after [INST], before [/INST] and before an answer; last: the system text stands in the last
-- question.
local function mistral(messages, ctx, o)
  local list, text, token = builder()
  local rest, system = split_system(messages)
  local ok, reason = alternating(rest)
  if not ok then return nil, reason end
  local mark = ctx.has "[INST]" and token or text
  token(ctx.bos or "<s>")
  for i, m in ipairs(rest) do
    if m.role == "assistant" then
      text(o.answer .. m.content, true)
      token(ctx.eos or "</s>", true)
    else
      local asked = system and i == (o.last and #rest or 1)
      text(o.lead or "")
      mark "[INST]"
      text(o.open .. (asked and system .. "\n\n" or "") .. m.content .. o.close)
      mark "[/INST]"
    end
  end
  return list
end

local text_marks <const> = { open = " ", close = " ", answer = "" }
local v1_marks <const> = { lead = " ", open = " ", close = " ", answer = " " }
local token_marks <const> = { open = " ", close = "", answer = " " }
local nemo_marks <const> = { open = "", close = "", answer = "", last = true }

--- [INST] is text in the first models and a token later.
function chat.mistral(messages, ctx) return mistral(messages, ctx, ctx.has "[INST]" and token_marks or text_marks) end

--- Mistral 7B v0.1 and v0.2 as published last. Mixtral has their first template, which refuses a system
-- message.
function chat.mistral_v1(messages, ctx) return mistral(messages, ctx, v1_marks) end

function chat.mixtral(messages, ctx)
  if messages[1].role == "system" then return nil, "this model's layout has no place for a system message" end
  return mistral(messages, ctx, text_marks)
end

--- The last ones write no space beside [INST], and the system text in the last question.
function chat.mistral_nemo(messages, ctx)
  if messages[1].role == "system" and messages[#messages].role ~= "user" then
    return nil, "this model's template leaves a system text out where an answer comes last; write it into the question"
  end
  return mistral(messages, ctx, nemo_marks)
end

--- Zephyr and TinyLlama: names of roles are text, the token that ends a text ends a turn.
function chat.zephyr(messages, ctx)
  local list, text, token = builder()
  for _, m in ipairs(messages) do
    local answer = m.role == "assistant"
    text(("<|%s|>\n"):format(m.role) .. (answer and "" or m.content))
    if answer then text(m.content, true) end
    token(ctx.eos or "</s>", answer)
    text "\n"
  end
  if ctx.generate then text "<|assistant|>\n" end
  return list
end

-- ---- Gemma ---------------------------------------------------------------------------------------------------

--- The system text stands before the first question. gemma1 and 2 refuse one.
function chat.gemma(messages, ctx)
  local list, text, token = builder()
  local rest, system = split_system(messages)
  local ok, reason = alternating(rest)
  if not ok then return nil, reason end
  token(ctx.bos or "<bos>")
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

function chat.gemma2(messages, ctx)
  if messages[1].role == "system" then return nil, "this model's layout has no place for a system message" end
  return chat.gemma(messages, ctx)
end

-- ---- Phi -------------------------------------------------------------------------------------------------------

-- br: what follows a role and the end of a turn; skip_blank: an empty system turn is left out.
local function phi(messages, ctx, br, skip_blank)
  local list, text, token = builder()
  for _, m in ipairs(messages) do
    local answer = m.role == "assistant"
    if m.role ~= "system" or m.content ~= "" or not skip_blank then
      token("<|" .. m.role .. "|>")
      text(br .. (answer and "" or m.content))
      if answer then text(m.content, true) end
      token("<|end|>", answer)
      text(br)
    end
  end
  if ctx.generate then
    token "<|assistant|>"
    text(br)
  else
    token(ctx.eos or "<|endoftext|>")
  end
  return list
end

--- These end with the token that ends a text; phi4_mini has no line breaks. phi4 has other tokens, and no such end.
function chat.phi3(messages, ctx) return phi(messages, ctx, "\n") end
function chat.phi3_5(messages, ctx) return phi(messages, ctx, "\n", true) end
function chat.phi4_mini(messages, ctx) return phi(messages, ctx, "") end

function chat.phi4(messages, ctx)
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

-- ---- by name, by tokens ------------------------------------------------------------------------------------------

--- The names of the layouts, in order.
chat.layouts = {}
for name in pairs(chat) do
  if name ~= "layouts" then chat.layouts[#chat.layouts + 1] = name end
end
table.sort(chat.layouts)

-- Families whose models know different layouts: which one, by their tokens; or nil and the reason.
local choices = {
  llama = function(ctx)
    local llama, chatml_token = ctx.has "<|start_header_id|>", ctx.has "<|im_start|>"
    if llama and chatml_token then return nil, "its vocabulary has the tokens of llama3 and of chatml" end
    return llama and "llama3" or chatml_token and "chatml" or "llama2"
  end,
  phi = function(ctx) return ctx.has "<|im_sep|>" and "phi4" or "phi3" end,
}
local chosen = {}
for name, choose in pairs(choices) do
  chat[name] = function(messages, ctx)
    local layout, reason = choose(ctx)
    if not layout then return nil, reason end
    return chat[layout](messages, ctx)
  end
  chosen[chat[name]] = choose
end

--- The name of a layout with this context: of the one that is chosen by tokens, where it is such; "" for a function
-- that is none of these. nil and the reason where tokens do not tell.
function chat.name(layout, ctx)
  if chosen[layout] then return chosen[layout](ctx) end
  for _, name in ipairs(chat.layouts) do
    if chat[name] == layout then return name end
  end
  return ""
end

return chat
