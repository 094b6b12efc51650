-- SPDX-License-Identifier: Apache-2.0
-- Module "bs.tokenizer": open(path), where path is a folder with tokenizer.json or the file.
return require "bs".tokenizer
