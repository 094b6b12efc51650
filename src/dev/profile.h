/* SPDX-License-Identifier: Apache-2.0 */
/*
** profile.h: sums of the times of kernel launches. Backends add, the front hands the sums out.
*/
#ifndef BS_DEV_PROFILE_H
#define BS_DEV_PROFILE_H

#include "dev/dev.h"

/* Add a timed launch of the kernel `op`, a static name. Nothing is added when there is
   no memory. */
void bsi_profile_add(bsi_profile *p, const char *op, const char *label, double seconds);
void bsi_profile_clear(bsi_profile *p);
void bsi_profile_sort(bsi_profile *p); /* longest first */

#endif
