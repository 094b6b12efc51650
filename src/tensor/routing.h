/* SPDX-License-Identifier: Apache-2.0 */
/*
** routing.h: what a scope of routed rows asks of a routing. Private to the layer; owner thread only.
*/
#ifndef BS_ROUTING_H
#define BS_ROUTING_H

#include "bs/tensor.h"
#include "tensor/space.h"

/* Can rows [begin, begin + rows) be a scope's? */
bs_status bsi_routing_check(const bs_routing *r, const bs_engine *e, int64_t begin, int64_t rows);
const bs_batch *bsi_routing_batch(const bs_routing *r);
/* Of a scope of routed rows: where its rows begin in the order of experts, and the operand that says where those of n
   experts from `first` on do, [n + 1]. */
int64_t bsi_routing_begin(const bsi_space *s);
bsi_arg bsi_routing_starts(const bsi_space *s, int64_t first, int64_t n);
/* Their number, positions and identities. */
void bsi_routing_piece(const bs_routing *r, int64_t begin, int64_t rows, bsi_micro *out);

#endif
