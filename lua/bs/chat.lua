-- SPDX-License-Identifier: Apache-2.0
--- Public name. Layouts of chats, which a family names.
return require "bs.data.chat"
