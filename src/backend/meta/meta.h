/* SPDX-License-Identifier: Apache-2.0 */
/* meta.h: the device that does nothing. */
#ifndef BS_META_H
#define BS_META_H

#include "dev/dev.h"

extern const bsi_dev_ops bsi_dev_meta;

#endif
