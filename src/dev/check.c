/* SPDX-License-Identifier: Apache-2.0 */
/* check.c: the validating wrapper around another device. */
#include "dev/dev_private.h"

const bsi_dev_ops bsi_dev_check;

void bsi_check_note(const bs_dev *dev, const char *fmt, ...)
{
    (void)dev, (void)fmt;
}
