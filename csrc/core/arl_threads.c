/* SPDX-License-Identifier: Apache-2.0 */
#include "core/arl_threads.h"

#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

_Static_assert(sizeof(atomic_uint) == 4, "what the kernel's futex calls expect");

enum {
    PIECE_BYTES = 1 << 20, /* least work worth one more thread, and the least piece */
    SPLIT_BYTES = 4 << 20, /* below, little is won, and a worker that is put aside costs much */
    PIECES_PER_THREAD = 4, /* evens out rows of unequal length and cores that are busy */
    DEFAULT_MAX = 32,      /* memory is saturated long before; an explicit number may pass it */
};

/*
 * One job at a time. Workers sleep on `generation`, which one system call wakes as many of as a
 * job is worth; there is no lock that the woken would then queue for. Whoever wakes in time
 * joins the job through `state` and takes pieces until there are none; the caller closes it then,
 * and waits for those inside. One that wakes late finds it closed, or a newer one open, and never
 * touches a job that is over.
 */
typedef struct pool {
    atomic_uint generation; /* futex: one more for each job, and at the end */
    atomic_uint state;      /* futex: JOB_OPEN, plus JOB_MEMBER for each worker inside */
    atomic_bool stop;
    int workers;
    pthread_t *threads;
    /* The job; written while the state is 0, read by members. */
    arl_task_fn task;
    void *context;
    int64_t count;
    int64_t grain;
    atomic_int_fast64_t next; /* first row that nobody has taken */
} pool_t;

enum { JOB_OPEN = 1, JOB_MEMBER = 2 };

/* `gate` serialises creation and use; a caller that finds it taken works alone. */
static pthread_mutex_t gate = PTHREAD_MUTEX_INITIALIZER;
static pool_t *pool;            /* under gate */
static bool pool_refused;       /* under gate: no hooks, or the process is exiting */
static bool hooks_registered;   /* under gate; inherited by children, as the hooks are */
static atomic_int thread_count; /* 0: not settled yet */

/* ---- how many ---------------------------------------------------------------------------- */

static int
affinity_count(void)
{
    cpu_set_t set;

    CPU_ZERO(&set);
    if (sched_getaffinity(0, sizeof(set), &set) != 0) {
        return 1; /* more CPUs than the set holds: rare enough to stay modest */
    }
    return CPU_COUNT(&set) > 0 ? CPU_COUNT(&set) : 1;
}

static bool
read_line(const char *path, char *line, size_t size)
{
    FILE *file = fopen(path, "re");
    bool found;

    if (file == NULL) {
        return false;
    }
    found = fgets(line, (int)size, file) != NULL;
    (void)fclose(file);
    return found;
}

/* CPUs, rounded up; 0 for "no limit" and for nonsense. */
static int
quota_cpus(long long quota, long long period)
{
    if (quota <= 0 || period <= 0 || quota / period >= INT_MAX) {
        return 0;
    }
    return (int)(quota / period + (quota % period != 0));
}

static int
quota_smaller(int a, int b)
{
    return a == 0 ? b : (b == 0 || a < b) ? a : b;
}

/* Version 2: the tightest cpu.max from the process's group up to the root. */
static int
quota_unified(const char *root, char *group)
{
    int cpus = 0;

    for (;;) {
        char path[PATH_MAX], line[64];
        long long quota, period;
        char *slash;

        if (snprintf(path, sizeof(path), "%s%s/cpu.max", root, group) < (int)sizeof(path) &&
            read_line(path, line, sizeof(line)) &&
            sscanf(line, "%lld %lld", &quota, &period) == 2) { /* "max 100000" does not match */
            cpus = quota_smaller(cpus, quota_cpus(quota, period));
        }
        slash = strrchr(group, '/');
        if (slash == NULL) {
            return cpus;
        }
        *slash = '\0';
    }
}

/* Version 1: the controller's own directory, as containers see it. */
static int
quota_legacy(const char *root)
{
    char path[PATH_MAX], quota[64], period[64];

    if (snprintf(path, sizeof(path), "%s/cpu/cpu.cfs_quota_us", root) >= (int)sizeof(path) ||
        !read_line(path, quota, sizeof(quota))) {
        return 0;
    }
    (void)snprintf(path, sizeof(path), "%s/cpu/cpu.cfs_period_us", root); /* shorter by one */
    if (!read_line(path, period, sizeof(period))) {
        return 0;
    }
    return quota_cpus(atoll(quota), atoll(period));
}

int
arl_threads_quota(const char *root, const char *membership)
{
    int cpus = quota_legacy(root);
    char line[PATH_MAX];
    FILE *file = fopen(membership, "re");

    if (file == NULL) {
        return cpus;
    }
    while (fgets(line, sizeof(line), file) != NULL) {
        if (strncmp(line, "0::/", 4) == 0) {
            line[strcspn(line, "\n")] = '\0';
            cpus = quota_smaller(cpus, quota_unified(root, line + 3));
        }
    }
    (void)fclose(file);
    return cpus;
}

static int
count_default(void)
{
    int count =
        quota_smaller(affinity_count(), arl_threads_quota("/sys/fs/cgroup", "/proc/self/cgroup"));

    return count < DEFAULT_MAX ? count : DEFAULT_MAX;
}

arl_status_t
arl_threads_prepare(arl_error_t *err)
{
    const char *text;
    char *end;
    long value;

    if (atomic_load_explicit(&thread_count, memory_order_relaxed) != 0) {
        return ARL_OK;
    }
    text = getenv("ARCTIC_RL_C_THREADS");
    if (text == NULL || *text == '\0') {
        atomic_store_explicit(&thread_count, count_default(), memory_order_relaxed);
        return ARL_OK;
    }
    value = strtol(text, &end, 10);
    if (*end != '\0' || value < 1 || value > ARL_THREADS_MAX) {
        return arl_error_set(err, ARL_ERR_CONFIG, "read ARCTIC_RL_C_THREADS",
                             "ARCTIC_RL_C_THREADS is \"%.64s\"; set a number from 1 to %d, or "
                             "unset it",
                             text, (int)ARL_THREADS_MAX);
    }
    atomic_store_explicit(&thread_count, (int)value, memory_order_relaxed);
    return ARL_OK;
}

int
arl_threads_count(void)
{
    if (arl_threads_prepare(NULL) != ARL_OK) {
        return count_default();
    }
    return atomic_load_explicit(&thread_count, memory_order_relaxed);
}

/* ---- the pool ------------------------------------------------------------------------------ */

static void
futex_wait(atomic_uint *word, unsigned value)
{
    (void)syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0);
}

static void
futex_wake(atomic_uint *word, int count)
{
    (void)syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, count, NULL, NULL, 0);
}

static void
pool_take_pieces(pool_t *self)
{
    for (;;) {
        int64_t begin = atomic_fetch_add_explicit(&self->next, self->grain, memory_order_relaxed);
        int64_t left = self->count - begin;

        if (left <= 0) {
            return;
        }
        self->task(self->context, begin, begin + (left < self->grain ? left : self->grain));
    }
}

static bool
pool_join(pool_t *self)
{
    unsigned state = atomic_load_explicit(&self->state, memory_order_relaxed);

    while ((state & JOB_OPEN) != 0) {
        if (atomic_compare_exchange_weak_explicit(&self->state, &state, state + JOB_MEMBER,
                                                  memory_order_acquire, memory_order_relaxed)) {
            return true;
        }
    }
    return false;
}

static void
pool_leave(pool_t *self)
{
    if (atomic_fetch_sub_explicit(&self->state, JOB_MEMBER, memory_order_release) == JOB_MEMBER) {
        futex_wake(&self->state, 1); /* closed, and the last one: the caller waits */
    }
}

static void *
pool_worker(void *argument)
{
    pool_t *self = argument;
    unsigned seen = 0;

    for (;;) {
        const unsigned generation = atomic_load_explicit(&self->generation, memory_order_acquire);

        if (atomic_load_explicit(&self->stop, memory_order_relaxed)) {
            return NULL;
        }
        if (generation == seen) {
            futex_wait(&self->generation, seen);
            continue;
        }
        seen = generation;
        if (pool_join(self)) {
            pool_take_pieces(self);
            pool_leave(self);
        }
    }
}

/* Workers take no signals: those belong to the interpreter's threads. */
static int
pool_start_worker(pool_t *self, pthread_t *thread_p)
{
    sigset_t all, before;
    int status;

    (void)sigfillset(&all);
    (void)pthread_sigmask(SIG_SETMASK, &all, &before);
    status = pthread_create(thread_p, NULL, pool_worker, self);
    (void)pthread_sigmask(SIG_SETMASK, &before, NULL);
    return status;
}

static pool_t *
pool_new(int workers)
{
    pool_t *self = calloc(1, sizeof(*self));

    if (self == NULL) {
        return NULL;
    }
    self->threads = calloc((size_t)workers, sizeof(*self->threads));
    if (self->threads == NULL) {
        free(self);
        return NULL;
    }
    while (self->workers < workers && pool_start_worker(self, &self->threads[self->workers]) == 0) {
        self->workers++;
    }
    if (self->workers == 0) {
        free(self->threads);
        free(self);
        return NULL;
    }
    return self;
}

/*
 * The child has the parent's memory but none of its threads. The gate may be held by one that does
 * not exist, and so may be a job's membership, so the old record is abandoned: a hundred bytes.
 */
static void
forget_pool_in_child(void)
{
    pthread_mutex_t fresh = PTHREAD_MUTEX_INITIALIZER;

    gate = fresh;
    pool = NULL;
    pool_refused = false;
}

/* At exit, after the interpreter is gone. A thread that still holds the gate runs on to the end
 * of the process; nothing of its pool is touched then. */
static void
stop_pool_at_exit(void)
{
    if (pthread_mutex_trylock(&gate) != 0) {
        return;
    }
    pool_refused = true;
    if (pool != NULL) {
        atomic_store_explicit(&pool->stop, true, memory_order_relaxed);
        (void)atomic_fetch_add_explicit(&pool->generation, 1, memory_order_release);
        futex_wake(&pool->generation, INT_MAX);
        for (int i = 0; i < pool->workers; i++) {
            (void)pthread_join(pool->threads[i], NULL);
        }
        free(pool->threads);
        free(pool);
        pool = NULL;
    }
    (void)pthread_mutex_unlock(&gate);
}

/* The pool, made on first use. Call with the gate held. */
static pool_t *
pool_get_locked(int threads)
{
    if (pool != NULL || pool_refused) {
        return pool;
    }
    if (!hooks_registered) {
        /* Without the hooks a pool would outlive fork and exit in ways that hang. */
        if (pthread_atfork(NULL, NULL, forget_pool_in_child) != 0 ||
            atexit(stop_pool_at_exit) != 0) {
            pool_refused = true;
            return NULL;
        }
        hooks_registered = true;
    }
    pool = pool_new(threads - 1); /* NULL when too little of something is left just now */
    return pool;
}

static void
pool_run(pool_t *self, int threads, int64_t pieces, int64_t count, arl_task_fn task, void *context)
{
    unsigned state;

    self->task = task;
    self->context = context;
    self->count = count;
    self->grain = count / pieces + (count % pieces != 0);
    atomic_store_explicit(&self->next, 0, memory_order_relaxed);
    atomic_store_explicit(&self->state, JOB_OPEN, memory_order_release);
    (void)atomic_fetch_add_explicit(&self->generation, 1, memory_order_release);
    futex_wake(&self->generation, threads - 1);
    pool_take_pieces(self);
    state = atomic_fetch_and_explicit(&self->state, ~(unsigned)JOB_OPEN, memory_order_acquire) &
            ~(unsigned)JOB_OPEN;
    while (state != 0) {
        futex_wait(&self->state, state);
        state = atomic_load_explicit(&self->state, memory_order_acquire);
    }
}

void
arl_parallel_for(int64_t count, int64_t nbytes, arl_task_fn task, void *context)
{
    const int64_t threads_most = arl_threads_count();
    int64_t pieces = nbytes / PIECE_BYTES;
    pool_t *workers;

    if (count <= 0) {
        return;
    }
    pieces = pieces < count ? pieces : count;
    if (pieces < 2 || nbytes < SPLIT_BYTES || threads_most < 2 ||
        pthread_mutex_trylock(&gate) != 0) {
        task(context, 0, count);
        return;
    }
    workers = pool_get_locked((int)threads_most);
    if (workers == NULL) {
        task(context, 0, count);
    }
    else {
        const int64_t threads = pieces < threads_most ? pieces : threads_most;
        const int64_t most = threads * PIECES_PER_THREAD;

        pool_run(workers, (int)threads, pieces < most ? pieces : most, count, task, context);
    }
    (void)pthread_mutex_unlock(&gate);
}
