/* SPDX-License-Identifier: Apache-2.0 */
/* The cpu device on its own: copies, fills, events, waits. */
#include "dev/dev.h"
#include <setjmp.h>
#include <stdarg.h>
#include <string.h>

#include <cmocka.h>

static void test_copy(void **state)
{
    (void)state;
    bs_dev *d;
    bsi_queue *q, *r;
    bsi_event *e;
    bsi_mem *m, *h;
    assert_int_equal(bs_dev_open("cpu", NULL, &d), BS_OK);
    assert_int_equal(bsi_queue_open(d, "compute", &q), BS_OK);
    assert_int_equal(bsi_queue_open(d, "copy", &r), BS_OK);
    assert_int_equal(bsi_event_open(d, &e), BS_OK);
    assert_int_equal(bsi_mem_alloc(d, BSI_MEM_DEVICE, BS_TAG_MISC, 4096, &m), BS_OK);
    assert_int_equal(bsi_mem_alloc(d, BSI_MEM_PINNED, BS_TAG_STAGING, 4096, &h), BS_OK);
    for (int i = 0; i < 5000; i++) {
        assert_int_equal(bsi_fill(q, (bsi_addr){m, 0}, i & 255, 4096), BS_OK);
        assert_int_equal(bsi_event_record(e, q), BS_OK);
        assert_int_equal(bsi_queue_wait(r, e, "test: copy after fill"), BS_OK);
        assert_int_equal(bsi_copy(r, (bsi_addr){h, 0}, (bsi_addr){m, 0}, 4096), BS_OK);
        assert_int_equal(bsi_event_record(e, r), BS_OK);
        if (i % 100 == 0) {
            assert_int_equal(bsi_event_sync(e), BS_OK);
            assert_int_equal(((unsigned char *)h->host)[4095], i & 255);
        }
        assert_int_equal(bsi_queue_wait(q, e, "test: fill after copy"), BS_OK);
    }
    assert_int_equal(bsi_queue_sync(q), BS_OK);
    bsi_mem_free(m);
    bsi_queue_close(q);
    bs_dev_close(d);
    bsi_queue_close(r);
    bsi_event_close(e);
    bsi_mem_free(h);
    assert_int_equal(bs_host_bytes(BS_TAG_MISC), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_copy)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
