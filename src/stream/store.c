/* SPDX-License-Identifier: Apache-2.0 */
/*
** store.c: tensors that outlive a (visit, micro-batch). A DEVICE key has a place of its own per
** micro-batch. PASS and HOST keys of one (channels, dtype) share a pair of sets, each with a place per
** micro-batch: a key that is put or fetched takes the set that was not used last, unless it holds one.
** So a key lives on the device until two later ones have been put. HOST keys are also copied to pinned
** memory.
**
** Queues: puts are on compute, copies out on copy-out, fetches on copy-in. Every order between two
** queues is an event with a named wait; the host never waits here. Owner thread only.
**
** Two kinds of memory are shared by queues. A place: compute reads and writes it, copy-out reads it,
** copy-in writes it. out_open and back_open say which of the last two compute has not been ordered
** after; whoever writes the place next must be (bsi_store_claim). And the pinned rows of a HOST key:
** copy-out writes them, copy-in reads them. Those two are ordered directly: a fetch waits for all
** copies out before it, a copy out waits for the fetch in `reading`. The events are recorded over and
** over: a wait binds to the record that is current when it is issued (C3), so one event serves all
** puts.
*/
#include "stream/stream.h"

#include <string.h>

typedef struct place { /* [rows, channels] of one micro-batch on the device */
    bsi_addr at;
    int64_t rows;             /* in use; -1: not written since its key took the set */
    bsi_event *out, *back;    /* the last copy out of it, and the last fetch into it */
    bool out_open, back_open; /* issued, and compute has not been ordered after it */
} place;

typedef struct place_set {
    int key;   /* -1: none yet */
    place *at; /* [micros] */
} place_set;

typedef struct group { /* the pair that all PASS and HOST keys of one shape share */
    int64_t channels;
    bs_dtype dtype;
    place_set set[2];
    int last; /* set that was put or fetched last */
} group;

typedef struct boundary { /* a key and its places */
    bs_store_key spec;
    char *name;
    size_t bytes;              /* of one place */
    group *group;              /* NULL: DEVICE */
    place *own;                /* [micros], DEVICE only */
    bsi_mem *host;             /* micros x bytes, HOST only */
    int64_t *host_rows;        /* [micros] rows in pinned memory, or -1 */
    const bsi_event **reading; /* [micros] the fetch that may still read it; NULL: ordered already */
} boundary;

struct bs_store {
    bs_engine *e;
    const bs_batch *batch;
    int micros, n_keys, n_groups;
    int64_t tokens;
    boundary *keys;
    group *groups;
    bsi_event *written, *last_use, *copied_out;
    bool out_behind; /* copies out were issued and copy-in has not been ordered after them */
    bs_store_stats stats;
};

/* ---- sizes ---- */

static bs_status place_bytes(const bs_batch_cfg *b, const bs_store_key *k, size_t *out)
{
    if (!k->name || k->channels < 1 || (unsigned)k->dtype >= BS_DTYPE_COUNT ||
        (unsigned)k->stay > BS_STAY_HOST)
        return bsi_fail(BS_ARG, "store: key '%s' has %lld channels, dtype %d, stay %d",
                        k->name ? k->name : "(none)", (long long)k->channels, (int)k->dtype,
                        (int)k->stay);
    if (!bsi_mul_size((size_t)b->tokens, (size_t)k->channels, out) ||
        !bsi_mul_size(*out, bs_dtype_size(k->dtype), out) || !bsi_add_size(*out, 255, out))
        return bsi_fail(BS_ARG,
                        "store: key '%s' of %lld tokens x %lld channels is too large to address",
                        k->name, (long long)b->tokens, (long long)k->channels);
    *out = bsi_round_down(*out, 256);
    return BS_OK;
}

static bool same_pair(const bs_store_key *a, const bs_store_key *b)
{
    return a->stay != BS_STAY_DEVICE && b->stay != BS_STAY_DEVICE && a->channels == b->channels &&
           a->dtype == b->dtype;
}

static int first_of_pair(const bs_store_key *keys, int i) /* the key that made i's pair; i: itself */
{
    for (int j = 0; j < i; j++)
        if (same_pair(&keys[j], &keys[i]))
            return j;
    return i;
}

static bs_status add_bytes(size_t *sum, size_t bytes, size_t n, const char *name)
{
    if (!bsi_mul_size(bytes, n, &bytes) || !bsi_add_size(*sum, bytes, sum))
        return bsi_fail(BS_ARG, "store: the keys up to '%s' are too large to address", name);
    return BS_OK;
}

bs_status bs_store_bytes(const bs_batch_cfg *b, int n_keys, const bs_store_key *keys, size_t *device,
                         size_t *host)
{
    size_t micros = (size_t)BSI_MAX(b->micros, 0), bytes;
    *device = *host = 0;
    for (int i = 0; i < n_keys; i++) {
        BSI_TRY(place_bytes(b, &keys[i], &bytes));
        if (keys[i].stay == BS_STAY_DEVICE)
            BSI_TRY(add_bytes(device, bytes, micros, keys[i].name));
        else if (first_of_pair(keys, i) == i)
            BSI_TRY(add_bytes(device, bytes, 2 * micros, keys[i].name));
        if (keys[i].stay == BS_STAY_HOST)
            BSI_TRY(add_bytes(host, bytes, micros, keys[i].name));
    }
    return BS_OK;
}

/* ---- open and close ---- */

static bs_status open_places(bs_store *s, const char *name, size_t bytes, bool rotates, place **out)
{
    bsi_addr at;
    place *p = *out = bsi_alloc(BS_TAG_HEADER, (size_t)s->micros * sizeof *p);
    if (!p)
        return BS_NOMEM;
    BSI_TRY(bsi_pool_region(s->e->pool, name, bytes * (size_t)s->micros, &at));
    for (int j = 0; j < s->micros; j++) {
        p[j] = (place){.at = bsi_addr_add(at, (size_t)j * bytes), .rows = -1};
        if (!rotates)
            continue;
        BSI_TRY(bsi_event_open(s->e->dev, &p[j].out));
        BSI_TRY(bsi_event_open(s->e->dev, &p[j].back));
    }
    return BS_OK;
}

static bs_status open_group(bs_store *s, const boundary *k, group **out)
{
    group *g = *out = &s->groups[s->n_groups++];
    *g = (group){.channels = k->spec.channels, .dtype = k->spec.dtype, .last = 1};
    for (int i = 0; i < 2; i++) {
        g->set[i].key = -1;
        BSI_TRY(open_places(s, k->name, k->bytes, true, &g->set[i].at));
    }
    return BS_OK;
}

static bs_status open_host(bs_store *s, boundary *k)
{
    size_t n = (size_t)s->micros;
    k->host_rows = bsi_alloc(BS_TAG_HEADER, n * sizeof *k->host_rows);
    k->reading = bsi_alloc(BS_TAG_HEADER, n * sizeof *k->reading);
    if (!k->host_rows || !k->reading)
        return BS_NOMEM;
    for (size_t j = 0; j < n; j++)
        k->host_rows[j] = -1;
    return bsi_mem_alloc(s->e->dev, BSI_MEM_PINNED, BS_TAG_BOUNDARY, n * k->bytes, &k->host);
}

static bs_status open_key(bs_store *s, const bs_store_key *keys, int i)
{
    boundary *k = &s->keys[i];
    k->spec = keys[i];
    BSI_TRY(place_bytes(&s->batch->cfg, &k->spec, &k->bytes));
    if (!(k->name = bsi_strdup(BS_TAG_HEADER, keys[i].name)))
        return BS_NOMEM;
    k->spec.name = k->name;
    if (k->spec.stay == BS_STAY_DEVICE)
        return open_places(s, k->name, k->bytes, false, &k->own);
    int first = first_of_pair(keys, i);
    if (first == i)
        BSI_TRY(open_group(s, k, &k->group));
    else
        k->group = s->keys[first].group;
    return k->spec.stay == BS_STAY_HOST ? open_host(s, k) : BS_OK;
}

static bs_status open_parts(bs_store *s, int n_keys, const bs_store_key *keys)
{
    s->keys = bsi_alloc(BS_TAG_HEADER, (size_t)n_keys * sizeof *s->keys);
    s->groups = bsi_alloc(BS_TAG_HEADER, (size_t)n_keys * sizeof *s->groups);
    if (!s->keys || !s->groups)
        return BS_NOMEM;
    s->n_keys = n_keys;
    BSI_TRY(bsi_event_open(s->e->dev, &s->written));
    BSI_TRY(bsi_event_open(s->e->dev, &s->last_use));
    BSI_TRY(bsi_event_open(s->e->dev, &s->copied_out));
    for (int i = 0; i < n_keys; i++)
        BSI_TRY(open_key(s, keys, i));
    return bs_store_bytes(&s->batch->cfg, n_keys, keys, &s->stats.device_bytes, &s->stats.host_bytes);
}

bs_status bs_store_open(bs_engine *e, const bs_batch *b, int n_keys, const bs_store_key *keys,
                        bs_store **out)
{
    if (!e || !b || n_keys < 0 || (n_keys && !keys))
        return bsi_fail(BS_ARG, "store: an engine, a batch and %d keys are required", n_keys);
    bs_store *s = bsi_alloc(BS_TAG_HEADER, sizeof *s);
    if (!s)
        return BS_NOMEM;
    s->e = e;
    s->batch = b;
    s->micros = b->cfg.micros;
    s->tokens = b->cfg.tokens;
    bs_status st = open_parts(s, n_keys, keys);
    if (st != BS_OK) {
        bs_store_close(s);
        return bsi_wrap(st, "store");
    }
    *out = s;
    return BS_OK;
}

static void close_places(const bs_store *s, place *p)
{
    for (int j = 0; p && j < s->micros; j++) {
        bsi_event_close(p[j].out);
        bsi_event_close(p[j].back);
    }
    bsi_free(p);
}

void bs_store_close(bs_store *s)
{
    if (!s)
        return;
    for (int i = 0; i < s->n_keys; i++) {
        boundary *k = &s->keys[i];
        bsi_mem_free(k->host); /* drains what copies into it */
        bsi_free(k->own);
        bsi_free(k->host_rows);
        bsi_free(k->reading);
        bsi_free(k->name);
    }
    for (int i = 0; i < s->n_groups; i++) {
        close_places(s, s->groups[i].set[0].at);
        close_places(s, s->groups[i].set[1].at);
    }
    bsi_event_close(s->written);
    bsi_event_close(s->last_use);
    bsi_event_close(s->copied_out);
    bsi_free(s->groups);
    bsi_free(s->keys);
    bsi_free(s);
}

/* ---- use ---- */

static bs_status check(const bs_store *s, int k, int micro)
{
    if (k < 0 || k >= s->n_keys)
        return bsi_fail(BS_ARG, "store: key %d of %d does not exist", k, s->n_keys);
    if (micro < 0 || micro >= s->micros)
        return bsi_fail(BS_ARG, "store: key '%s' has micro-batches 0..%d, %d was asked",
                        s->keys[k].name, s->micros - 1, micro);
    return BS_OK;
}

const bs_store_key *bsi_store_key(const bs_store *s, int k)
{
    return k >= 0 && k < s->n_keys ? &s->keys[k].spec : NULL;
}

static place_set *set_of(const bs_store *s, int k) /* the one that holds key k, or NULL */
{
    group *g = s->keys[k].group;
    return g->set[0].key == k ? &g->set[0] : g->set[1].key == k ? &g->set[1] : NULL;
}

static place *place_of(const bs_store *s, int k, int micro) /* NULL: not on the device */
{
    if (s->keys[k].own)
        return &s->keys[k].own[micro];
    place_set *set = set_of(s, k);
    return set ? &set->at[micro] : NULL;
}

/* The set that key k is to be written to. A key that holds one keeps it: micro-batches are put one by
   one. Else it takes the set that was not used last, because the layer that writes this key may still
   read the one written before, which is its input. The key that loses the set is off the device from
   here on: a HOST key can be fetched, a PASS key is gone. */
static place_set *take_set(bs_store *s, int k)
{
    group *g = s->keys[k].group;
    place_set *set = set_of(s, k);
    if (!set) {
        set = &g->set[1 - g->last];
        set->key = k;
        for (int j = 0; j < s->micros; j++)
            set->at[j].rows = -1;
    }
    g->last = set == &g->set[1];
    return set;
}

/* The place is about to be written on compute. A copy out of it, or a fetch into it, that its last key
   has left behind must be over by then: else pinned memory gets the new rows, or the place old ones. */
bs_status bsi_store_claim(bs_store *s, int k, int micro, bsi_addr *out)
{
    BSI_TRY(check(s, k, micro));
    place *p = s->keys[k].own ? &s->keys[k].own[micro] : &take_set(s, k)->at[micro];
    if (p->out_open)
        BSI_TRY(bsi_queue_wait(s->e->compute, p->out, "boundary: put after copy out"));
    if (p->back_open)
        BSI_TRY(bsi_queue_wait(s->e->compute, p->back, "boundary: put after fetch"));
    p->out_open = p->back_open = false;
    *out = p->at;
    return BS_OK;
}

static size_t bytes_of(const boundary *k, int64_t rows)
{
    return (size_t)rows * (size_t)k->spec.channels * bs_dtype_size(k->spec.dtype);
}

/* copy-out is ordered after the put that wrote the place, and after a fetch that may still read the
   pinned rows that are written here. */
static bs_status copy_out(bs_store *s, boundary *k, place *p, int micro)
{
    bs_engine *e = s->e;
    size_t bytes = bytes_of(k, p->rows);
    BSI_TRY(bsi_event_record(s->written, e->compute));
    BSI_TRY(bsi_queue_wait(e->copy_out, s->written, "boundary: copy out after put"));
    if (k->reading[micro])
        BSI_TRY(bsi_queue_wait(e->copy_out, k->reading[micro], "boundary: copy out after fetch"));
    k->reading[micro] = NULL;
    k->host_rows[micro] = p->rows;
    if (bytes)
        BSI_TRY(bsi_copy(e->copy_out, (bsi_addr){k->host, (size_t)micro * k->bytes}, p->at, bytes));
    s->stats.out_bytes += bytes;
    p->out_open = s->out_behind = true;
    BSI_TRY(
        bsi_event_record(p->out, e->copy_out)); /* for the next put here; copied_out: for any fetch */
    return bsi_event_record(s->copied_out, e->copy_out);
}

bs_status bsi_store_written(bs_store *s, int k, int micro, int64_t rows)
{
    place *p = place_of(s, k, micro);
    p->rows = rows;
    return s->keys[k].host ? copy_out(s, &s->keys[k], p, micro) : BS_OK;
}

bs_status bs_store_put(bs_store *s, int k, int micro, const bs_place *from)
{
    BSI_TRY(check(s, k, micro));
    const bs_store_key *spec = &s->keys[k].spec;
    if (!from->mem || from->dtype != spec->dtype || from->channels != spec->channels)
        return bsi_fail(BS_SHAPE,
                        "store: key '%s' takes %s rows of %lld channels, given %s rows of %lld",
                        spec->name, bs_dtype_name(spec->dtype), (long long)spec->channels,
                        from->mem ? bs_dtype_name(from->dtype) : "no", (long long)from->channels);
    if (from->rows < 0 || from->rows > s->tokens)
        return bsi_fail(BS_SHAPE, "store: key '%s' holds up to %lld rows, given %lld", spec->name,
                        (long long)s->tokens, (long long)from->rows);
    bsi_addr to, src = bsi_place_addr(from);
    BSI_TRY(bsi_store_claim(s, k, micro, &to));
    size_t bytes = bytes_of(&s->keys[k], from->rows);
    if (bytes && (to.mem != src.mem || to.off != src.off))
        BSI_TRY(bsi_copy(s->e->compute, to, src, bytes));
    return bsi_store_written(s, k, micro, from->rows);
}

bs_status bs_store_zero(bs_store *s, int k, int micro)
{
    bsi_addr to;
    int64_t rows = bs_batch_tokens(s->batch, micro);
    BSI_TRY(bsi_store_claim(s, k, micro, &to));
    size_t bytes = bytes_of(&s->keys[k], rows);
    if (bytes)
        BSI_TRY(bsi_fill(s->e->compute, to, 0, bytes));
    place_of(s, k, micro)->rows = rows;
    if (s->keys[k].host)
        s->keys[k].host_rows[micro] = -1; /* the put that follows copies it out */
    return BS_OK;
}

bs_status bs_store_get(bs_store *s, int k, int micro, bs_place *out)
{
    BSI_TRY(check(s, k, micro));
    boundary *key = &s->keys[k];
    place *p = place_of(s, k, micro);
    if (!p && key->host && key->host_rows[micro] >= 0)
        return bsi_fail(BS_STATE,
                        "store: key '%s' of micro-batch %d is in pinned memory; fetch it first",
                        key->name, micro);
    if (!p || p->rows < 0)
        return bsi_fail(
            BS_STATE, "store: key '%s' of micro-batch %d is not there: %s", key->name, micro,
            p ? "it has not been put" : "never put, or two later keys have taken its place");
    if (p->back_open) {
        BSI_TRY(bsi_queue_wait(s->e->compute, p->back, "boundary: get after fetch"));
        p->back_open = false;
        key->reading[micro] = NULL; /* the next put, and so its copy out, comes after this wait */
    }
    *out = bsi_place(p->at, key->spec.dtype, p->rows, s->tokens, key->spec.channels);
    return BS_OK;
}

bs_status bs_store_get_all(bs_store *s, int k, bs_place *out, int64_t *stride)
{
    bs_place at;
    BSI_TRY(check(s, k, 0));
    if (!s->keys[k].own)
        return bsi_fail(BS_STATE,
                        "store: key '%s' does not stay on the device; its micro-batches are apart",
                        s->keys[k].name);
    BSI_TRY(bs_store_get(s, k, 0, out));
    for (int j = 1; j < s->batch->micros; j++)
        BSI_TRY(bs_store_get(s, k, j, &at));
    *stride = (int64_t)(s->keys[k].bytes / bs_dtype_size(s->keys[k].spec.dtype));
    return BS_OK;
}

static bs_status check_fetch(const bs_store *s, const boundary *k)
{
    for (int j = 0; j < s->batch->micros; j++)
        if (k->host_rows[j] < 0)
            return bsi_fail(BS_STATE, "store: key '%s' of micro-batch %d is fetched before it was put",
                            k->name, j);
    return BS_OK;
}

static bool on_device(const bs_store *s, int k)
{
    const place_set *set = set_of(s, k);
    for (int j = 0; set && j < s->batch->micros; j++)
        if (set->at[j].rows < 0)
            return false;
    return set != NULL;
}

bs_status bs_store_fetch(bs_store *s, int k)
{
    BSI_TRY(check(s, k, 0));
    boundary *key = &s->keys[k];
    bs_engine *e = s->e;
    if (!key->host)
        return BS_OK; /* never leaves the device by itself */
    bool there = on_device(s, k);
    if (!there)
        BSI_TRY(check_fetch(s, key));
    place_set *set = take_set(s, k);
    if (there)
        return BS_OK;
    /* What compute was given so far may use the key that the set held; it is not known which op was its
       last. */
    BSI_TRY(bsi_event_record(s->last_use, e->compute));
    BSI_TRY(bsi_queue_wait(e->copy_in, s->last_use, "boundary: fetch after last use"));
    /* Copies out may still read the set, or write the rows that are fetched. They are in order: one
       wait is for all. */
    if (s->out_behind)
        BSI_TRY(bsi_queue_wait(e->copy_in, s->copied_out, "boundary: fetch after copy out"));
    s->out_behind = false;
    for (int j = 0; j < s->batch->micros; j++) {
        place *p = &set->at[j];
        size_t bytes = bytes_of(key, key->host_rows[j]);
        if (bytes)
            BSI_TRY(bsi_copy(e->copy_in, p->at, (bsi_addr){key->host, (size_t)j * key->bytes}, bytes));
        BSI_TRY(bsi_event_record(p->back, e->copy_in));
        s->stats.back_bytes += bytes;
        p->rows = key->host_rows[j];
        p->back_open = true;
        p->out_open = false; /* the fetch comes after it, and compute will wait for the fetch */
        key->reading[j] = p->back;
    }
    return BS_OK;
}

bs_status bs_store_read(bs_store *s, int k, int micro, bs_array **out)
{
    bs_place at;
    bs_array *raw = NULL;
    *out = NULL;
    BSI_TRY(bs_store_get(s, k, micro, &at));
    BSI_TRY(bs_array_new(at.dtype, 2, (const int64_t[]){at.rows, at.channels}, &raw));
    bs_status st =
        raw->bytes ? bsi_engine_read(s->e, bsi_place_addr(&at), raw->bytes, raw->data) : BS_OK;
    if (st == BS_OK && at.dtype != BS_DTYPE_F32)
        st = bs_array_cast(raw, BS_DTYPE_F32, out);
    else if (st == BS_OK) {
        *out = raw;
        raw = NULL;
    }
    bs_array_free(raw);
    return st;
}

void bs_store_stats_get(const bs_store *s, bs_store_stats *out)
{
    *out = s->stats;
}
