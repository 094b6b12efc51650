/* SPDX-License-Identifier: Apache-2.0 */
/*
** A GPU that is lost for real: a kernel that runs over the end of its memory. Every call then repeats the
** one error, everything closes, no byte is left accounted, and a device that is opened after it says that
** the process has lost the GPU. A program of its own, since nothing brings the GPU back to a process. Exit
** 77: no GPU.
*/
#include "dev_support.h"

static void test_lost(void **state)
{
    (void)state;
    size_t before[BS_TAG_COUNT];
    bs_dev *d, *again;
    bsi_event *none;
    for (int t = 0; t < BS_TAG_COUNT; t++)
        before[t] = bs_host_bytes((bs_tag)t);
    OK(bs_dev_open("cuda", NULL, &d));
    bsi_queue *q = queue_new(d, "compute"), *idle = queue_new(d, "copy-in");
    bsi_mem *m = mem_new(d, BSI_MEM_DEVICE, 4096), *host = mem_new(d, BSI_MEM_PINNED, 4096);
    bsi_event *e = event_new(d);
    bsi_kcall call = {
        .op = BSK_SCALE, .n_args = 2, .n = {(int64_t)1 << 38}, .f = {1}, .label = "overrun"};
    call.arg[0] = call.arg[1] = (bsi_arg){at(m, 0), 4096, BSI_READWRITE};
    OK(bsi_launch(q, &call));
    OK(bsi_event_record(e, q));
    FAILS(bsi_event_sync(e), BS_DEVICE, "cudaErrorIllegalAddress");
    FAILS(bsi_queue_sync(idle), BS_DEVICE, "cudaErrorIllegalAddress");
    FAILS(bsi_copy(idle, at(host, 0), at(m, 0), 4096), BS_DEVICE, "is lost until it is closed");
    FAILS(bsi_event_open(d, &none), BS_DEVICE, "last issued: 'overrun'");
    bsi_event_close(e);
    bsi_mem_free(m);
    bsi_mem_free(host);
    bsi_queue_close(q);
    bsi_queue_close(idle);
    bs_dev_close(d);
    for (int t = 0; t < BS_TAG_COUNT; t++)
        assert_int_equal(bs_host_bytes((bs_tag)t), before[t]);
    FAILS(bs_dev_open("cuda", NULL, &again), BS_DEVICE, "start a new process");
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_lost)};
    if (!gpu_there()) {
        printf("no cuda device: %s\n", bs_error()->msg);
        return 77;
    }
    return cmocka_run_group_tests(tests, NULL, NULL);
}
