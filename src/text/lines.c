/* SPDX-License-Identifier: Apache-2.0 */
/*
** lines.c: the ids of every line of a file, made by several threads. Under one lock a thread reads the
** next piece of the file, up to the end of a line, and appends an empty chunk for it; it fills the
** chunk without the lock. Chunks are in the order of the file whatever thread fills them. Only the
** caller's thread sees the result.
*/
#include "text/text.h"

#include <errno.h>
#include <pthread.h>
#include <string.h>
#include <unistd.h>

#define CHUNK       ((size_t)1 << 20) /* bytes of text */
#define MAX_THREADS 256

typedef struct chunk {
    int64_t first_line, lines;
    size_t *end; /* per line: ids of the chunk up to its end */
    int32_t *id;
    size_t n, cap;
} chunk;

struct bs_tok_lines {
    chunk **chunk;
    size_t n, cap;
    int64_t lines, ids;
};

typedef struct job {
    const bs_tok *tok;
    const char *path;
    unsigned flags;
    bs_tok_lines *out;
    pthread_mutex_t lock; /* of all below and of out's list */
    FILE *f;
    bsi_buf rest; /* read, but not yet given out: the beginning of a line */
    bool ended;
    bs_errinfo error; /* of the first thread that failed */
} job;

static void chunk_free(chunk *c)
{
    if (!c)
        return;
    bsi_free(c->end);
    bsi_free(c->id);
    bsi_free(c);
}

/* Reads until `text` holds whole lines, at least one unless the file has ended. Holds the lock. */
static bs_status read_lines(job *j, bsi_buf *text)
{
    text->n = 0;
    BSI_TRY(bsi_buf_put(text, j->rest.p, j->rest.n));
    j->rest.n = 0;
    while (!j->ended) {
        size_t from = text->n;
        BSI_TRY(bsi_buf_reserve(text, CHUNK));
        size_t got = fread(text->p + from, 1, CHUNK, j->f);
        if (ferror(j->f))
            return bsi_fail_sys(BS_IO, errno, "file '%s' cannot be read", j->path);
        j->ended = got < CHUNK;
        text->n = from + got;
        const char *last = got ? memrchr(text->p + from, '\n', got) : NULL;
        if (last && !j->ended) {
            size_t keep = (size_t)(last + 1 - text->p);
            BSI_TRY(bsi_buf_put(&j->rest, text->p + keep, text->n - keep));
            text->n = keep;
            break;
        }
    }
    return BS_OK;
}

static int64_t count_lines(const bsi_buf *text)
{
    int64_t n = text->n && text->p[text->n - 1] != '\n';
    const char *end = text->p + text->n;
    for (const char *s = text->p; text->n && (s = memchr(s, '\n', (size_t)(end - s))); s++)
        n++;
    return n;
}

/* The next piece of text and its chunk (NULL: the file has ended). Holds the lock. */
static bs_status take(job *j, bsi_buf *text, chunk **out)
{
    bs_tok_lines *l = j->out;
    void *p = l->chunk;
    *out = NULL;
    if (bs_cancelled())
        return bsi_fail(BS_CANCELLED, "encoding of '%s' was cancelled", j->path);
    BSI_TRY(read_lines(j, text));
    if (!text->n)
        return BS_OK;
    bs_status st = bsi_grow(&p, &l->cap, l->n + 1, sizeof *l->chunk);
    l->chunk = p;
    BSI_TRY(st);
    chunk *c = bsi_alloc(BS_TAG_MISC, sizeof *c);
    if (!c)
        return BS_NOMEM;
    c->first_line = l->lines;
    c->lines = count_lines(text);
    l->lines += c->lines;
    l->chunk[l->n++] = c;
    *out = c;
    return BS_OK;
}

static bs_status fill(const job *j, bs_tok_work *w, const bsi_buf *text, chunk *c)
{
    const char *s = text->p, *end = s + text->n;
    c->end = bsi_alloc(BS_TAG_MISC, (size_t)c->lines * sizeof *c->end);
    if (!c->end)
        return BS_NOMEM;
    for (int64_t i = 0; i < c->lines; i++) {
        bs_tok_ids ids;
        const char *stop = memchr(s, '\n', (size_t)(end - s));
        size_t n = stop ? (size_t)(stop - s) : (size_t)(end - s);
        bs_status st = bs_tok_encode(w, s, n, j->flags, &ids);
        if (st != BS_OK)
            return bsi_wrap(st, "%s: line %lld", j->path, (long long)(c->first_line + i + 1));
        void *p = c->id;
        st = bsi_grow(&p, &c->cap, c->n + (size_t)ids.n, sizeof *c->id);
        c->id = p;
        BSI_TRY(st);
        if (ids.n)
            memcpy(c->id + c->n, ids.id, (size_t)ids.n * sizeof *c->id);
        c->n += (size_t)ids.n;
        c->end[i] = c->n;
        s += n + 1;
    }
    return BS_OK;
}

static void *run(void *arg)
{
    job *j = arg;
    bsi_buf text = {0};
    bs_tok_work *w = NULL;
    chunk *c = NULL;
    bs_status st = bs_tok_work_new(j->tok, &w);
    do {
        pthread_mutex_lock(&j->lock);
        if (c)
            j->out->ids += (int64_t)c->n;
        c = NULL;
        if (st == BS_OK && j->error.status == BS_OK)
            st = take(j, &text, &c);
        if (st != BS_OK && j->error.status == BS_OK)
            j->error = *bs_error();
        pthread_mutex_unlock(&j->lock);
        if (c)
            st = fill(j, w, &text, c);
    } while (c);
    bs_tok_work_free(w);
    bsi_buf_free(&text);
    return NULL;
}

bs_status bs_tok_encode_file(const bs_tok *t, const char *path, int threads, unsigned flags,
                             bs_tok_lines **out)
{
    pthread_t thread[MAX_THREADS];
    int started = 0;
    long cores = sysconf(_SC_NPROCESSORS_ONLN);
    if (threads < 0 || threads > MAX_THREADS)
        return bsi_fail(BS_ARG, "tokenizer: %d threads are not between 0 and %d", threads, MAX_THREADS);
    if (flags & ~(unsigned)(BS_TOK_SPECIAL | BS_TOK_LITERAL))
        return bsi_fail(BS_ARG, "tokenizer: flags 0x%X do not belong to the encoding of a file", flags);
    if (!threads)
        threads = (int)BSI_MAX(1, BSI_MIN(cores, MAX_THREADS));
    job j = {.tok = t, .path = path, .flags = flags, .lock = PTHREAD_MUTEX_INITIALIZER};
    struct stat info;
    int fd = -1;
    BSI_TRY(bsi_open_regular(path, 0, &info, &fd, NULL));
    j.f = fdopen(fd, "rb");
    if (!j.f) {
        int sys = errno;
        close(fd);
        return bsi_fail_sys(BS_IO, sys, "file '%s' cannot be opened", path);
    }
    j.out = bsi_alloc(BS_TAG_MISC, sizeof *j.out);
    if (!j.out)
        j.error = *bs_error();
    /* This thread works too; with fewer threads than asked the result is the same. */
    while (j.out && started < threads - 1 && !pthread_create(&thread[started], NULL, run, &j))
        started++;
    if (j.out)
        run(&j);
    while (started > 0)
        pthread_join(thread[--started], NULL);
    fclose(j.f);
    bsi_buf_free(&j.rest);
    pthread_mutex_destroy(&j.lock);
    if (j.error.status != BS_OK) {
        bs_tok_lines_free(j.out);
        return bsi_fail_from(&j.error);
    }
    *out = j.out;
    return BS_OK;
}

void bs_tok_lines_free(bs_tok_lines *l)
{
    if (!l)
        return;
    for (size_t i = 0; i < l->n; i++)
        chunk_free(l->chunk[i]);
    bsi_free(l->chunk);
    bsi_free(l);
}

int64_t bs_tok_lines_count(const bs_tok_lines *l)
{
    return l->lines;
}

int64_t bs_tok_lines_ids(const bs_tok_lines *l)
{
    return l->ids;
}

bs_status bs_tok_lines_get(const bs_tok_lines *l, int64_t i, const int32_t **ids, int64_t *n)
{
    size_t low = 0, high = l->n;
    if (i < 0 || i >= l->lines)
        return bsi_fail(BS_ARG, "line %lld is not between 0 and %lld", (long long)i,
                        (long long)l->lines - 1);
    while (high - low > 1) {
        size_t mid = low + (high - low) / 2;
        if (l->chunk[mid]->first_line <= i)
            low = mid;
        else
            high = mid;
    }
    const chunk *c = l->chunk[low];
    int64_t k = i - c->first_line;
    size_t from = k ? c->end[k - 1] : 0;
    *ids = c->id + from;
    *n = (int64_t)(c->end[k] - from);
    return BS_OK;
}
