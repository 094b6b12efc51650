/* SPDX-License-Identifier: Apache-2.0 */
/* An op that only its user knows: defined outside the tensor layer, with a forward and a backward of its own. */
#include "tape_case.h"
#include "tensor/op.h"

typedef struct times { /* y = by * x */
    double by;
    int forwards, backwards;
} times;

static bs_status times_launch(bsi_space *s, const bsi_value *x, double by, const bsi_value *y)
{
    bsi_kcall c = {.op = BSK_SCALE, .n_args = 2, .n = {x->count}, .f = {by}, .label = "times"};
    c.arg[0] = bsi_act_read(s->e, x->at, x->count);
    c.arg[1] = bsi_act_write(s->e, y->at, x->count);
    return bsi_op_launch(s->e, &c);
}

/* What a user's own functions count is behind ref, which is const to the tape and not to them. */
static times *times_of(const bsi_node *node)
{
    return (times *)(uintptr_t)node->ref[0];
}

static bs_status times_forward(bsi_space *s, const bsi_node *node)
{
    times_of(node)->forwards++;
    return times_launch(s, node->in[0], times_of(node)->by, node->out);
}

static bs_status times_backward(bsi_space *s, const bsi_node *node, bsi_value *dy)
{
    bsi_value *dx;
    times_of(node)->backwards++;
    BSI_TRY(bsi_grad_open(s, node->in[0], &dx));
    BSI_TRY(times_launch(s, dy, times_of(node)->by, dx));
    return bsi_grad_close(s, node->in[0], dx);
}

static bs_status times_op(bs_tensor *x, times *t, bs_tensor **out)
{
    static const bsi_op op = {
        .name = "times", .id = 1000, .forward = times_forward, .backward = times_backward};
    bsi_space *s;
    bs_tensor *y;
    bsi_node *node;
    BSI_TRY(bsi_op_begin(&op, 1, &x, &s));
    BSI_TRY(bsi_tensor_late(s, x->ndim, x->dim, x->capacity, &y));
    bs_status st = bsi_node_new(s, &op, 1, &x, y->value, &node);
    if (st == BS_OK)
        node->ref[0] = t;
    return bsi_op_finish(st, &op, y, out);
}

/* The tape runs it late and walks it as any other, and fails under its name. */
static void test_own_op(void **state)
{
    (void)state;
    fixture f;
    float v[T * C], r[T * C];
    times t = {.by = 2.5};
    start(&f);
    fix_seal(&f);
    fix_scope(&f, 0, true, false);
    uint64_t hash = bs_scope_hash(f.e);
    bs_tensor *x = fix_from(&f, T, C, fix_floats(&f, v, T * C)), *y, *z, *unread;
    ok(bs_tensor_want_grad(x));
    ok(times_op(x, &t, &y));
    assert_true(bs_scope_hash(f.e) != hash);
    assert_int_equal(t.forwards, 0);
    ok(bs_op_scale(y, 2.0, &z)); /* reads it */
    assert_int_equal(t.forwards, 1);
    ok(times_op(z, &t, &unread));
    bs_tensor *g = fix_from(&f, T, C, fix_floats(&f, r, T * C));
    ok(bs_scope_backward(f.e, 2, (bs_tensor *[]){z, unread}, (bs_tensor *[]){g, g}));
    assert_int_equal(t.forwards, 1); /* nobody reads the result of the second */
    assert_int_equal(t.backwards, 2);
    assert_grad(x, r, NULL, 5.0 + 2.5 * 5.0);
    assert_error(times_op(x, &t, &y), BS_STATE, "times: scope");
    release_all(x, y, z, unread, g);
    fix_close(&f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_own_op)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
