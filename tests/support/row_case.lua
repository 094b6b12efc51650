-- SPDX-License-Identifier: Apache-2.0
--- For specs of row formats: tokenizers over bytes, formats on them, rows as ids and as text. The token of a byte has
-- its number; those of SPECIAL follow.
local bs = require "bs"
local chat = require "bs.chat"
local formats = require "bs.data.formats"
local tiny = require "tiny"

--- What the specs share, with files in a folder of this name. told(): the lines that the user was told since the last
-- call of told or listen.
return function(name)
  local root, lines = tiny.folder(name), {}
  local rows = { root = root, SPECIAL = { "<s>", "</s>", "<|im_start|>", "<|im_end|>" } }
  rows.BOS, rows.EOS, rows.START, rows.END = 256, 257, 258, 259

  --- A folder with a tokenizer (tiny.tokenizer).
  function rows.folder(called, o)
    tiny.tokenizer(root .. "/" .. called, o)
    return root .. "/" .. called
  end
  rows.plain = rows.folder("plain", { special = rows.SPECIAL, eos = "</s>" })

  function rows.format(dir, layout, vocab)
    return formats.new(vocab or 300, formats.text(dir or rows.plain, layout or chat.chatml))
  end

  --- Ids of strings' bytes and of the ids between them.
  function rows.ids_of(...)
    local out = {}
    for _, part in ipairs { ... } do
      if type(part) == "number" then
        out[#out + 1] = part
      else
        for i = 1, #part do out[#out + 1] = part:byte(i) end
      end
    end
    return out
  end

  --- A row as text with its trained part in brackets.
  function rows.shown(dir, row, layout)
    local f = rows.format(dir, layout)
    local ids, labels = f:encode(row)
    if not ids then return nil, labels end
    return (formats.preview(ids, labels, f.tokenizer))
  end

  --- The row is none, for a reason that holds the text.
  function rows.refused(text, row, f)
    local ids, why = (f or rows.format()):encode(row)
    assert(ids == nil and why:find(text, 1, true), ("'%s' is not in: %s"):format(text, why))
  end

  --- Encoding the row ends the run with this exit status and a message that holds the text.
  function rows.fails(code, text, f, row)
    local ok, err = pcall(f.encode, f, row)
    assert(not ok and err.bs_exit == code and tostring(err):find(text, 1, true), tostring(err))
  end

  function rows.listen()
    lines = {}
    bs.log_to(function(line) lines[#lines + 1] = line end)
  end

  function rows.told()
    local said = lines
    lines = {}
    return said
  end

  return rows
end
