-- SPDX-License-Identifier: Apache-2.0
--- Circles in graphs of files. A graph is graph[from][to] = why (a text for messages); a file that names none need not
-- be in it.
local sources = require "sources"

local circles = {}

local function sorted_keys(t)
  local keys = {}
  for key in pairs(t) do keys[#keys + 1] = key end
  table.sort(keys)
  return keys
end

--- The strongly connected components of more than one node, each a sorted list: files that all reach each other.
-- A node with an edge to itself is none.
function circles.find(graph) -- Tarjan's algorithm
  local index, low, on_stack, stack, found, n = {}, {}, {}, {}, {}, 0
  local function visit(node)
    n = n + 1
    index[node], low[node], on_stack[node] = n, n, true
    stack[#stack + 1] = node
    for _, to in ipairs(sorted_keys(graph[node] or {})) do
      if not index[to] then visit(to) end
      if on_stack[to] then low[node] = math.min(low[node], low[to]) end
    end
    if low[node] < index[node] then return end
    local part = {}
    repeat
      local member = table.remove(stack)
      on_stack[member] = nil
      part[#part + 1] = member
    until member == node
    table.sort(part)
    if #part > 1 then found[#found + 1] = part end
  end
  for _, node in ipairs(sorted_keys(graph)) do
    if not index[node] then visit(node) end
  end
  table.sort(found, function(a, b) return a[1] < b[1] end)
  return found
end

--- The graph of groups: an edge where a file of one group names one of another. Of several reasons the first in
-- order is kept.
function circles.grouped(graph, group_of)
  local grouped = {}
  for _, from in ipairs(sorted_keys(graph)) do
    for _, to in ipairs(sorted_keys(graph[from])) do
      local a, b = group_of(from), group_of(to)
      if a ~= b then
        grouped[a] = grouped[a] or {}
        grouped[a][b] = grouped[a][b] or ("%s -> %s (%s)"):format(from, to, graph[from][to])
      end
    end
  end
  return grouped
end

--- A circle as text: its members, and a line for each edge inside it.
function circles.describe(graph, circle)
  local lines, member = { table.concat(circle, ", ") }, {}
  for _, node in ipairs(circle) do member[node] = true end
  for _, from in ipairs(circle) do
    for _, to in ipairs(sorted_keys(graph[from] or {})) do
      if member[to] then lines[#lines + 1] = ("  %s -> %s: %s"):format(from, to, graph[from][to]) end
    end
  end
  return table.concat(lines, "\n")
end

--- What a graph has against the rule "no circle across groups, at most `most` inside each": a list of texts.
function circles.faults(graph, group_of, most)
  local faults, inside = {}, {}
  local groups = circles.grouped(graph, group_of)
  for _, circle in ipairs(circles.find(groups)) do
    faults[#faults + 1] = "folders in a circle: " .. circles.describe(groups, circle)
  end
  for _, circle in ipairs(circles.find(graph)) do
    local group = group_of(circle[1])
    for _, node in ipairs(circle) do
      if group_of(node) ~= group then group = nil break end
    end
    if group then -- one that crosses groups is told above
      inside[group] = (inside[group] or 0) + 1
      if inside[group] > most then
        faults[#faults + 1] = ("%s has %d circles of files, at most %d may be there: %s"):format(group, inside[group],
          most, circles.describe(graph, circle))
      end
    end
  end
  return faults
end

--- The folder of a path.
function circles.folder_of(path) return path:match "^(.*)/[^/]*$" or "." end

local function edge(graph, from, to, why)
  if from == to then return end
  graph[from] = graph[from] or {}
  graph[from][to] = graph[from][to] or why
end
circles.edge = edge

-- The source file of an object in a folder that CMake built; nil for an object whose source is gone.
local function source_of(object)
  local path = object:match "%.dir/(.*)%.o$"
  local file = path and io.open(path)
  if file then file:close() end
  return file and path
end

--- The graph of the objects of src/ and kernels/ in a build folder, by the symbols that one defines and another uses;
-- nil and the reason where nm or the objects are missing.
function circles.of_symbols(build)
  if not sources.has "nm" then return nil, "there is no nm" end
  local defined, uses, graph = {}, {}, {}
  local objects = "find %s/CMakeFiles \\( -path '*.dir/src/*.o' -o -path '*.dir/kernels/*.o' \\) 2>/dev/null"
  local command = (objects .. " -print0 | xargs -0 -r nm -A -P 2>/dev/null"):format(build)
  for _, line in ipairs(sources.lines_of(command)) do
    local object, symbol, kind = line:match "^(.*%.o): (%S+) (%a)"
    local path = object and source_of(object)
    if path and kind == "U" then
      uses[#uses + 1] = { path, symbol }
    elseif path and kind:find "[TDBRC]" then
      defined[symbol] = path
    end
  end
  for _, use in ipairs(uses) do
    local path, symbol = use[1], use[2]
    if defined[symbol] then edge(graph, path, defined[symbol], symbol) end
  end
  if not next(graph) then return nil, "no objects under " .. build end
  return graph
end

return circles
