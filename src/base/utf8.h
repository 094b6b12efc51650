/* SPDX-License-Identifier: Apache-2.0 */
/*
** utf8.h: well-formed UTF-8 (Unicode 3.9): no overlong forms, no surrogates, nothing above U+10FFFF. Pure functions;
** any thread. bs_utf8_valid is public.
*/
#ifndef BS_UTF8_H
#define BS_UTF8_H

#include "base/base.h"

/* Bytes of the well-formed character at s (at most n of them, n > 0); 0: there is none. */
size_t bsi_utf8_step(const unsigned char *s, size_t n);
/* Bytes that one U+FFFD replaces at s, where no well-formed character begins (maximal subpart). *cut: all n bytes are
   the beginning of a character. */
size_t bsi_utf8_bad(const char *s, size_t n, bool *cut);

#endif
