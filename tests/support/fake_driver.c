/* SPDX-License-Identifier: Apache-2.0 */
/*
** fake_driver.c: a libcuda.so.1 for tests, with as much of a driver as the CUDA runtime asks for before
** it gives up: a version and no GPU. FAKE_VERSION is what it says to support. The runtime asks for every
** function by name; all but one answer that there is no device.
*/
#include <string.h>

enum { NO_DEVICE = 100 };

#define API __attribute__((visibility("default")))
API int cuGetProcAddress_v2(const char *name, void **fn, int version, unsigned long long flags,
                            int *how);

static int driver_version(int *version)
{
    *version = FAKE_VERSION;
    return 0;
}

static int no_device(void)
{
    return NO_DEVICE;
}

int cuGetProcAddress_v2(const char *name, void **fn, int version, unsigned long long flags, int *how)
{
    int (*find)(const char *, void **, int, unsigned long long, int *) = cuGetProcAddress_v2;
    int (*get_version)(int *) = driver_version, (*other)(void) = no_device;
    (void)version, (void)flags;
    if (strcmp(name, "cuGetProcAddress") == 0)
        memcpy(fn, &find, sizeof find);
    else if (strcmp(name, "cuDriverGetVersion") == 0)
        memcpy(fn, &get_version, sizeof get_version);
    else
        memcpy(fn, &other, sizeof other);
    if (how)
        *how = 0; /* found */
    return 0;
}
